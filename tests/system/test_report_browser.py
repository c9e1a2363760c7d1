"""The report in a real browser: draws, answers to mouse and keyboard, fits every width, runs
nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import headless_chromium as chromium
import pytest

import observability_run
from gyre.observability.events import EventLog
from gyre.observability.report.build import write_report
from unit.observability.report.test_build import write_hostile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not chromium.CHROMIUM.exists(), reason="needs the Debian package chromium"),
]

# Texts of one plot that touch each other, texts that leave the plot, and boxes that hold more than
# they show.
FLAWS = """(() => {
  const flaws = [];
  for (const plot of document.querySelectorAll("svg.plot")) {
    const frame = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect()]);
    texts.forEach(([text, box], at) => {
      const sideways = Math.max(frame.left - box.left, box.right - frame.right);
      if (Math.max(sideways, frame.top - box.top - 2, box.bottom - frame.bottom) > 1) flaws.push(`${text} leaves its plot`);
      for (const [other, its] of texts.slice(at + 1)) {
        const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (wide > 0.5 && high > 3) flaws.push(`${text} touches ${other}`);
      }
    });
  }
  for (const node of document.querySelectorAll(".card, .card *")) {
    const style = getComputedStyle(node);
    if (node.closest("svg, .scroll, .seg, pre") || style.webkitLineClamp !== "none") continue;
    if (style.display === "inline" || ["auto", "scroll"].includes(style.overflowX)) continue;
    if (node.clientWidth > 0 && node.scrollWidth > node.clientWidth + 1)
      flaws.push(`${node.className}: ${node.textContent.slice(0, 40)} is cut`);
  }
  if (document.documentElement.scrollWidth > innerWidth) flaws.push("the page scrolls sideways");
  return flaws;
})()"""

# Words of ordinary length that stand on two lines.
BROKEN_WORDS = r"""(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange(), broken = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("svg, script, style, pre") || !node.parentElement.getClientRects().length) continue;
    for (const word of node.textContent.matchAll(/[\p{L}\p{N}_.,]{2,24}(?![\p{L}\p{N}_.,])/gu)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((box) => box.width > 0).map((box) => Math.round(box.top)));
      if (lines.size > 1) broken.push(`${node.parentElement.closest("[class]").className}: ${word[0]}`);
    }
  }
  return broken;
})()"""

# Left end, middle height and width of the first curve, brought into view.
FIRST_PLOT = """(() => {
  const plot = document.querySelector("#curves .plot");
  plot.scrollIntoView({ block: "center", behavior: "instant" });
  const box = plot.getBoundingClientRect();
  return [box.left, box.top + box.height / 2, box.width];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    with chromium.Chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(observability_run.write_run(tmp_path_factory.mktemp("runs") / "arith"))


@pytest.fixture(autouse=True)
def quiet(browser: chromium.Chromium) -> Iterator[None]:
    """No error on the console and no request but the page itself, whatever a test does."""
    browser.console.clear()
    browser.requests.clear()
    yield
    assert browser.console == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 900, 1024, 1280, 1920])
def test_nothing_overlaps_is_cut_or_broken(
    browser: chromium.Chromium, report: Path, width: int, dark: bool
) -> None:
    browser.open(report, width=width, height=900, dark=dark)
    browser.script("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    browser.settle()
    assert browser.script(FLAWS) == []
    assert browser.script(BROKEN_WORDS) == []
    assert browser.script("document.querySelectorAll('#curves .plot path').length") > 20


def test_dark_follows_the_system_and_the_button_turns_it(
    browser: chromium.Chromium, report: Path
) -> None:
    browser.open(report, width=1280, height=900, dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = browser.script(background)
    browser.script("document.getElementById('theme').click()")
    assert browser.script(background) != dark


def test_stages_can_be_looked_at_alone(browser: chromium.Chromium, report: Path) -> None:
    browser.open(report, width=1280, height=900)
    titles = (
        "[...document.querySelectorAll('.chart')].filter((node) => !node.hidden)"
        ".map((node) => node.querySelector('.chart-title').firstChild.data)"
    )
    everything = browser.script(titles)
    browser.script("document.querySelectorAll('#curves .seg button')[1].click()")
    browser.settle()
    cold_start = browser.script(titles)
    assert "Reward" in everything
    assert "Reward" not in cold_start
    assert {"Loss", "Gradient norm", "Throughput"} <= set(cold_start)
    assert browser.script(FLAWS) == []


def test_dragging_zooms_all_curves_and_a_button_resets(
    browser: chromium.Chromium, report: Path
) -> None:
    browser.open(report, width=1280, height=900)
    path = (
        "document.querySelectorAll('#curves .chart')[3].querySelectorAll('.plot "
        "path')[1].getAttribute('d')"
    )
    before = browser.script(path)
    x, y, width = browser.script(FIRST_PLOT)
    browser.mouse("mousePressed", x + width * 0.4, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + width * 0.7, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + width * 0.7, y, button="left", clickCount=1)
    browser.settle()
    assert browser.script(path) != before
    browser.script("document.querySelector('#curves .btn').click()")
    browser.settle()
    assert browser.script(path) == before


def test_hovering_one_curve_reads_all(browser: chromium.Chromium, report: Path) -> None:
    browser.open(report, width=1280, height=900)
    values = (
        "[...document.querySelectorAll('#curves .chart-value')].map((node) => node.textContent)"
    )
    newest = browser.script(values)
    x, y, width = browser.script(FIRST_PLOT)
    browser.mouse("mouseMoved", x + width * 0.3, y)
    browser.settle()
    at_cursor = browser.script(values)
    assert sum(a != b for a, b in zip(newest, at_cursor, strict=True)) > 5


def test_curves_and_tokens_are_read_aloud_by_key(browser: chromium.Chromium, report: Path) -> None:
    browser.open(report, width=1280, height=900)
    aloud = "document.getElementById('live').textContent"
    browser.script("document.querySelector('#curves .plot').focus()")
    browser.key("ArrowLeft")
    assert browser.script(aloud).startswith("main · step 80: reward ")
    browser.script("document.querySelector('.completion').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.script(aloud).startswith("token 2: ")
    assert browser.script("document.querySelector('.inspect').textContent").count("log-prob") == 1
    browser.script("document.querySelector('canvas.detail').focus()")
    browser.key("ArrowRight")
    assert " s, main · step " in browser.script(aloud) or " ms, main · step " in browser.script(
        aloud
    )


def test_every_control_has_a_name(browser: chromium.Chromium, report: Path) -> None:
    browser.open(report, width=1280, height=900)
    nameless = browser.script(
        "[...document.querySelectorAll('button, a, select, input, canvas[tabindex], "
        "svg[tabindex], [role=region]')]"
        ".filter((node) => !(node.textContent.trim() || node.getAttribute('aria-label') || "
        "node.closest('label')))"
        ".map((node) => node.outerHTML.slice(0, 90))"
    )
    assert nameless == []


def test_rollouts_are_browsed_by_step_prompt_and_completion(
    browser: chromium.Chromium, report: Path
) -> None:
    browser.open(report, width=1280, height=900)
    assert (
        browser.script("document.querySelector('.stepper output').textContent") == "main · step 80"
    )
    browser.script("document.querySelector('.stepper .btn').click()")
    assert (
        browser.script("document.querySelector('.stepper output').textContent") == "main · step 77"
    )
    browser.script("document.querySelector('.browser select').value = 'most divided'")
    browser.script("document.querySelector('.browser select').dispatchEvent(new Event('change'))")
    browser.script("document.querySelectorAll('.tab')[3].click()")
    assert (
        browser.script("document.querySelectorAll('.tab')[3].getAttribute('aria-selected')")
        == "true"
    )
    assert browser.script("document.querySelector('.completion').textContent").startswith("<think>")
    assert "answer" in browser.script("document.querySelector('#rollout-panel table').textContent")


@pytest.mark.parametrize(("whole_mib", "drawn"), [(100, 1), (12_000, 0)])
def test_the_memory_chart_is_scaled_to_what_is_used(
    browser: chromium.Chromium, tmp_path: Path, whole_mib: int, drawn: int
) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1, check_schema=False)
    for step in range(8):
        owners = {"actor.params": {"device": (40 + step) << 20, "host": 0, "disk": 0}}
        log.emit(
            "memory",
            phase="train",
            step=step,
            owners=owners,
            device_free_bytes=(whole_mib - 40 - step) << 20,
        )
    browser.open(write_report(tmp_path), width=1280, height=900)
    assert (
        browser.script("document.querySelectorAll('#memory path[stroke-dasharray]').length")
        == drawn
    )
    assert "all that the device has: " in browser.script(
        "document.querySelector('#memory .legend').textContent"
    )
    share = """(() => {
      const plot = document.querySelector('#memory svg.plot').getBoundingClientRect();
      const area = document.querySelector('#memory svg.plot path').getBoundingClientRect();
      return area.height / plot.height;
    })()"""
    assert browser.script(share) > (0.2 if drawn else 0.6)
    assert browser.script(FLAWS) == []


def test_a_hostile_run_runs_nothing(browser: chromium.Chromium, tmp_path: Path) -> None:
    browser.open(write_report(write_hostile(tmp_path)), width=1280, height=900)
    assert browser.script("document.title").endswith("· Gyre report")
    assert browser.script("document.querySelectorAll('img').length") == 0
    assert browser.script("document.querySelectorAll('main > section').length") == 7
    assert "pwned" in browser.script("document.querySelector('.prompt').textContent")
    assert browser.script("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("kind", ["empty", "one step", "no rollouts"])
def test_runs_with_missing_pieces_still_draw(
    browser: chromium.Chromium, tmp_path: Path, kind: str
) -> None:
    clock = observability_run.Clock()
    if kind == "no rollouts":
        writer = observability_run.Writer(tmp_path, clock, 1, 0)
        writer.stage = "sft"
        for step in range(1, 40):
            writer.sft_step(step, 40)
    else:
        log = EventLog(tmp_path / "events.jsonl", attempt=1, clock=clock, check_schema=False)
        if kind == "one step":
            log.emit(
                "step.done", step=1, stage="main", metrics={"loss": 0.5, "reward": float("nan")}
            )
    for width in (390, 1280):
        browser.open(write_report(tmp_path), width=width, height=900)
        assert browser.script(FLAWS) == []
        assert browser.script("document.getElementById('events').textContent").startswith(
            "Fallbacks"
        )
        assert "failed" not in browser.script(
            "document.querySelector('main').innerText.split('Fallbacks')[0]"
        )


@pytest.mark.parametrize("width", [320, 390])
def test_all_of_the_navigation_is_seen_on_a_phone(
    browser: chromium.Chromium, report: Path, width: int
) -> None:
    browser.open(report, width=width, height=844)
    boxes = browser.script(
        "[...document.querySelectorAll('nav a')].map((node) => { const box = "
        "node.getBoundingClientRect();"
        " return [node.textContent, box.left, box.right, box.top,"
        " document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2) === "
        "node]; })"
    )
    assert [name for name, *_ in boxes] == [
        "Overview",
        "Curves",
        "Time",
        "Memory",
        "Rollouts",
        "Events",
        "Config",
    ]
    for name, left, right, top, on_top in boxes:
        assert left >= 0 and right <= width and top >= 0 and on_top, (name, left, right, top)


def test_every_chart_names_both_axes_with_their_units(
    browser: chromium.Chromium, report: Path
) -> None:
    names = (
        "[...document.querySelectorAll('svg.plot:not(.memory-strip)')]"
        ".map((plot) => [...plot.querySelectorAll('.axis-name')].map((node) => node.textContent))"
    )
    browser.open(report, width=1280, height=900)
    browser.script("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    browser.settle()
    found = browser.script(names)
    assert len(found) > 15 and all(len(pair) == 2 and all(pair) for pair in found), found
    upward = {y for y, _ in found}
    assert {
        "Accuracy (%)",
        "Completion length (tokens)",
        "Entropy (nats)",
        "Throughput (tokens/s)",
    } <= upward
    assert {"Time per step (seconds)", "Held by components (bytes)"} <= upward
    assert {x for _, x in found} >= {
        "Step, stages end to end",
        "Step of main",
        "Ends of phases, in order",
    }
    browser.script("document.querySelectorAll('#curves .seg[aria-label=Axis] button')[1].click()")
    browser.settle()
    assert browser.script(names)[0][1].startswith("Time since the run began")


@pytest.mark.parametrize(("evaluations", "lines"), [(1, 0), (2, 0), (3, 1)])
def test_a_line_needs_three_evaluations(
    browser: chromium.Chromium, tmp_path: Path, evaluations: int, lines: int
) -> None:
    log = EventLog(
        tmp_path / "events.jsonl", attempt=1, clock=observability_run.Clock(), check_schema=False
    )
    log.emit("stage.started", stage="main", steps=4)
    for step in range(evaluations):
        log.emit("step.done", stage="main", step=step + 1, metrics={"loss": 1.0 / (step + 1)})
        log.emit(
            "eval.done",
            stage="main",
            name="accuracy",
            accuracy=0.4 + 0.1 * step,
            n=64,
            step=step + 1,
        )
    browser.open(write_report(tmp_path), width=1280, height=900)
    chart = (
        "[...document.querySelectorAll('.chart')].find((node) => "
        "node.textContent.startsWith('Accuracy'))"
    )
    assert browser.script(f"{chart}.querySelectorAll('path[stroke-dasharray]').length") == lines
    assert browser.script(f"{chart}.querySelectorAll('circle').length") >= evaluations
    whiskers = f"{chart}.querySelectorAll('line[stroke-width=\"1.4\"]').length"
    assert browser.script(whiskers) == evaluations


def test_what_has_nothing_to_show_is_folded_away(
    browser: chromium.Chromium, tmp_path: Path
) -> None:
    log = EventLog(
        tmp_path / "events.jsonl", attempt=1, clock=observability_run.Clock(), check_schema=False
    )
    log.emit("stage.started", stage="main", steps=5)
    for step in range(1, 6):
        numbers = {
            "reward": 0.0,
            "loss": 1.0 / step,
            "clip_fraction": 0.0,
            "kl": float("nan"),
            "entropy": 1.0 / step,
        }
        log.emit("step.done", stage="main", step=step, metrics=numbers)
    browser.open(write_report(tmp_path), width=1280, height=900)
    titles = (
        "[...document.querySelectorAll('.chart .chart-title')].map((node) => node.firstChild.data)"
    )
    assert set(browser.script(titles)) == {"Reward", "Loss", "Entropy"}
    browser.script("document.querySelector('#curves details').open = true")
    browser.settle()
    folded = browser.script("document.querySelector('#curves details').textContent")
    assert "clip_fraction = 0" in folded and "kl = –" in folded


@pytest.mark.parametrize(("device", "label", "value"), [
    ("cuda:0", "Peak device memory", "700 MiB"),
    ("cpu", "Peak process memory", "900 MiB"),
])  # fmt: skip
def test_the_peak_is_what_was_measured_within_phases(
    browser: chromium.Chromium, tmp_path: Path, device: str, label: str, value: str
) -> None:
    """Between phases far less is held than within: activations come and go."""
    log = EventLog(
        tmp_path / "events.jsonl", attempt=1, clock=observability_run.Clock(), check_schema=False
    )
    log.emit("run.started", name="peak", stages=[], device=device)
    owners = {"actor.params": {"device": 40 << 20, "host": 0, "disk": 0}}
    for step, (left, peak) in enumerate([("rollout", 300), ("train", 700), ("evaluate", 200)]):
        log.emit(
            "memory",
            phase="idle",
            left=left,
            step=step,
            owners=owners,
            device_peak_bytes=peak << 20,
            host_peak_rss_bytes=min(500 + 400 * step, 900) << 20,
            device_free_bytes=1 << 30,
        )
    browser.open(write_report(tmp_path), width=1280, height=900)
    tiles = (
        "[...document.querySelectorAll('.tile')].map((node) => [...node.children].map((part) "
        "=> part.textContent))"
    )
    (tile,) = [tile for tile in browser.script(tiles) if "memory" in tile[0] or "held" in tile[0]]
    assert tile == [label, value, "in train" if device != "cpu" else "components 40.0 MiB at most"]
    assert value in browser.script("document.querySelector('#memory .section-head').textContent")


def test_figures_that_contradict_each_other_stand_beside_the_headline(
    browser: chromium.Chromium, tmp_path: Path
) -> None:
    log = EventLog(
        tmp_path / "events.jsonl", attempt=1, clock=observability_run.Clock(), check_schema=False
    )
    log.emit(
        "eval.done",
        stage="main",
        name="reward",
        reward=-1.5,
        n=64,
        step=0,
        interval=[-2.0, -1.0],
        meaning="mean",
    )
    log.emit(
        "warn.figures_contradict",
        stage="main",
        step=0,
        reason="training reward is 3.000, held-out reward -1.500",
    )
    for width in (390, 1280):
        browser.open(write_report(tmp_path), width=width, height=900)
        card = browser.script("document.querySelector('.outcome').textContent")
        assert (
            "Held-out reward" in card
            and "95 % interval −2 to −1" in card
            and "Reward: mean" in card
        )
        assert "training reward is 3.000, held-out reward -1.500" in card
        assert browser.script(FLAWS) == []
