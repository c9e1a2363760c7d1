"""Live progress: lines where there is no terminal, a panel where there is one, and a summary at the
end."""

from __future__ import annotations

import io
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from gyre.observability.events import EventLog, read_events
from gyre.observability.progress.state import LiveState, advance
from gyre.observability.progress.terminal import (
    LineProgress,
    PanelProgress,
    make_progress,
    render_panel,
    show_measure,
    show_number,
    show_seconds,
    summary_lines,
)
from gyre.observability.report.build import gather, summarize
from observability_run import Clock, write_run


def run_rows(folder: Path, clock: Clock, *, done: bool = True) -> None:
    log = EventLog(folder / "events.jsonl", attempt=1, clock=clock, check_schema=False)
    log.emit("run.started", name="demo", stages=[{"name": "main", "steps": 4}])
    log.emit("stage.started", stage="main", steps=4)
    log.emit("eval.done", name="held_out", accuracy=0.4, n=500, step=0)
    for step in range(1, 5):
        clock.now += 2.0
        log.emit(
            "step.done",
            step=step,
            stage="main",
            metrics={"reward": 0.2 * step, "accuracy": 0.5, "kl": 0.001},
        )
    log.emit("fallback.sandbox", reason="no bubblewrap")
    log.emit("eval.done", name="held_out", accuracy=0.93, n=500, step=4)
    if done:
        log.emit("run.done")


def shown(progress: LineProgress, stream: io.StringIO, folder: Path) -> list[str]:
    for row in read_events(folder / "events.jsonl"):
        progress(row)
    return stream.getvalue().splitlines()


def test_lines_tell_stage_step_metrics_time_left_and_evaluations(tmp_path: Path) -> None:
    run_rows(tmp_path, Clock())
    stream = io.StringIO()
    progress = make_progress(plain=True, console=Console(file=stream, width=300))
    assert isinstance(progress, LineProgress)
    assert shown(progress, stream, tmp_path) == [
        "stage main (1/1, 4 steps)",
        "eval: held out accuracy 40.0% (n = 500, 95 % interval 35.8% to 44.4%) at step 0",
        "[main 1/4]  reward 0.200  accuracy 50.0%  KL 0.001",
        "[main 2/4]  reward 0.400  accuracy 50.0%  KL 0.001  2.0 s/step  4.0 s left",
        "[main 3/4]  reward 0.600  accuracy 50.0%  KL 0.001  2.0 s/step  2.0 s left",
        "[main 4/4]  reward 0.800  accuracy 50.0%  KL 0.001  2.0 s/step",
        "fallback.sandbox: reason=no bubblewrap",
        "eval: held out accuracy 93.0% (n = 500, 95 % interval 90.4% to 94.9%) at step 4",
    ]


def failure(log: EventLog, step: int, count: int, message: str, line: int = 7) -> None:
    kind = f"m:f raised KeyError at r.py:{line}"
    reason = f"{kind}: {message}"
    log.emit(
        "warn.reward_failed",
        step=step,
        what="f error",
        failure=kind,
        reason=reason,
        count=count,
        checks=16,
    )


def test_a_failure_of_a_reward_is_told_once_and_counted_at_the_end(tmp_path: Path) -> None:
    for progress_kind in (LineProgress, PanelProgress):
        log, stream = (
            EventLog(
                tmp_path / progress_kind.__name__, attempt=1, clock=Clock(), check_schema=False
            ),
            io.StringIO(),
        )
        progress = progress_kind(Console(file=stream, width=200))
        log.subscribe(progress)
        log.emit("stage.started", stage="main", steps=3)
        for step in (1, 2, 3):
            failure(log, step, step, f"'color {step}'")
        failure(log, 3, 1, "'size'", line=9)
        log.emit("run.done")
        told = [line.strip() for line in stream.getvalue().splitlines() if "reward" in line]
        assert told == [
            "reward failed: f error, 1 of 16 completions at step 1: m:f raised KeyError at "
            "r.py:7: 'color 1'",
            "reward failed: f error, 1 of 16 completions at step 3: m:f raised KeyError at "
            "r.py:9: 'size'",
        ]
        progress.summary(tmp_path)
        assert "reward failed 6 times: f error: m:f raised KeyError at r.py:7" in stream.getvalue()


def test_every_step_has_its_line_however_fast_it_was(tmp_path: Path) -> None:
    log, stream = (
        EventLog(tmp_path / "events.jsonl", attempt=1, clock=Clock(), check_schema=False),
        io.StringIO(),
    )
    progress = LineProgress(Console(file=stream, width=200))
    log.subscribe(progress)
    log.emit("stage.started", stage="sft", steps=300)
    for step in range(1, 301):
        log.emit("step.done", step=step, stage="sft", metrics={"loss": 1.0})
    lines = stream.getvalue().splitlines()[1:]
    assert [line.split("]")[0] for line in lines] == [f"[sft {step}/300" for step in range(1, 301)]


def test_an_event_of_every_step_leaves_one_line_per_step(tmp_path: Path) -> None:
    log, stream = (
        EventLog(tmp_path / "events.jsonl", attempt=2, clock=Clock(), check_schema=False),
        io.StringIO(),
    )
    earlier = {"kind": "drop.equal_groups", "attempt": 1, "t": 0.0, "step": 0, "count": 1}
    progress = LineProgress(Console(file=stream, width=200), advance(LiveState(), earlier))
    log.subscribe(progress)
    log.emit("stage.started", stage="main", steps=3)
    for step in (1, 2, 3):
        log.emit("drop.equal_groups", step=step, count=10 * step)
        if step > 1:
            log.emit("rollouts.refills_exhausted", step=step, rounds=3, missing=5)
        log.emit("step.done", step=step, stage="main", metrics={"reward": 0.5})
    parts = [line.split("  ") for line in stream.getvalue().splitlines()[1:]]
    assert [
        [part for part in line if "s/step" not in part and " left" not in part] for line in parts
    ] == [
        ["drop.equal_groups: step=1, count=10"],
        ["[main 1/3]", "reward 0.500"],
        ["rollouts.refills_exhausted: step=2, rounds=3, missing=5"],
        ["[main 2/3]", "reward 0.500", "drop.equal_groups 20"],
        ["[main 3/3]", "reward 0.500", "drop.equal_groups 30", "rollouts.refills_exhausted 1"],
    ]
    progress.summary(tmp_path)
    assert "counted events: drop.equal_groups 61, rollouts.refills_exhausted 2" in stream.getvalue()


def test_a_mean_reward_is_no_percentage_and_is_said_in_words_with_its_interval(
    tmp_path: Path,
) -> None:
    log, stream = (
        EventLog(tmp_path / "events.jsonl", attempt=1, clock=Clock(), check_schema=False),
        io.StringIO(),
    )
    progress = LineProgress(Console(file=stream, width=300))
    log.subscribe(progress)
    meaning = "mean reward of a completion, the weighted sum of its parts"
    for step, reward in ((0, -1.25), (4, 2.5)):
        interval = [reward - 0.5, reward + 0.5]
        log.emit(
            "eval.done",
            name="reward",
            reward=reward,
            n=64,
            step=step,
            interval=interval,
            meaning=meaning,
        )
    log.emit("run.done")
    progress.summary(tmp_path)
    printed = stream.getvalue()
    assert (
        "eval: held-out reward -1.250 (n = 64, 95 % interval -1.750 to -0.750) at step 0" in printed
    )
    assert "held-out reward -1.250 → 2.500 (n = 64, 95 % interval 2 to 3)" in printed
    assert f"reward: {meaning}" in printed and "%" not in printed.replace("95 %", "")
    assert "Held-out reward -1.250 → 2.500 (n = 64, 95 % interval 2 to 3)" in summarize(
        gather(tmp_path)
    )


def test_the_terminal_rounds_as_the_page_does() -> None:
    assert [show_measure("accuracy", value) for value in (0.0625, 0.5, 1.0, 0.1234)] == [
        "6.3%",
        "50.0%",
        "100.0%",
        "12.3%",
    ]


def test_the_panel_leaves_room_for_what_a_terminal_echoes_behind_it(tmp_path: Path) -> None:
    """Ctrl-C twice shows as ^C^C behind the last line. Were the line full, it would wrap and leave
    half a panel."""
    for width in (40, 80, 200):
        console = Console(file=io.StringIO(), width=width, force_terminal=True)
        panel = PanelProgress(console, clock=lambda: 2.0)
        log = EventLog(tmp_path / f"{width}.jsonl", attempt=1, clock=Clock(), check_schema=False)
        log.emit("stage.started", stage="main", steps=4)
        for row in read_events(tmp_path / f"{width}.jsonl"):
            panel(row)
        lines = console.render_lines(panel.render(), pad=False)
        panel.close()
        assert len(lines) >= 4
        assert (
            max(sum(segment.cell_length for segment in line) for line in lines)
            == width - len("^C^C") - 1
        )


def test_lines_that_go_into_a_pipe_hold_no_escape_codes(tmp_path: Path) -> None:
    run_rows(tmp_path, Clock())
    with (tmp_path / "piped").open("w+", encoding="utf-8") as piped:
        progress = make_progress(console=Console(file=piped))
        assert isinstance(progress, LineProgress)
        for row in read_events(tmp_path / "events.jsonl"):
            progress(row)
        progress.summary(tmp_path)
        piped.seek(0)
        text = piped.read()
    assert text.count("[main ") == 4 and "\x1b" not in text and "\r" not in text


def test_a_reward_model_is_not_to_be_talked_to(tmp_path: Path) -> None:
    log, stream = (
        EventLog(tmp_path / "events.jsonl", attempt=1, clock=Clock(), check_schema=False),
        io.StringIO(),
    )
    progress = LineProgress(Console(file=stream, width=300))
    log.subscribe(progress)
    log.emit("eval.done", name="pair_accuracy", accuracy=0.93, n=500, step=4)
    log.emit("eval.done", name="preference_accuracy", accuracy=0.75, n=40, step=4)
    log.emit("run.done")
    progress.summary(tmp_path)
    printed = stream.getvalue()
    assert (
        "held-out pair accuracy 93.0%" in printed
        and "held-out preference accuracy 75.0%" in printed
    )
    assert f"next     gyre report {tmp_path}" in printed
    assert "gyre chat" not in printed and "gyre eval" not in printed


def test_summary_shows_before_after_and_what_to_type(tmp_path: Path) -> None:
    run_rows(tmp_path, Clock())
    stream = io.StringIO()
    progress = make_progress(plain=True, console=Console(file=stream, width=300))
    shown(progress, stream, tmp_path)
    progress.summary(tmp_path, report=tmp_path / "report.html")
    text = stream.getvalue()
    for part in (
        "demo: done after 8.0 s",
        "held out accuracy 40.0% → 93.0% (n = 500, 95 % interval 90.4% to 94.9%)",
        "counted events: fallback.sandbox 1, listed in the report",
        f"report   {tmp_path / 'report.html'}",
        f"gyre chat {tmp_path}",
        f"gyre eval {tmp_path}",
        f"gyre report {tmp_path}",
    ):
        assert part in text
    assert "--resume" not in text


def test_the_summary_says_who_waited_for_whom() -> None:
    rows = [
        {"kind": "step.roles", "t": step, "step": step, "seconds": 10.0, "collector_idle_s": 1.0}
        | {"learner_idle_s": 4.0, "synchronous_s": 15.0}
        for step in (1, 2)
    ]
    state = LiveState()
    for row in rows:
        state = advance(state, row)
    (line,) = [line for line in summary_lines(state, Path("demo"), None) if "idle" in line]
    assert line == "idle: collector 10.0%, learner 40.0%; steps took 20 s, one after the other 30 s"
    assert not [line for line in summary_lines(LiveState(), Path("demo"), None) if "idle" in line]


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    run_rows(tmp_path, Clock(), done=False)
    stream = io.StringIO()
    progress = LineProgress(Console(file=stream, width=300))
    shown(progress, stream, tmp_path)
    progress.summary(tmp_path)
    assert f"gyre train --resume {tmp_path}" in stream.getvalue()


def test_a_terminal_gets_a_panel_that_goes_away(tmp_path: Path) -> None:
    run_rows(tmp_path, Clock())
    stream = io.StringIO()
    progress = make_progress(console=Console(file=stream, width=100, force_terminal=True))
    assert isinstance(progress, PanelProgress)
    for row in read_events(tmp_path / "events.jsonl"):
        progress(row)
    progress.summary(tmp_path)
    progress.close()
    assert "40.0% → 93.0%" in stream.getvalue()


def test_the_panel_fits_narrow_terminals_and_names_the_phase(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    state = LiveState()
    for row in list(read_events(tmp_path / "run" / "events.jsonl"))[:1300]:
        state = advance(state, row)
    for width in (60, 100):
        console = Console(file=io.StringIO(), width=width, record=True)
        console.print(render_panel(state, state.now_t + 1))
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert all(
            part in text for part in ("main", "stage 2 of 2", "phase", "reward", "left", "held out")
        )


def test_a_resumed_run_shows_where_it_is_from_the_start(tmp_path: Path) -> None:
    write_run(tmp_path / "run", sft_steps=8, grpo_steps=8, groups=0)
    stream = io.StringIO()
    progress = make_progress(
        plain=True,
        console=Console(file=stream),
        history=read_events(tmp_path / "run" / "events.jsonl"),
    )
    assert stream.getvalue() == ""
    progress.summary(tmp_path / "run")
    text = stream.getvalue()
    assert "0.0% → 94.0%" in text
    # the hour and a half between the attempts is no run time
    assert " h " not in text.splitlines()[0]


@example(values=[0.0, 1.1125369292536007e-308])
@example(values=[-1.7e308, 0.0, 1.7e308])
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=5))
def test_any_metric_can_be_shown(values: list[float]) -> None:
    state = LiveState()
    for step, value in enumerate(values):
        row = {
            "kind": "step.done",
            "t": float(step),
            "attempt": 1,
            "seq": step,
            "step": step,
            "stage": "s",
            "metrics": {"reward": value, "kl": value, "loss": value},
        }
        state = advance(state, row)
    Console(file=io.StringIO(), width=80).print(render_panel(state, 100.0))


def test_numbers_for_people() -> None:
    assert [show_number(value) for value in (0.0, 0.1234, 12.34, 512.2, 43210.0, 3.2e6, 2e-7)] == [
        "0", "0.123", "12.3", "512", "43.2k", "3.2M", "2.0e-07"]  # fmt: skip
    assert [show_seconds(value) for value in (0.5, 42, 61, 3725)] == [
        "0.5 s",
        "42 s",
        "1 min 01 s",
        "1 h 02 min",
    ]


def test_a_trace_is_told_with_what_took_longest(tmp_path: Path) -> None:
    row = {
        "kind": "trace.written",
        "t": 1.0,
        "attempt": 1,
        "seq": 1,
        "step": 3,
        "file": "traces/step-3.trace.json.gz",
        "size_bytes": 9,
        "seconds": 0.5,
        "compute_s": 0.25,
        "communication_s": 0.125,
        "exposed_s": 0.0625,
        "idle_s": 0.25,
        "top": [{"name": "ampere_gemm", "calls": 12, "seconds": 0.2}],
    }
    for plain in (True, False):
        stream = io.StringIO()
        progress = make_progress(
            plain=plain, console=Console(file=stream, force_terminal=not plain, width=200)
        )
        progress(row)
        progress.close()
        text = stream.getvalue()
        assert (
            "trace of step 3: traces/step-3.trace.json.gz" in text
            and "of it exposed 0.0625 s" in text
        )
        assert "12 ×  ampere_gemm" in text
