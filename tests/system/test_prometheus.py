"""deploy/ before a real Prometheus: promtool plays faults against the alert rules, and every query of
rules and dashboard is asked of what a server of a tiny model told it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from system_models import save_own_checkpoint

from deploy_files import (
    PROMETHEUS,
    RULES,
    PanelQuery,
    asked_for,
    filled_in,
    panel_queries,
    read_rules,
    variable_queries,
)
from prometheus_process import PrometheusProcess, find_tool
from served import Served, serving

LONGEST_S = 30.0
WINDOW_S = 300  # of rates; longer than the tests take
SAMPLES = 12  # of each series, before numbers are looked at
PROMPT = list(range(10, 50))  # 40 tokens, of which 32 are whole pages
WHOLE, STREAMED, REFUSED = 20, 4, 5


def promtool(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find_tool("promtool"), *words], input=text, capture_output=True, text=True, timeout=60
    )


def test_the_files_are_what_promtool_takes_and_each_alert_fires_on_its_fault() -> None:
    find_tool("promtool")
    script = PROMETHEUS.parent / "check.sh"
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(read_rules())} rules found" in done.stdout


def play_faults(folder: Path, expression: str, alerts: Collection[str]) -> str:
    """What promtool says of the faults when these alerts have another expression."""
    shutil.copytree(PROMETHEUS, folder)
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] in alerts:
            rule["expr"] = expression
    (folder / RULES.name).write_text(yaml.safe_dump(rules))
    found = promtool("test", "rules", str(folder / "gyre.test.yml"))
    assert found.returncode == 1
    return found.stdout + found.stderr


ALERTS = [rule["alert"] for rule in read_rules()]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_that_never_fires_is_missed(alert, tmp_path) -> None:
    said = play_faults(tmp_path / "changed", "vector(1) > 2", [alert])
    ((expected, got),) = re.findall(r"exp: *(.*)\n *got: *(.*)", said)
    names = r'alertname="(\w+)"'
    assert set(re.findall(names, expected)) - set(re.findall(names, got)) == {alert}


def test_alerts_that_always_fire_are_noticed_at_a_server_that_is_well(tmp_path) -> None:
    said = play_faults(tmp_path / "changed", "vector(1)", ALERTS)
    assert set(re.findall(r"alertname: (\w+)", said)) == set(ALERTS)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    find_tool("prometheus")
    folder = save_own_checkpoint(tmp_path_factory.mktemp("model") / "qwen")
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(folder, log, "--set", "run.threads=1") as found:
        yield found


@pytest.fixture(scope="module")
def prometheus(served, tmp_path_factory) -> Iterator[PrometheusProcess]:
    """One that has seen the requests, and what was before them."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    often = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config["global"] |= dict.fromkeys(often, "500ms")
    config["rule_files"] = [str(RULES)]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [urlsplit(served.url).netloc]}]
    found = PrometheusProcess(tmp_path_factory.mktemp("prometheus"), config)
    try:
        make_requests(served, whole=1, streamed=1, refused=1)  # a series begins with its first one
        eventually(lambda: check_responses(found, whole=1, streamed=1, refused=1))
        make_requests(served, whole=WHOLE, streamed=STREAMED, refused=REFUSED)
        eventually(lambda: check_samples(found))
        yield found
    finally:
        found.close()


def eventually(check: Callable[[], Any]) -> Any:
    """What `check` gives once it holds: a scrape may come late, or fail on a busy machine."""
    ends_s = time.monotonic() + LONGEST_S
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.2)


def make_requests(served: Served, *, whole: int, streamed: int, refused: int) -> None:
    """Each kind at a route, or with an answer, of its own."""
    asked = {"model": served.model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text = asked | {"prompt": PROMPT}
    chat = asked | {"messages": [{"role": "user", "content": "How many?"}], "stream": True}
    with httpx.Client(base_url=served.url, timeout=30) as client:
        answers = [
            *(client.post("/v1/completions", json=text) for _ in range(whole)),
            *(client.post("/v1/chat/completions", json=chat) for _ in range(streamed)),
            *(client.post("/v1/completions", json=text | {"n": 0}) for _ in range(refused)),
        ]
    statuses = [answer.status_code for answer in answers]
    assert statuses == [200] * (whole + streamed) + [400] * refused


def check_responses(found: PrometheusProcess, *, whole: int, streamed: int, refused: int) -> None:
    told = {
        (labels["route"], labels["status"]): value
        for labels, value in found.ask('gyre_http_responses_total{route=~"/v1/.*"}')
    }
    assert told == {
        ("/v1/completions", "200"): whole,
        ("/v1/chat/completions", "200"): streamed,
        ("/v1/completions", "400"): refused,
    }


def check_samples(found: PrometheusProcess) -> None:
    """It has the last of the requests, and enough samples."""
    check_responses(found, whole=1 + WHOLE, streamed=1 + STREAMED, refused=1 + REFUSED)
    series = f'gyre_http_responses_total{{route=~"/v1/.*"}}[{WINDOW_S}s]'
    counts = [number for _, number in found.ask(f"count_over_time({series})")]
    assert len(counts) == 3 and min(counts) >= SAMPLES


@pytest.mark.slow
def test_the_metrics_are_what_promtool_takes(served) -> None:
    """But for the names that are vLLM's."""
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    found = promtool("check", "metrics", text=text)
    complaints = {line.partition(" ")[::2] for line in (found.stdout + found.stderr).splitlines()}
    assert {what for _, what in complaints} == {"metric names should not contain ':'"}
    assert all(name.startswith("vllm:") for name, _ in complaints) and found.returncode == 3


@pytest.mark.slow
def test_every_query_has_an_answer(prometheus) -> None:
    """Those of the rules may have none: nothing is wrong."""

    def check() -> None:
        answers = {one.query: prometheus.ask(filled(one)) for one in panel_queries()}
        assert not [query for query, found in answers.items() if not found]
        values = {query: value for query, found in answers.items() for _, value in found}
        assert not [query for query, value in values.items() if value != value]

    eventually(check)
    for rule in read_rules():
        prometheus.ask(rule["expr"])


def filled(one: PanelQuery) -> str:
    return filled_in(one.query, window=f"{WINDOW_S}s")


@pytest.mark.slow
def test_every_metric_that_a_query_names_was_scraped(served, prometheus) -> None:
    names = set(prometheus.get("label/__name__/values"))
    queries = [*(rule["expr"] for rule in read_rules()), *map(filled, panel_queries())]
    asked = [one for query in queries for one in asked_for(query)]
    assert len(asked) >= len(queries)
    for name, labels in asked:
        assert name in names
        for series in prometheus.get("series", **{"match[]": name}):
            assert labels <= series.keys(), (name, series)
    ((metric, label),) = variable_queries()
    found = prometheus.get(f"label/{label}/values", **{"match[]": metric})
    assert found == [served.model]


@pytest.mark.slow
def test_panels_show_the_requests_that_were_made(prometheus) -> None:
    """A rate is that of the samples, which Prometheus extends to the ends of its window by at most
    1.1 of their distance."""

    def count(title: str, part: str, *labels: str) -> dict[tuple[str, ...], float]:
        """How many there were in the window, by the values of the labels."""
        query = panel(title, part)
        return {
            tuple(series[name] for name in labels): value * WINDOW_S
            for series, value in prometheus.ask(query)
        }

    def check(found: dict[tuple[str, ...], float], made: dict[tuple[str, ...], int]) -> None:
        assert found.keys() == made.keys()
        for key, number in made.items():
            assert number <= found[key] * 1.0001 and found[key] <= number * (1 + slack), key

    slack = 2.2 / (SAMPLES - 1)
    check(
        count("Responses by status", "", "route", "status"),
        {
            ("/v1/completions", "200"): WHOLE,
            ("/v1/chat/completions", "200"): STREAMED,
            ("/v1/completions", "400"): REFUSED,
        },
    )
    check(count("Refused and failed by code", "by (code)", "code"), {("invalid_value",): REFUSED})
    ended = WHOLE + STREAMED
    assert count("Completions that ended", "", "finished_reason")[("length",)] >= ended


def panel(title: str, part: str) -> str:
    """The one query of a panel that has a part."""
    (found,) = [one for one in panel_queries() if one.title == title and part in one.query]
    return filled(found)


@pytest.mark.slow
def test_panels_show_what_the_requests_were(prometheus) -> None:
    ((_, hits),) = prometheus.ask(panel("Prefix cache hits, preemptions", "prefix_cache_hits"))
    assert 0.5 < hits < 0.9  # at most 32 of 40 tokens; a conversation has less
    ((_, prompt),) = prometheus.ask(panel("Length", "0.5, sum by (le) (rate(vllm:request_prompt"))
    assert 20 < prompt <= 50  # the bucket of 40 tokens
    ((_, answer),) = prometheus.ask(panel("Length", "0.5, sum by (le) (rate(vllm:request_gen"))
    assert 5 < answer <= 10  # that of 8


@pytest.mark.slow
def test_panels_show_the_engine_that_is_there(prometheus) -> None:
    def check() -> None:
        states = {labels["state"]: n for labels, n in prometheus.ask(panel("Engines by state", ""))}
        assert states.pop("ready", 0) == 1 and not any(states.values())
        assert [value for _, value in prometheus.ask(panel("Ready", ""))] == [1]

    eventually(check)


@pytest.mark.slow
def test_rules_are_silent_until_the_server_is(served, prometheus) -> None:
    def pending() -> set[str]:
        return {one["labels"]["alertname"] for one in prometheus.get("alerts")["alerts"]}

    def check(expected: set[str]) -> None:
        (group,) = prometheus.get("rules")["groups"]
        assert {rule["name"]: rule["health"] for rule in group["rules"]} == {
            rule["alert"]: "ok" for rule in read_rules()
        }
        assert pending() == expected

    eventually(lambda: check(set()))
    served.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: check({"GyreAbsent"}))
    finally:
        served.process.send_signal(signal.SIGCONT)
    eventually(lambda: check(set()))
