"""The web app in a real browser, before a real server whose model recites: streams, stops, shows
what it is told as text, works by keyboard, on a phone, in the dark, and when things fail.

The server asks for keys. Most tests begin with one; the last one kills the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import headless_chromium as chromium
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from reciting_model import save_reciting

from gyre.server.bodies.schema import ChatBody
from gyre.server.gateway.keys import create_key
from gyre.server.gateway.limits import KeyLimits
from gyre.server.web.page import POLICY
from served import Served, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not chromium.CHROMIUM.exists(), reason="needs the Debian package chromium"),
]

PROSE = """A **ring buffer** keeps the last *n* values, see [the page](https://example.org/ring):

```python
def push(self, value): self.values[self.at] = value
```

- one old value goes
- and `one` new value comes."""
CALL = """<think>They want the weather, which I cannot know.</think>I will look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}
</tool_call>"""
HOSTILE = """<think><img src=x onerror=hit=1></think><img src=y onerror="window.hit = 2"> and \
<script>window.hit = 3</script> then [tap](javascript:window.hit=4) or \
[safe](https://example.org/"onmouseover="hit=5) so <iframe srcdoc="<script>parent.hit=6</script>">
```html"><svg/onload=hit=7>
</code><b id=made>bold</b>
```
<tool_call>{"name": "<u id=made>call</u>", "arguments": {"x": "<svg onload=hit=8>"}}</tool_call>"""
TEXTS = {"?": PROSE, ".": CALL, "<": HOSTILE, "}": "It is cold there tonight"}
ENDLESS = {"!": "On and on it goes, round and round,"}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
PATTERN = "<img src=z onerror=window.hit=9>"


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, create_key(path, name="", role="user", limits=KeyLimits())[1]


@pytest.fixture(scope="module")
def served(keys, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "ring"
    save_reciting(folder, TEXTS, endless=ENDLESS, context_tokens=16384)
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(folder, log, "--keys", str(keys[0]), "--set", "run.threads=1") as found:
        yield found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    with chromium.Chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


class Page:
    """The page in the browser, with a key unless a test takes it away."""

    def __init__(self, browser: chromium.Chromium, served: Served, key: str) -> None:
        self.browser, self.url, self.key = browser, served.url, key
        self.script, self.until = browser.script, browser.until

    def visit(
        self, *, width: int = 1280, dark: bool = False, key: str | None = None, **settings: Any
    ) -> None:
        """Begin anew."""
        self.browser.visit(f"{self.url}/", width=width, height=800, dark=dark)
        stored = {"gyre.settings": json.dumps({"temperature": "0"} | settings)}
        stored |= {"gyre.key": self.key} if key is None else {}
        self.script(
            "localStorage.clear(); sessionStorage.clear(); for (const [name, value] of "
            f"Object.entries({json.dumps(stored)})) sessionStorage.setItem(name, value)"
        )
        self.browser.console.clear()
        self.browser.visit(f"{self.url}/", width=width, height=800, dark=dark)
        if key is None:
            self.until("document.querySelector('.starter') !== null")

    def begin(self, text: str) -> None:
        self.script("document.getElementById('ask').focus()")
        self.browser.type(text)
        self.browser.key("Enter")

    def ask(self, text: str) -> str:
        """Ask, and return what the page shows of the answer once it has ended."""
        turns = self.script("document.querySelectorAll('.assistant').length")
        self.begin(text)
        self.until(
            f"document.querySelectorAll('.assistant').length === {turns + 1} && "
            "document.getElementById('stop').hidden"
        )
        self.browser.settle()
        return self.last()

    def last(self, part: str = "") -> str:
        return self.script(f"[...document.querySelectorAll('.assistant')].at(-1){part}.innerText")

    def press(self, name: str) -> None:
        """Press the last button of this name."""
        self.script(
            "[...document.querySelectorAll('button')].filter((node) => node.textContent === "
            f"{json.dumps(name)}).at(-1).click()"
        )
        self.browser.settle()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(
            f"{self.url}{path}", headers={"authorization": f"Bearer {self.key}"}, timeout=30
        )

    def metrics(self) -> dict[str, float]:
        """Sums over all labels but the reason of an end."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for one in family.samples:
                name = one.name + one.labels.get("finished_reason", "")
                found[name] = found.get(name, 0) + one.value
        return found


@pytest.fixture
def page(started, served, keys) -> Page:
    return Page(started, served, keys[1])


def wait_for(check: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not check():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_an_answer_streams_and_is_shown_in_form(page, started) -> None:
    started.requests.clear()
    page.visit()
    text = page.ask("What is it?")
    assert "ring buffer keeps the last n values, see the page:" in text
    shape = page.script(
        "['strong', 'em', 'a', 'figure.code pre', 'ul > li', 'li code'].map((name) => "
        "[...document.querySelectorAll(`.said.prose ${name}`)].map((node) => node.textContent))"
    )
    code = "def push(self, value): self.values[self.at] = value"
    items = ["one old value goes", "and one new value comes."]
    assert shape == [["ring buffer"], ["n"], ["the page"], [code], items, ["one"]]
    assert page.script(
        "(({ href, rel, target }) => [href, rel, target])(document.querySelector('.said a'))"
    ) == ["https://example.org/ring", "noopener noreferrer nofollow", "_blank"]
    facts = page.last(".querySelector('.facts')")
    for part in ("tokens/s", "first after", "in all", "in the prompt", "version 0"):
        assert part in facts
    assert page.script("document.getElementById('spoken').textContent").endswith("has ended.")
    answer = page.get("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert started.console == []
    assert all(one.startswith((page.url, "data:", "about:")) for one in started.requests)
    assert not [one for one in started.requests if page.key in one]


def test_escape_stops_the_engine(page, started) -> None:
    page.visit()
    before = page.metrics()
    page.begin("Go on!")
    page.until("document.querySelector('.said.prose')?.textContent.length > 200")
    assert page.metrics()["vllm:num_requests_running"] == 1
    first = page.script("document.querySelector('.said.prose').textContent.length")
    page.until(f"document.querySelector('.said.prose').textContent.length > {first}")
    started.key("Escape")
    page.until("document.getElementById('stop').hidden")
    assert "stopped by you" in page.last()
    wait_for(lambda: page.metrics()["vllm:num_requests_running"] == 0)
    after = page.metrics()
    ended = "vllm:request_success_totalabort"
    assert after[ended] - before[ended] == 1
    assert after["gyre_requests_in_flight"] == after["gyre_engine_outstanding_tokens"] == 0
    assert page.script("document.activeElement.id") == "ask"
    assert started.console == []
    page.begin("And again!")  # the button does the same
    page.until("[...document.querySelectorAll('.said.prose')].at(-1)?.textContent.length > 50")
    page.script("document.getElementById('stop').click()")
    page.until("document.getElementById('stop').hidden")
    wait_for(lambda: page.metrics()[ended] - before[ended] == 2)


def test_what_a_model_writes_is_text_whatever_it_says(page, started) -> None:
    tool = json.dumps([TOOL | {"function": {"name": "x", "description": PATTERN}}])
    page.visit(system=PATTERN, tools=tool)
    page.ask(f"{PATTERN} <")
    started.settle()
    shown = page.script("document.getElementById('messages').textContent")
    for part in ("<img src=x onerror=hit=1>", '<img src=y onerror="window.hit = 2">', PATTERN):
        assert part in shown
    assert "<script>window.hit = 3</script>" in shown and "<b id=made>bold</b>" in shown
    assert page.last(".querySelector('.call code')") == "<u id=made>call</u>"
    assert "<svg onload=hit=8>" in page.last(".querySelector('.call pre')")
    page.press("Tokens")
    page.script("document.querySelector('.tokens').focus()")
    for _ in range(12):
        started.key("ArrowRight")
    page.press("Text")
    made = (
        "main :is(img, script, iframe, b, u, svg, object, embed, [srcdoc], [onerror], [style*=url])"
    )
    assert page.script(f"document.querySelectorAll({json.dumps(made)}).length") == page.script(
        "document.querySelectorAll('main button svg').length"
    )
    links = page.script("[...document.querySelectorAll('#messages a')].map((node) => node.href)")
    assert all(link.startswith("https://example.org/") for link in links)
    assert page.script("typeof window.hit") == "undefined"
    assert started.console == []


def test_text_without_sense_does_not_hold_the_page_up(page, started) -> None:
    """A model that repeats itself makes long runs of one character; each is drawn, and kept whole."""
    page.visit()
    kept = ["`` a ", "[", "[a](", "https://", "~", "_", "*", "x```` "]
    parsed = ["`", "a`", "**a", "1) ", "# ", "\n", "> ", "a\n- ", "  - a\n    - b\n"]
    texts = [f"x{run * 20000}" for run in kept] + [run * 20000 for run in parsed]
    texts += ["```" + " " * 40000 + "`", "x" + "`" * 40000 + "y"]
    lengths = page.script(
        "import('/web/markdown.js').then(({ showMarkdown }) => "
        f"{json.dumps(texts)}.map((text) => {{ const node = document.createElement('div'); "
        "showMarkdown(node, text); return node.textContent.length; }))"
    )
    assert lengths[1 : len(kept)] == [len(text) for text in texts[1 : len(kept)]]
    assert lengths[-1] == len(texts[-1])


def test_a_call_is_shown_answered_by_hand_and_gone_on_from(page, started) -> None:
    page.visit(tools=json.dumps([TOOL]))
    page.ask("Weather in Oslo.")
    assert page.last(".querySelector('summary')") == "Thought before the answer"
    assert page.script("document.querySelector('details.reasoning').open") is False
    assert page.last(".querySelector('.said')") == "I will look."
    assert page.last(".querySelector('.call header code')") == "get_weather"
    arguments = json.loads(page.last(".querySelector('.call pre')"))
    assert arguments == {"city": "Oslo", "unit": "celsius"}
    assert "calls tools" in page.last(".querySelector('.facts')")
    assert page.script("document.activeElement.matches('.call textarea')")
    started.type('{"degrees": 4}')
    page.press("Send answer")
    page.until("document.querySelectorAll('.assistant').length === 2")
    page.until("document.getElementById('stop').hidden")
    started.settle()
    assert page.last(".querySelector('.said')") == "It is cold there tonight"
    assert "Answer\n" in page.script("document.querySelector('.call').innerText")
    assert page.script("document.querySelectorAll('.call textarea:not([hidden] *)').length") == 0


def test_a_token_tells_its_probability_and_what_else_there_was(page, started) -> None:
    page.visit()
    page.ask("What is it?")
    page.press("Tokens")
    page.script("document.querySelector('.tokens').focus()")
    for _ in range(3):
        started.key("ArrowRight")
    body = {
        "model": "ring", "temperature": 0, "logprobs": True, "top_logprobs": 5,
        "messages": [{"role": "user", "content": "What is it?"}],
    }  # fmt: skip
    answer = httpx.post(
        f"{page.url}/v1/chat/completions", json=body, timeout=60,
        headers={"authorization": f"Bearer {page.key}"},
    )  # fmt: skip
    tokens = answer.json()["choices"][0]["logprobs"]["content"]
    told = page.script("document.getElementById('peek').innerText").replace("␣", " ")
    assert tokens[2]["token"] in told
    assert f"log-prob {tokens[2]['logprob']:.3f}".replace(" -", " −") in told
    rows = page.script(
        "[...document.querySelectorAll('.peek li code')].map((node) => node.textContent)"
    )
    assert [row.replace("␣", " ") for row in rows] == [
        one["token"] for one in tokens[2]["top_logprobs"]
    ]
    marks = page.script("[...document.querySelectorAll('.tok')].map((node) => node.textContent)")
    assert "".join(marks).replace("⏎", "") == "".join(one["token"] for one in tokens)
    heats = page.script(
        "[...document.querySelectorAll('.tok')].map((node) => parseFloat(node.style.getPropertyValue('--h')))"
    )
    by_probability = sorted(zip((one["logprob"] for one in tokens), heats, strict=True))
    assert [heat for _, heat in by_probability] == sorted(heats, reverse=True)
    started.key("Escape")
    assert page.script("document.getElementById('peek').hidden")
    x, y = page.script(
        "(({ left, top }) => [left + 3, top + 8])(document.querySelectorAll('.tok')[5].getBoundingClientRect())"
    )
    started.mouse("mouseMoved", x, y)
    assert tokens[5]["token"].strip() in page.script("document.getElementById('peek').innerText")


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(page, started) -> None:
    page.visit(key="")
    page.until("document.getElementById('key').open")
    assert page.script("document.activeElement.id") == "key-text"
    assert page.script("document.getElementById('server-text').textContent") == "A key is needed"
    started.type("gyre-wrong")
    started.key("Enter")
    page.until("document.getElementById('server-text').textContent === 'The key is not valid'")
    assert "This server asks for a key" in page.script("document.querySelector('.empty').innerText")
    page.press("Enter a key")
    started.type(page.key)
    started.key("Enter")
    page.until("document.getElementById('server-text').textContent === 'ring'")
    assert "cold" in page.ask("}")
    assert page.script("[Object.values(sessionStorage), Object.values(localStorage)]")[1] == []
    assert page.script("Object.entries(sessionStorage)").count(["gyre.key", page.key]) == 1
    assert page.key not in page.script("location.href + document.documentElement.outerHTML")
    assert not [one for one in started.requests if page.key in one]
    page.script("document.getElementById('open-key').click()")
    page.press("Forget it")
    page.until("document.getElementById('server-text').textContent === 'A key is needed'")
    assert page.script("sessionStorage.getItem('gyre.key')") is None
    page.ask("?")
    assert "This server asks for a key" in page.last(".querySelector('.failure')")
    assert not [line for line in started.console if "Content Security" in line]


# The chain of what has the focus, and whether it can be seen.
FOCUS = """(() => {
  const node = document.activeElement, style = getComputedStyle(node);
  const ring = node.closest(".ask") ? getComputedStyle(node.closest(".ask")).boxShadow : style.outlineStyle;
  return [node.id || node.textContent.slice(0, 30), ring !== "none", node.matches(":focus-visible")];
})()"""


def test_everything_can_be_done_by_keyboard(page, started) -> None:
    page.visit(width=800)  # settings cover the chat here
    page.script("document.querySelector('.skip').focus()")
    started.key("Tab")
    started.key("Tab", shift=True)
    seen = [page.script(FOCUS)]
    for _ in range(11):
        started.key("Tab")
        seen.append(page.script(FOCUS))
    assert all(ring and visible for _, ring, visible in seen), seen
    names = [name.strip() for name, *_ in seen]
    assert names[:8] == [
        "Skip to the message", "gyre", "to-chat", "to-live", "new-chat", "open-key",
        "open-settings", "theme",
    ]  # fmt: skip
    assert names[8:] == [
        "log", "What is the sum of 17 and 25?", "Write a function in Python tha",
        "What is the weather in Oslo? U",
    ]  # fmt: skip
    started.key("Tab")
    assert page.script("document.activeElement.id") == "ask"
    started.type("Two lines")
    started.key("Enter", shift=True)
    started.type("and a question?")
    assert page.script("document.getElementById('ask').value") == "Two lines\nand a question?"
    started.key("Enter")
    page.until("document.querySelector('.facts')?.innerText.includes('in all')")
    page.until("[...document.querySelectorAll('button')].some(b => b.textContent === 'Tokens')")
    reached = []
    while "Tokens" not in reached:  # backwards from the message
        started.key("Tab", shift=True)
        reached.append(page.script("document.activeElement.textContent"))
        assert len(reached) < 9, reached
    started.key("Enter")
    page.until("document.activeElement.textContent === 'Text'")
    while page.script("document.activeElement.className") != "tokens":
        started.key("Tab", shift=True)
    started.key("ArrowRight")
    assert not page.script("document.getElementById('peek').hidden")
    started.key("Escape")
    page.script("document.getElementById('open-settings').focus()")
    started.key("Enter")
    assert page.script("document.getElementById('settings').matches(':modal')")
    for _ in range(30):  # the focus stays within
        started.key("Tab")
        assert page.script(
            "document.activeElement === document.body || document.getElementById('settings').contains(document.activeElement)"
        )
    started.key("Escape")
    assert page.script("document.activeElement.id") == "open-settings"
    unnamed = page.script(
        "[...document.querySelectorAll('button, input, textarea, a, summary')].filter((node) => "
        "!(node.closest('[hidden]') || node.textContent.trim() || node.ariaLabel || node.labels?.length)).map((node) => node.outerHTML)"
    )
    assert unnamed == []


WIDE_PARTS = """[...document.querySelectorAll("body *")].filter((node) => {
  const box = node.getBoundingClientRect();
  if (node.closest(".sr, .skip, svg, pre, [hidden], dialog:not([open])") || !box.width) return false;
  return box.left < -1 || box.right > innerWidth + 1;
}).map((node) => `${node.className} ${node.textContent.slice(0, 30)}`)"""

# Texts whose contrast with what is behind them is below WCAG's AA; a canvas reads every form of color.
FAINT = """(() => {
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const read = (color) => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((one, at) => one * a + under[at] * (1 - a));
  const behind = (node) => node === null ? [255, 255, 255] : over(read(getComputedStyle(node).backgroundColor), behind(node.parentElement));
  const light = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, share, at) => {
    const one = color[at] / 255; return sum + share * (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = [];
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || node.closest("[hidden], .sr, .skip, :disabled, noscript, .model-name") || !node.getClientRects().length) continue;
    const ground = behind(node), found = ratio(over(read(style.color), ground), ground);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (found < (large ? 3 : 4.5)) faint.push(`${found.toFixed(2)} ${node.className || node.tagName}: ${text.data.slice(0, 30)}`);
  }
  for (const node of document.querySelectorAll("input, textarea, .ask")) {
    if (!node.getClientRects().length || node.closest(".ask textarea")) continue;
    const found = ratio(read(getComputedStyle(node).borderColor).slice(0, 3), behind(node.parentElement));
    if (node.type !== "range" && node.type !== "checkbox" && found < 3) faint.push(`${found.toFixed(2)} edge of ${node.id || node.className}`);
  }
  return faint;
})()"""


@pytest.mark.parametrize(
    ("width", "dark"), [(360, False), (320, True), (1280, False), (1280, True)]
)
def test_it_fits_and_can_be_read_in_every_state(page, started, width, dark) -> None:
    page.visit(width=width, dark=dark, tools=json.dumps([TOOL]))

    def check(state: str) -> None:
        started.settle()
        assert page.script("document.documentElement.scrollWidth <= innerWidth"), state
        assert page.script(WIDE_PARTS) == [], state
        assert page.script(FAINT) == [], state

    check("empty")
    page.ask("?")
    check("answered")
    page.press("Tokens")
    page.script("document.querySelector('.tokens').focus()")
    started.key("ArrowRight")
    check("tokens")
    page.ask(".")
    check("a call")
    page.script(
        "document.getElementById('open-settings').getAttribute('aria-expanded') === 'true' || document.getElementById('open-settings').click()"
    )
    page.script("document.getElementById('set-topK').focus()")
    started.type("some")
    check("settings")
    page.script(
        "document.getElementById('settings').close(); document.getElementById('open-key').click()"
    )
    check("key")
    page.script("document.getElementById('key').close(); location.hash = '#live'")
    page.until("document.querySelector('.engine') !== null")
    check("live")


def test_the_live_view_tells_what_the_metrics_tell(page, started) -> None:
    page.visit()
    page.begin("On and on!")
    page.until("document.querySelector('.said.prose')?.textContent.length > 50")
    page.script("document.getElementById('to-live').click()")
    page.until(
        "Number(document.querySelectorAll('.tile-value')[0]?.textContent.replace(',', '')) > 0"
    )
    tiles = page.script(
        "[...document.querySelectorAll('.tile')].map((node) => node.innerText.split('\\n').filter(Boolean))"
    )
    assert [tile[0] for tile in tiles] == [
        "Tokens per second",
        "Running",
        "Waiting",
        "KV cache",
        "First token",
    ]
    assert tiles[1][1:] == ["1", "1 request"] and tiles[2][1] == "0"
    card = page.script("document.querySelector('.engine').innerText")
    assert "Engine 0" in card and "ready" in card and "version 0" in card
    assert page.script("document.querySelector('.spark .line').getAttribute('d').startsWith('M')")
    page.script("document.getElementById('to-chat').click()")
    started.key("Escape")
    wait_for(lambda: page.metrics()["vllm:num_requests_running"] == 0)
    text = page.get("/metrics").text
    read = page.script(
        "import('/web/metrics.js').then(({ parseMetrics }) => [...parseMetrics("
        f"{json.dumps(text)})].flatMap(([name, rows]) => rows.map(({{ labels, value }}) => "
        "[name, Object.entries(labels), String(value)])))"
    )
    expected = [
        (one.name, sorted(one.labels.items()), one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    ]
    found = [
        (name, sorted(map(tuple, labels)), float(value.replace("Infinity", "inf")))
        for name, labels, value in read
    ]
    assert sorted(found) == sorted(expected)


def test_every_setting_reaches_the_request(page, started) -> None:
    """The system_message and all the others; the body is one that the server's schema takes."""
    page.visit(
        system="Be brief.", temperature="0.5", topP="0.9", topK="3", maxTokens="5", seed="-7",
        stop="END\n\\n\\n", tools=json.dumps(TOOL["function"]), logprobs=False,
    )  # fmt: skip
    started.bodies.clear()
    page.ask("Now?")
    body = json.loads(started.bodies[-1])
    messages = [("system", "Be brief."), ("user", "Now?")]
    assert ChatBody.model_validate(body).stops == ("END", "\n\n")
    assert body == {
        "model": "ring", "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": role, "content": content} for role, content in messages],
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 5, "seed": -7,
        "stop": ["END", "\n\n"], "tools": [TOOL],
    }  # fmt: skip
    assert "Tokens" not in page.last(".querySelector('.turn-tools')")
    assert page.script("document.getElementById('asked-with').textContent") == (
        "temperature 0.5 · top p 0.9 · top k 3 · max 5 tokens · seed -7 · 1 tool · system message"
    )


def test_events_are_read_however_they_are_cut(page) -> None:
    """Also within a character; and an end that is none is told."""
    page.visit()
    values = [{"n": 1, "text": "žluť ✓"}, {"n": 2, "text": "data: \n\n"}]
    whole = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in values)
    error = 'data: {"error": {"message": "m", "code": "engine_unavailable", "param": null}}\n\n'
    read = """(async (text, size) => {
      const { readEvents } = await import("/web/api.js");
      const bytes = new TextEncoder().encode(text), found = [];
      const body = new ReadableStream({ start(queue) {
        for (let at = 0; at < bytes.length; at += size) queue.enqueue(bytes.slice(at, at + size));
        queue.close();
      } });
      try {
        for await (const event of readEvents(body, new AbortController().signal)) found.push(event);
        return [found, "ended"];
      } catch (failure) { return [found, failure.kind, failure.code]; }
    })"""
    for size in (1, 2, 3, 7, 1000):
        for last, end in (
            ("data: [DONE]\n\n", ["ended"]),
            ("", ["broken", ""]),
            ('data: {"n"', ["broken", ""]),
            ("data: nothing\n\n", ["broken", ""]),
            (error, ["refused", "engine_unavailable"]),
        ):
            found = page.script(f"{read}({json.dumps(whole + last)}, {size})")
            assert found == [values, *end], (size, last)


def test_a_refusal_is_told_in_words_with_what_to_do(page, started) -> None:
    page.visit(maxTokens="9999999")
    page.ask("?")
    failure = page.last(".querySelector('.failure')")
    assert "This does not fit the model's context" in failure and "max_tokens = 9999999" in failure
    page.press("Open settings")
    assert page.script("document.activeElement.id") == "set-maxTokens"
    page.script("document.activeElement.select()")
    started.type("x")
    assert "Need a whole number" in page.script(
        "document.getElementById('set-maxTokens-problem').textContent"
    )
    page.begin("What?")  # is not sent as long as a value is not right
    started.settle()
    assert page.script("document.querySelectorAll('.user').length") == 1
    assert page.script("document.activeElement.id") == "set-maxTokens"
    page.script("document.activeElement.select()")
    started.type("4")
    page.press("Try again")
    page.until("document.querySelector('.facts')?.innerText.includes('limit of tokens')")
    assert page.last(".querySelector('.facts')").startswith("4 tokens")


def test_it_finds_the_server_again(page, started) -> None:
    page.visit()
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    started.page("Network.emulateNetworkConditions", offline=True, **offline)
    page.ask("?")
    assert "The server does not answer" in page.last(".querySelector('.failure')")
    page.until("document.getElementById('server').dataset.phase === 'unreachable'")
    started.page("Network.emulateNetworkConditions", offline=False, **offline)
    page.until("document.getElementById('server').dataset.phase === 'ready'")
    page.press("Try again")
    page.until("document.querySelector('.said.prose')?.innerText.includes('ring buffer')")


def test_theme_and_motion_follow_whoever_looks(page, started) -> None:
    page.visit(dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.script(ground)
    page.script("document.getElementById('theme').click()")
    light = page.script(ground)
    assert (dark, light) == ("rgb(11, 14, 20)", "rgb(246, 245, 242)")
    started.visit(f"{page.url}/", width=1280, height=800, dark=True)
    assert page.script(ground) == light
    for motion, playing in (("no-preference", "pulse"), ("reduce", "none")):
        started.page(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-reduced-motion", "value": motion}],
        )
        name = "(() => { const node = document.body.appendChild(document.createElement('i')); node.className = 'pulse'; const found = getComputedStyle(node).animationName; node.remove(); return found; })()"
        assert page.script(name) == playing


def test_an_answer_that_breaks_off_is_kept_and_said(page, started, served) -> None:
    """The last test of this file: the server is gone after it."""
    page.visit()
    page.begin("Go on!")
    page.until("document.querySelector('.said.prose')?.textContent.length > 100")
    served.process.kill()
    page.until("document.getElementById('stop').hidden")
    started.settle()
    assert "The answer broke off" in page.last(".querySelector('.failure')")
    assert "round and round" in page.last(".querySelector('.said')")
    page.until("document.getElementById('server').dataset.phase === 'unreachable'")
    page.press("Try again")
    page.until("document.querySelector('.failure')?.innerText.includes('does not answer')")
    page.script("document.getElementById('new-chat').click()")
    title = page.script("document.querySelector('.empty h1').textContent")
    assert title == "The server does not answer"
    page.script("location.hash = '#live'")
    page.until("!document.querySelector('.live-view .failure').hidden")
    assert "does not answer" in page.script(
        "document.querySelector('.live-view .failure').innerText"
    )
