"""Live progress: the terminal display of a run and its final summary. In: event rows. Out: text on
stderr: one redrawn panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, Protocol

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre.observability.events import RESERVED, is_counted, weight_of
from gyre.observability.metric_catalog import SHARES, eval_interval, eval_measure, eval_title, pick
from gyre.observability.progress.state import CONTRADICTION, LiveState, advance, failure_of

ECHO_COLUMNS = 5  # that stay free to the right of the panel, for ^C^C
MOST_KINDS = 3  # of counted events that the end of a run names
SPARKS = "▁▂▃▄▅▆▇█"
# events that a person who waits is to see, though nothing is wrong
ANNOUNCED = ("engine.installing", "rendezvous.opened")
SHOWN = (
    ("reward", "reward"),
    ("accuracy", "accuracy"),
    ("loss", "loss"),
    ("length", "length"),
    ("kl", "KL"),
    ("tokens_per_second", "tokens/s"),
    ("mfu", "MFU"),
)


class Progress(Protocol):
    """An event listener that displays a run."""

    def __call__(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Stop the display. The text on the screen stays."""
        ...

    def summary(self, run_folder: Path, *, report: Path | None = None) -> None:
        """Print how the run ended and what to type next."""
        ...


def make_progress(
    *,
    plain: bool = False,
    console: Console | None = None,
    history: Iterable[Mapping[str, Any]] = (),
) -> Progress:
    """Return a panel where stderr is a terminal. Returns lines where it is not or `plain` is set
    (as by --json).

    `history` holds the live rows of earlier attempts: a resumed run shows its evaluations and its
    position from the start.
    """
    console = console or Console(stderr=True)
    state = LiveState()
    for row in history:
        state = advance(state, row)
    return (
        LineProgress(console, state)
        if plain or not console.is_terminal
        else PanelProgress(console, state)
    )


class LineProgress:
    """One line per step, evaluation and stage, never redrawn. The first counted event of a kind has
    its own line; later ones are added to the line of their step or to the summary."""

    def __init__(self, console: Console, state: LiveState | None = None):
        self._console = console
        self._state = state or LiveState()
        self._told: set[str] = set()  # kinds that had their line in this attempt
        # counted events since the newest step's line, by kind
        self._repeated: Counter[str] = Counter()

    def __call__(self, row: Mapping[str, Any]) -> None:
        failure = new_failure(self._state, row)
        self._state = state = advance(self._state, row)
        kind = row["kind"]
        if kind == "stage.started":
            number, total = state.position
            of_steps = f", {state.steps} steps" if state.steps else ""
            self._print(f"stage {state.stage} ({number}/{total}{of_steps})")
        elif kind == "eval.done":
            self._print(eval_line(row))
        elif kind == "step.done":
            self._print(
                "  ".join(
                    [
                        step_line(state),
                        *(f"{name} {count}" for name, count in self._repeated.items()),
                    ]
                )
            )
            self._repeated.clear()
        elif kind == "trace.written":
            self._print("\n".join(trace_lines(row)))
        elif kind in ANNOUNCED:
            self._print(f"{kind}: {event_detail(row)}")
        elif kind == "attempt.started" and row.get("resumed_from"):
            self._print(f"resumed as attempt {row['attempt']}")
        if failure:
            self._print(failure)
        elif kind == CONTRADICTION:
            self._print(contradiction_line(row))
        elif is_counted(row) and (kind in self._told or failure_of(row) is not None):
            self._repeated[kind] += weight_of(row)
        elif is_counted(row):
            self._told.add(kind)
            self._print(f"{kind}: {event_detail(row)}")

    def close(self) -> None:
        pass

    def summary(self, run_folder: Path, *, report: Path | None = None) -> None:
        for line in summary_lines(self._state, run_folder, report):
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class PanelProgress:
    """One panel at the bottom of the terminal. Lines printed by others scroll above it."""

    def __init__(
        self,
        console: Console,
        state: LiveState | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ):
        self._console = console
        self._clock = clock
        self._state = state or LiveState()
        self._live: Live | None = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        failure = new_failure(self._state, row)
        self._state = advance(self._state, row)
        if failure:
            self._console.print(failure, markup=False, highlight=False, soft_wrap=True, style="red")
        if self._live is None and self._state.done is None:
            self._live = Live(
                get_renderable=self.render,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        if row["kind"] == "trace.written":  # in a terminal it scrolls by above the panel
            self._console.print(
                "\n".join(trace_lines(row)), markup=False, highlight=False, soft_wrap=True
            )
        if row["kind"] in ("warn.steps_lost", *ANNOUNCED):
            self._console.print(
                f"{row['kind']}: {event_detail(row)}", markup=False, highlight=False, soft_wrap=True
            )
        if row["kind"] == "run.done":
            self.close()

    def render(self) -> RenderableType:
        """Draw the panel and leave the cursor behind its last line. A terminal echoes ^C there: a
        line that wrapped would shift the panel down and leave its first line on the screen."""
        return Constrain(
            render_panel(self._state, self._clock()), max(1, self._console.width - ECHO_COLUMNS)
        )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, run_folder: Path, *, report: Path | None = None) -> None:
        self.close()
        self._console.print(render_summary(self._state, run_folder, report))


def step_line(state: LiveState) -> str:
    """Format one step as a line of plain text."""
    parts = [
        f"[{state.stage} {state.step}/{state.steps}]"
        if state.steps
        else f"[{state.stage} {state.step}]"
    ]
    parts += [f"{label} {show_metric(label, value)}" for label, value in shown_metrics(state)]
    if state.seconds_per_step is not None:
        parts.append(f"{show_seconds(state.seconds_per_step)}/step")
    if state.seconds_left:
        parts.append(f"{show_seconds(state.seconds_left)} left")
    return "  ".join(parts)


def eval_line(row: Mapping[str, Any]) -> str:
    """Format one evaluation as a line of plain text."""
    name, judged = str(row.get("name", "eval")), eval_measure(row)
    if judged is None:
        return f"eval {name}: no measure recorded at step {row.get('step', 0)}"
    shown = f"{eval_title(name, judged[0])} {show_measure(*judged)}{over(row)}"
    return f"eval: {shown} at step {row.get('step', 0)}"


def contradiction_line(row: Mapping[str, Any]) -> str:
    """Format a contradiction of training and held-out figures as a line of plain text."""
    return (
        f"warning: at step {row.get('step', 0)} of {row.get('stage') or 'the run'}, "
        f"{row.get('reason')}"
    )


def new_failure(state: LiveState, row: Mapping[str, Any]) -> str:
    """Format the first reward failure of a kind as a line of plain text; "" for anything else."""
    failure = failure_of(row)
    if failure is None or failure in state.failures:
        return ""
    where = f"at step {row['step']}" if "step" in row else f"in {row.get('where')}"
    checks = f" of {row['checks']}" if "checks" in row else ""
    reason = row.get("reason") or "no reason recorded"
    return (
        f"reward failed: {row.get('what')}, {row.get('count', 1)}{checks} completions "
        f"{where}: {reason}"
    )


def trace_lines(row: Mapping[str, Any]) -> list[str]:
    """Format the time breakdown of a profiled step as lines of plain text."""
    parts = {
        "computing": "compute_s",
        "communicating": "communication_s",
        "of it exposed": "exposed_s",
        "idle": "idle_s",
    }
    spent = ", ".join(f"{name} {float(row.get(key) or 0.0):.4f} s" for name, key in parts.items())
    lines = [
        f"trace of step {row.get('step')}: {row.get('file')}, "
        f"{float(row.get('seconds') or 0.0):.4f} s: {spent}"
    ]
    for entry in row.get("top") or ():
        lines.append(f"  {entry['seconds']:>10.6f} s  {entry['calls']:>7} ×  {entry['name']}")
    return lines


def event_detail(row: Mapping[str, Any]) -> str:
    """Format the event-specific fields of a row."""
    own = {name: value for name, value in row.items() if name not in RESERVED | {"counted"}}
    return ", ".join(f"{name.rstrip('_')}={value}" for name, value in own.items()) or "no details"


def shown_metrics(state: LiveState) -> list[tuple[str, float]]:
    """Return labels and values of the main metrics. A loss is omitted where there is a reward."""
    picked = {label: pick(dict(state.metrics), panel_id) for panel_id, label in SHOWN}
    if picked["reward"] is not None:
        picked["loss"] = None
    return [(label, value) for label, value in picked.items() if value is not None]


def show_metric(label: str, value: float) -> str:
    return show_share(value) if label in ("accuracy", "MFU") else show_number(value)


def render_panel(state: LiveState, now_t: float) -> RenderableType:
    """Return the panel: stage and bar, numbers, evaluations, warnings."""
    number, total = state.position
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right")
    phase = (
        f"{state.phase} {show_seconds(max(0.0, now_t - state.phase_started_t))}"
        if state.phase
        else "…"
    )
    head.add_row(
        Text.assemble((state.stage or "starting", "bold"), (f"  stage {number} of {total}", "dim")),
        Text.assemble(("phase ", "dim"), (phase, "cyan")),
    )
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    bar.add_row(
        ProgressBar(total=max(1, state.steps), completed=state.step), progress_text(state, now_t)
    )
    parts: list[RenderableType] = [head, bar]
    if state.metrics:
        parts.append(metrics_table(state))
    parts += [Text(eval_span(name, rows), style="green") for name, rows in state.evals.items()]
    if state.contradiction is not None:
        parts.append(Text(contradiction_line(state.contradiction), style="yellow"))
    if state.num_counted:
        parts.append(
            Text(
                f"counted events: {state.num_counted}, the last {state.last_counted}",
                style="yellow",
            )
        )
    elapsed = show_seconds(max(0.0, now_t - state.started_t)) if state.started_t is not None else ""
    title = Text.assemble(("gyre", "bold cyan"), (f"  {state.name}" if state.name else ""))
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=elapsed,
        subtitle_align="right",
        box=ROUNDED,
    )


def progress_text(state: LiveState, now_t: float) -> Text:
    text = Text(f"step {state.step}/{state.steps}" if state.steps else f"step {state.step}")
    if state.seconds_left is not None and state.step_ends:
        left = max(0.0, state.seconds_left - (now_t - state.step_ends[-1][1]))
        text.append(f"  {show_seconds(left)} left", style="dim")
    return text


def metrics_table(state: LiveState) -> Table:
    table = Table.grid(expand=True, padding=(0, 2))
    metrics = shown_metrics(state)
    for _ in metrics:
        table.add_column(justify="left", no_wrap=True)
    table.add_row(*[Text(label, style="dim") for label, _ in metrics])
    cells = []
    for label, value in metrics:
        cell = Text(show_metric(label, value), style="bold")
        if label == "reward":
            cell.append(f" {sparkline(state.rewards, width=16)}", style="cyan")
        cells.append(cell)
    table.add_row(*cells)
    return table


def render_summary(state: LiveState, run_folder: Path, report: Path | None) -> RenderableType:
    """Return the final panel of a run."""
    lines = summary_lines(state, run_folder, report)
    body = Text("\n".join(lines[1:]))
    finished = state.done is not None
    return Panel(
        body,
        title=Text(lines[0], style="bold green" if finished else "bold yellow"),
        title_align="left",
        box=ROUNDED,
        padding=(1, 2),
    )


def summary_lines(state: LiveState, run_folder: Path, report: Path | None) -> list[str]:
    """Format the run's outcome, measures before and after, the report's path and suggested next
    commands."""
    seconds = state.now_t - state.started_t if state.started_t is not None else 0.0
    ending = "done" if state.done is not None else "stopped"
    lines = [f"{state.name or run_folder.name}: {ending} after {show_seconds(seconds)}"]
    lines += [eval_span(name, rows) for name, rows in state.evals.items()]
    lines += meanings(state)
    if state.roles:
        lines.append(roles_line(state.roles))
    if state.contradiction is not None:
        lines.append(contradiction_line(state.contradiction))
    if state.num_counted:
        kinds = sorted(state.counted, key=lambda kind: -state.counted[kind])
        most = ", ".join(f"{kind} {state.counted[kind]}" for kind in kinds[:MOST_KINDS])
        more = f" and {len(kinds) - MOST_KINDS} more kinds" if len(kinds) > MOST_KINDS else ""
        lines.append(f"counted events: {most}{more}, listed in the report")
    worst = sorted(state.failures, key=lambda failure: -state.failures[failure])[:MOST_KINDS]
    lines += [f"reward failed {state.failures[failure]} times: {failure}" for failure in worst]
    lines += ["", f"report   {report}"] if report is not None else [""]
    lines.append(f"run      {run_folder}")
    if state.done is None:
        lines.append(f"go on    gyre train --resume {run_folder}")
    answers = "pair_accuracy" not in state.evals  # a reward model scores answers and gives none
    commands = [*(("chat", "eval") if answers else ()), "report"]
    return lines + [
        f"{'next' if i == 0 else '':<8} gyre {command} {run_folder}"
        for i, command in enumerate(commands)
    ]


def roles_line(roles: Mapping[str, float]) -> str:
    """Format who waited, and what the synchronous order would have cost, as a line of text."""
    collector, learner = (
        show_share(roles[name] / max(roles["seconds"], 1e-9))
        for name in ("collector_idle_s", "learner_idle_s")
    )
    return (
        f"idle: collector {collector}, learner {learner}; steps took "
        f"{show_seconds(roles['seconds'])}, one after the other "
        f"{show_seconds(roles['synchronous_s'])}"
    )


def eval_span(name: str, rows: tuple[Mapping[str, Any], ...]) -> str:
    """Format the first and newest value of one evaluation."""
    judged = [found for found in map(eval_measure, rows) if found is not None]
    if not judged:
        return f"{name}: no measure recorded"
    (measure, first), (_, newest) = judged[0], judged[-1]
    shown = show_measure(measure, newest)
    if len(judged) > 1:
        shown = f"{show_measure(measure, first)} → {shown}"
    return f"{eval_title(name, measure)} {shown}{over(rows[-1])}"


def over(row: Mapping[str, Any]) -> str:
    """Format the number of problems of an evaluation and the 95 % interval of its result."""
    judged, interval = eval_measure(row), eval_interval(row)
    parts = [f"n = {row['n']}"] if row.get("n") else []
    if judged is not None and interval is not None:
        parts.append(
            "95 % interval " + " to ".join(show_measure(judged[0], bound) for bound in interval)
        )
    return f" ({', '.join(parts)})" if parts else ""


def meanings(state: LiveState) -> list[str]:
    """Describe each figure of the evaluations in words."""
    newest = [(eval_measure(rows[-1]), rows[-1].get("meaning")) for rows in state.evals.values()]
    return [
        f"{judged[0].replace('_', ' ')}: {meaning}"
        for judged, meaning in newest
        if judged and meaning
    ]


def show_measure(measure: str, value: float) -> str:
    """Format the result of an evaluation: a share in percent, a mean of rewards or losses as a
    number."""
    return show_share(value) if measure in SHARES else show_number(value)


def show_share(value: float) -> str:
    """Format a share in percent with one digit. Ties round up as in the report's script: 6.25 is
    6.3 in both."""
    if not math.isfinite(value):
        return str(value)
    return f"{Decimal(value * 100).quantize(Decimal('0.1'), ROUND_HALF_UP)}%"


def sparkline(values: tuple[float, ...], *, width: int) -> str:
    """Format the newest values as one row of block characters."""
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite:
        return ""
    # halves: the whole range may be more than a float holds
    low, high = min(finite) / 2, max(finite) / 2
    shares = ((value / 2 - low) / (high - low) if high > low else 0.0 for value in finite)
    return "".join(SPARKS[round(share * (len(SPARKS) - 1))] for share in shares)


def show_number(value: float) -> str:
    """Format a number with about three significant figures."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 10_000:
        return f"{value / 1000:.1f}k" if size < 1e6 else f"{value / 1e6:.1f}M"
    if size >= 100 or value == round(value):
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.001 else f"{value:.1e}"


def show_seconds(seconds: float) -> str:
    """Format a duration in readable units."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
