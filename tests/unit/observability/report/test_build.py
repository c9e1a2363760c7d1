"""The report: one page, bounded, self-contained, true to the events, and safe whatever a completion
says."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import InputError
from gyre.core.records import Prompt, Rollout, Sampling, Score, ScorePart
from gyre.observability.events import EventLog, read_events
from gyre.observability.intervals import wilson_interval
from gyre.observability.metric_catalog import PANELS, matches, pick, place
from gyre.observability.report.build import embed_json, gather, write_report
from gyre.observability.report.curves import Series, thin, thin_series
from gyre.observability.report.phases import choose_spans, timeline
from gyre.observability.report.samples import GroupRef, choose_groups
from gyre.observability.report.story import tell
from gyre.observability.samples import SampleLog, sample_row
from observability_run import Clock, write_run


class Page(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif self._in != "style":
            self.text.append(data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "data"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = write_run(tmp_path_factory.mktemp("run") / "arith")
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_header_and_outcome_are_there_without_a_script(page: Page) -> None:
    text = " ".join(page.text)
    assert "arith_grpo_cpu" in text
    assert "Held out accuracy 0.0% → 94.0% (n = 512, 95 % interval 91.6% to 95.7%) in 6 min" in text


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    for tag, attrs in page.tags:
        for name in ("src", "href", "action"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    policy = next(
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]+';", policy)
    script = page.scripts[-1][1]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|import\(", script
    )


def test_curves_hold_what_the_events_hold(page: Page) -> None:
    panels = {panel["id"]: panel for panel in page.data["panels"]}
    wanted = {
        "reward",
        "reward_parts",
        "accuracy",
        "length",
        "entropy",
        "kl",
        "clip_fraction",
        "logprob_gap",
        "loss",
        "grad_norm",
        "tokens_per_second",
        "learning_rate",
    }
    assert wanted <= set(panels)
    reward = panels["reward"]["series"][0]
    assert len(reward["v"]) == 80  # the part that was lived twice counts once
    assert reward["x"] == [120 + step for step in range(1, 81)]  # behind the cold start's steps
    assert [line["name"] for line in panels["reward_parts"]["series"]] == ["answer", "format"]
    held_out = panels["accuracy"]["series"][0]
    assert (held_out["dots"], held_out["v"][0], held_out["v"][-1], held_out["n"][0]) == (
        True,
        0.0,
        0.9398,
        512,
    )
    assert held_out["lo"][-1] < 0.9398 < held_out["hi"][-1]
    constants = {item["name"]: item["value"] for item in page.data["constants"]}
    assert constants == {"logprob_gap_max": 3.1e-6, "skipped_updates": 0.0}


def test_time_memory_and_overlap_are_accounted_for(page: Page) -> None:
    data = page.data
    assert data["timeline"]["outer"] == [
        "rollout",
        "score",
        "train",
        "handover",
        "evaluate",
        "snapshot",
    ]
    assert data["timeline"]["counts"]["rollout"] == 80
    total = sum(data["timeline"]["seconds"][phase] for phase in data["timeline"]["outer"])
    assert total + data["timeline"]["unaccounted_s"] == pytest.approx(
        data["run"]["seconds"], rel=1e-3
    )
    # the time away, and the work that was lost with the kill
    assert 5400 < data["run"]["gaps"][0] < 5500
    overlap = data["overlap"]["total"]
    assert overlap["hidden_s"] == pytest.approx(
        overlap["rollout_s"] + overlap["reference_s"], abs=1e-3
    )
    roles = data["roles"]
    idle_s = roles["total"]["collector_idle_s"] + roles["total"]["learner_idle_s"]
    assert roles["total"]["synchronous_s"] == pytest.approx(
        2 * roles["total"]["seconds"] - idle_s, rel=1e-3
    )
    assert roles["x"] == data["overlap"]["x"] and len(roles["steps"]["learner_idle_s"]) == len(
        roles["x"]
    )
    memory = data["memory"]
    assert set(memory["owners"]) >= {"engine.kv", "actor.optimizer", "reference"}
    assert max(memory["tiers"]["disk"]["reference"]) == 13 << 20
    assert memory["whole"]["bytes"] == 192 << 20 and memory["whole"]["line"] is not None


@pytest.mark.parametrize(
    ("whole_mib", "drawn"), [(64, True), (256, True), (257, False), (12_000, False)]
)
def test_a_large_device_is_a_caption_and_does_not_dwarf_the_chart(
    tmp_path: Path, whole_mib: int, drawn: bool
) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1, check_schema=False)
    log.emit("run.started", device="cpu")
    for step, used_mib in enumerate((16, 64, 32)):
        owners = {"actor.params": {"device": used_mib << 20, "host": 0, "disk": 0}}
        log.emit(
            "memory",
            phase="train",
            step=step,
            owners=owners,
            device_free_bytes=(whole_mib - used_mib) << 20,
        )
    whole = gather(tmp_path)["memory"]["whole"]
    assert whole["bytes"] == whole_mib << 20 and "CPU" in whole["name"]
    assert (whole["line"] is not None) is drawn


def test_counted_events_and_fences_are_told(page: Page) -> None:
    counted = {entry["kind"]: entry["count"] for entry in page.data["counted"]}
    assert counted == {"retry.sandbox": 5, "drop.rollout": 2}
    run = page.data["run"]
    assert (run["numCounted"], run["attempts"], run["tornRows"], run["finished"]) == (7, 2, 1, True)
    assert run["deadRows"] > 0


def test_failures_of_rewards_that_are_alike_are_one_line_with_their_count(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1, clock=Clock(), check_schema=False)
    for step in range(1, 9):
        for line in (7, 9):
            kind = f"m:f raised KeyError at r.py:{line}"
            fields = {"what": "f error", "failure": kind, "reason": f"{kind}: '{step}'"}
            log.emit("warn.reward_failed", step=step, count=3, checks=16, **fields)
    (entry,) = gather(tmp_path)["counted"]
    assert entry["count"] == 48
    assert [example["detail"] for example in entry["examples"]] == [
        "24 ×  f error: m:f raised KeyError at r.py:7: '1'",
        "24 ×  f error: m:f raised KeyError at r.py:9: '1'",
    ]


def test_rollouts_keep_tokens_rewards_and_reasons(page: Page) -> None:
    samples = page.data["samples"]
    last = samples["steps"][-1]
    assert (last["stage"], last["step"], last["x"]) == ("main", 80, 200)
    rollout = last["groups"][0]["rollouts"][0]
    text = "".join(samples["pieces"][index][1] for index in rollout["tokens"])
    assert text.startswith("<think>")
    assert text.endswith("</answer><|end|>")
    assert len(rollout["logprobs"]) == len(rollout["tokens"]) == rollout["numTokens"]
    assert {part["name"] for part in rollout["parts"]} == {"answer", "format"}
    steps = [(step["stage"], step["step"]) for step in samples["steps"]]
    assert len(steps) == len(set(steps))


def test_config_and_plan_are_shown_as_they_are(page: Page) -> None:
    assert [file["name"] for file in page.data["files"]] == ["config.toml", "plan.json", "machine"]
    assert "clip_high = 0.28" in page.data["files"][0]["text"]


HOSTILE = (
    '</script><script>document.title="pwned"</script><img src=x onerror=alert(1)><!-- '
    "{{script}} \u2028 & \ud800"
)


def write_hostile(folder: Path) -> Path:
    log = EventLog(folder / "events.jsonl", attempt=1, clock=Clock(), check_schema=False)
    samples = SampleLog(folder / "samples.jsonl", log)
    log.emit(
        "run.started",
        name=HOSTILE,
        objective=HOSTILE,
        model=HOSTILE,
        stages=[{"name": HOSTILE, "steps": 1}],
    )
    log.emit("stage.started", stage=HOSTILE)
    log.emit(f"warn.{HOSTILE}", text=HOSTILE)
    for step in (1, 2):
        log.emit(
            "step.done",
            step=step,
            metrics={HOSTILE: step, "reward": step, f"reward/{HOSTILE}": -step},
        )
        log.emit("phase.ended", phase=HOSTILE, step=step, seconds=0.1)
        log.emit("memory", phase=HOSTILE, step=step, bytes={HOSTILE: {"device": step}})
        log.emit("eval.done", name=HOSTILE, accuracy=0.5, n=2, step=step)
    part = {"name": HOSTILE, "value": math.nan, "weight": 1, "reason": HOSTILE, "outcome": HOSTILE}
    samples.write(
        {
            "step": 1,
            "stage": HOSTILE,
            "rollout_id": HOSTILE,
            "group_id": HOSTILE,
            "prompt": HOSTILE,
            "completion": HOSTILE,
            "tokens": [1, 2],
            "pieces": [HOSTILE, "\ud83d"],
            "logprobs": [-1, None],
            "score": math.nan,
            "parts": [part],
            "finish": HOSTILE,
        }
    )
    (folder / "config.toml").write_bytes(b'a = "</script><script>1</script>"\n\xff\xfe')
    return folder


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    text = write_report(write_hostile(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.scripts) == 2  # the data and the page's own
    assert not [attrs for tag, attrs in page.tags if tag == "img" or "onerror" in attrs]
    assert page.data["run"]["name"] == HOSTILE
    assert "".join(page.text).count("pwned") == 3  # as text: in title, heading and summary
    own = page.scripts[1][1]
    assert own.startswith('"use strict"')
    assert "pwned" not in own


@settings(max_examples=200)
@given(
    value=st.recursive(
        st.text(st.characters()), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_json_reads_back_and_cannot_end_its_element(value: Any) -> None:
    text = embed_json({"v": value})
    assert json.loads(text) == {"v": value}
    assert not re.search("[<>&\u2028\u2029]", text)
    text.encode("utf-8")


def test_missing_pieces_leave_out_their_parts_only(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", attempt=1, check_schema=False).close()
    data = Page(write_report(tmp_path).read_text()).data
    assert data["panels"] == []
    parts = ("timeline", "memory", "samples", "overlap", "roles", "pod")
    assert [data[part] for part in parts] == [None] * 6
    log = EventLog(tmp_path / "events.jsonl", attempt=1, clock=Clock(), check_schema=False)
    log.emit("step.done", step=1, stage="sft", metrics={"loss": 2.5, "bad": math.inf})
    (tmp_path / "config.toml").write_text("not = [toml")
    data = Page(write_report(tmp_path).read_text()).data
    assert [panel["id"] for panel in data["panels"]] == ["loss", "more-bad"]
    assert "bad (1)" in data["curveNotes"][0]
    assert data["files"][0]["text"] == "not = [toml"


def test_evaluations_are_judged_by_what_they_have(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1, clock=Clock(), check_schema=False)
    for step, loss, accuracy in ((0, 5.8, 0.2), (9, 0.1, 0.9)):
        log.emit("eval.done", stage="sft", name="loss", loss=loss, n=16, step=step)
        log.emit(
            "eval.done",
            stage="main",
            name="accuracy",
            accuracy=accuracy,
            n=64,
            step=step,
            detail={"length": 40},
        )
    data = Page(write_report(tmp_path).read_text()).data
    titles = [
        (outcome["title"], outcome["unit"], outcome["after"]["value"])
        for outcome in data["outcomes"]
    ]
    assert titles == [("held-out accuracy", "fraction", 0.9), ("held-out loss", "", 0.1)]
    panels = {panel["id"]: [line["name"] for line in panel["series"]] for panel in data["panels"]}
    assert panels == {"accuracy": ["held out"], "length": ["held out"], "loss": ["held out"]}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"events\.jsonl"):
        write_report(tmp_path)


@pytest.mark.slow
def test_a_long_run_stays_a_small_page_and_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sft_steps=1500, grpo_steps=400, groups=16)
    path = write_report(folder)
    data = Page(path.read_text()).data
    assert path.stat().st_size < 8_000_000
    assert any("more than 1,200 points" in text for text in data["curveNotes"])
    assert "samples.jsonl has all" in data["samples"]["notes"][0]
    steps = [step["step"] for step in data["samples"]["steps"]]
    assert (steps[0], steps[-1]) == (1, 400)


@given(
    sizes=st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=6), min_size=1, max_size=40),
    max_tokens=st.integers(1, 5000),
    max_steps=st.integers(2, 20),
)
def test_chosen_samples_are_bounded_and_keep_first_and_last(
    sizes: list, max_tokens: int, max_steps: int
) -> None:
    groups = [
        GroupRef(stage="main", step=step, group_id=f"{step}-{at}", offsets=(0,), num_tokens=tokens)
        for step, members in enumerate(sizes)
        for at, tokens in enumerate(members)
    ]
    chosen = choose_groups(groups, max_tokens=max_tokens, max_steps=max_steps)
    steps = sorted({group.step for group in chosen})
    assert len(steps) <= max_steps
    assert steps[0] == 0
    assert steps[-1] == len(sizes) - 1
    first_of_each = sum(sizes[int(step)][0] for step in steps)
    assert sum(group.num_tokens for group in chosen) <= max_tokens + first_of_each


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=300), limit=st.integers(3, 50))
def test_thinned_curves_stay_within_what_was_there(values: list[float], limit: int) -> None:
    points = [(float(at), float(at), value, 0.0) for at, value in enumerate(values)]
    thinned = thin(points, limit)
    assert len(thinned) <= max(limit, min(len(points), limit))
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    shown = [point[2] for point in thinned if point[2] is not None]
    assert min(values) - 1e-9 <= min(shown) <= max(shown) <= max(values) + 1e-9


def test_means_do_not_reach_over_stages() -> None:
    points = [(float(x), 0.0, 0.0 if x <= 3000 else 1.0, 0.0) for x in range(1, 4001)]
    thinned = thin_series(Series("loss", False, points), [1.0, 3001.0])
    assert {point[2] for point in thinned} == {0.0, 1.0}
    assert len(thinned) <= 1210


def test_drawn_phases_are_bounded_and_keep_whole_steps() -> None:
    names = ("train", "train/in", "train/in/in")
    spans = [
        (name, depth, step + depth / 9, 0.1, float(step), "m")
        for step in range(1000)
        for depth, name in enumerate(names)
    ]
    chosen = choose_spans(spans, 1500)
    assert len(chosen) <= 1500
    assert sum(1 for span in chosen if span[1] == 0) == 1000
    inner = [span[4] for span in chosen if span[1] > 0]
    assert all(inner.count(x) == 2 for x in inner)


def test_a_phase_that_a_kill_left_open_is_drawn_only_in_the_newest_attempt(tmp_path: Path) -> None:
    clock = Clock()
    log = EventLog(tmp_path / "events.jsonl", attempt=1, clock=clock, check_schema=False)
    log.emit("phase.started", phase="rollout", step=1)
    clock.now += 5
    second = EventLog(tmp_path / "events.jsonl", attempt=2, clock=clock, check_schema=False)
    second.fence(1, 1)
    second.emit("phase.started", phase="train", step=1)
    clock.now += 2
    second.emit("step.done", step=1, stage="main", metrics={})
    data = timeline(tell(read_events(tmp_path / "events.jsonl")))
    assert data is not None
    assert data["seconds"] == {"train": 2.0}


def test_stages_lie_end_to_end_or_keep_their_own_numbers() -> None:
    def story(*steps: tuple[str, int]):
        rows = [
            {
                "seq": n,
                "attempt": 1,
                "t": float(n),
                "kind": "step.done",
                "stage": stage,
                "step": step,
            }
            for n, (stage, step) in enumerate(steps)
        ]
        return tell(rows)

    restarted = story(("a", 1), ("a", 2), ("b", 1), ("b", 2))
    assert [restarted.x("b", step) for step in (0, 1, 2)] == [2, 3, 4]
    from_zero = story(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    assert [from_zero.x("b", step) for step in (0, 1)] == [2, 3]
    numbered_on = story(("a", 1), ("a", 2), ("b", 3))
    assert numbered_on.x("b", 3) == 3


def test_wilson_interval_equals_the_published_one() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (81/263, 15/148, 0/20, 1/29).
    published = [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ]
    for hits, n, bounds in published:
        assert wilson_interval(hits / n, n) == pytest.approx(bounds, abs=5e-5)
    assert wilson_interval(0.5, 0) is None


def test_every_metric_has_at_most_one_place() -> None:
    placed = {
        "reward": "reward",
        "reward/mean": "reward",
        "reward/answer": "reward_parts",
        "kl_reference": "kl",
        "decode_tokens_per_second": "tokens_per_second",
    }
    for name, panel_id in placed.items():
        where = place(name)
        assert where is not None
        assert where[0].panel_id == panel_id
    assert place("kl_bounded_fraction") is None
    assert pick({"reward/answer": 1.0, "policy_loss": 2.0, "loss": 3.0}, "loss") == 3.0
    assert all(
        matches(pattern, pattern.replace("*", "x")) for panel in PANELS for pattern in panel.metrics
    )


def test_sample_rows_hold_the_completion_only() -> None:
    prompt = Prompt(
        prompt_id="p", tokens=np.array([1, 2], np.int32), text="2+2=", task={}, source="s"
    )
    rollout = Rollout(
        rollout_id="r",
        group_id="g",
        prompt=prompt,
        tokens=np.array([1, 2, 3, 4], np.int32),
        sampled=np.array([False, False, True, False]),
        logprobs=np.array([0, 0, -0.123456, 0], np.float32),
        raw_logprobs=np.zeros(4, np.float32),
        versions=np.full(4, -1, np.int32),
        sampling=Sampling(),
        finish="stop",
        text="4",
    )
    score = Score(
        rollout_id="r",
        value=1.0,
        parts=(ScorePart(name="answer", value=1.0, weight=1.0, reason="equal"),),
    )
    row = sample_row(rollout, score, step=3, stage="main", pieces=["4", "!"])
    assert (row["tokens"], row["pieces"], row["logprobs"]) == ([3, 4], ["4", "!"], [-0.1235, None])
    assert row["logprob_kind"] == "processed"
    assert row["parts"] == [
        {"name": "answer", "value": 1.0, "weight": 1.0, "reason": "equal", "outcome": "ok"}
    ]
    json.dumps(row)


def test_numbers_of_the_machine_have_panels_and_a_trace_is_listed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1, check_schema=False)
    measured = {
        "mfu": 0.41,
        "train_tokens_per_second_per_device": 9515.0,
        "communication_wait_seconds": 0.02,
        "sent_bytes/all_gather": 3e9,
        "sent_bytes/reduce_scatter": 6e9,
    }
    for step in (1, 2):
        log.emit(
            "step.done",
            stage="main",
            step=step,
            metrics={name: value * step for name, value in measured.items()},
        )
    log.emit(
        "trace.written",
        step=2,
        file="traces/step-2.trace.json.gz",
        seconds=0.5,
        compute_s=0.4,
        idle_s=0.1,
        communication_s=0.0,
        exposed_s=0.0,
        top=[{"name": "aten::mm", "calls": 3, "seconds": 0.3}],
    )
    data = gather(tmp_path)
    panels = {panel["id"]: panel for panel in data["panels"]}
    assert {"mfu", "tokens_per_second", "communication", "sent_bytes"} == set(panels)
    assert panels["mfu"]["unit"] == "fraction" and panels["sent_bytes"]["unit"] == "bytes"
    assert [line["metric"] for line in panels["sent_bytes"]["series"]] == [
        "sent_bytes/all_gather", "sent_bytes/reduce_scatter"
    ]  # fmt: skip
    (file,) = data["files"]
    assert (
        file["name"] == "traces/step-2.trace.json.gz"
        and "aten::mm" in file["text"]
        and "Perfetto" in file["text"]
    )
