"""Rule scorer: sums and reasons; hangs, deaths and deadlines cost one labeled part and leave no
process."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import numpy as np
import psutil
import pytest

from gyre.core.errors import DeadlineError
from gyre.observability.events import is_counted
from gyre.rewards.config import RewardsConfig
from gyre.rewards.score import RuleScorer
from rewards_cases import Events, rollout

TOWER = r"<think>a</think><answer>9^{9^{9^{9^{9}}}}</answer>"
MODULE = """
import os, signal, subprocess, sys, time

def misbehave(task, completion):
    if "begun" in task:
        open(task["begun"], "w").close()
    if "sleep" in completion:
        time.sleep(1000)
    if "spin" in completion:
        while True:
            pass
    if "leave" in completion:
        os._exit(3)
    if "kill" in completion:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in completion:
        raise ValueError("no")
    if "nan" in completion:
        return float("nan")
    if "spawn" in completion:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    if "memory" in completion:
        bytearray(1 << 40)
    return 0.5
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_scores.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def _score(parts, rollouts, *, deadline_s=60.0, workers=2, calls=1, **settings):
    """Score in a scorer of its own; check that it keeps order and leaves nothing behind."""
    events = Events()
    before = set(psutil.Process().children(recursive=True))

    async def go():
        config = RewardsConfig.model_validate({"parts": parts, "workers": workers, **settings})
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        try:
            return await asyncio.gather(
                *(scorer.score(rollouts, deadline_s=deadline_s) for _ in range(calls))
            )
        finally:
            await scorer.close()
            await scorer.close()

    answers = asyncio.run(go())
    assert set(psutil.Process().children(recursive=True)) <= before
    for scores in answers:
        assert [score.rollout_id for score in scores] == [each.rollout_id for each in rollouts]
    return answers[0], events


MISBEHAVE = {"kind": "function", "path": "my_scores:misbehave", "limit_s": 0.5}


def test_weighted_sum_with_a_reason_for_each_part():
    parts = [
        {"kind": "answer", "compare": "numeric"},
        {"kind": "format", "weight": 0.2},
        {"kind": "length", "weight": 0.5, "soft_tokens": 4, "max_tokens": 8},
        {"kind": "model", "path": "somewhere", "weight": 3.0},
    ]
    good = rollout(0, "<think>a</think><answer>1/2</answer><|end|>", {"answer": "0.5"})
    bad = rollout(1, "it is 0.5", {"answer": "0.5"}, num_tokens=9)
    (first, second), events = _score(parts, [good, bad])
    # the loop adds the model's part
    assert [part.name for part in first.parts] == ["answer", "format", "length"]
    assert first.value == pytest.approx(1.0 + 0.2 - 0.5 * 0.25)
    assert [part.value for part in first.parts] == [1.0, 1.0, -0.25]
    assert second.value == pytest.approx(-0.5) and "unreadable answer" in second.parts[0].reason
    assert all(
        part.reason and part.outcome == "ok" for score in (first, second) for part in score.parts
    )
    assert first.started_s <= first.ended_s and first.ended_s > 0.0
    assert not events


def test_a_tower_of_exponents_is_killed_and_costs_one_part():
    parts = [{"kind": "answer", "limit_s": 1.0}, {"kind": "format", "weight": 0.25}]
    rollouts = [
        rollout(n, f"<think>a</think><answer>{n}.0</answer>", {"answer": str(n)}) for n in range(40)
    ]
    rollouts[7] = rollout(7, TOWER, {"answer": "5 + x"})
    scores, events = _score(parts, rollouts)
    tower = scores.pop(7)
    assert [part.outcome for part in tower.parts] == ["timeout", "ok"] and tower.value == 0.25
    assert "limit of 1 s" in tower.parts[0].reason
    assert all(score.value == 1.25 for score in scores)
    assert sorted(events.kinds()) == ["reward.timeout", "reward.worker_replaced"]
    assert dict(events)["reward.timeout"]["rollout"] == "r7"


@pytest.mark.parametrize(
    ("text", "outcome", "said"),
    [
        ("sleep", "timeout", "limit of 0.5 s"),
        ("spin", "timeout", "limit of 0.5 s"),
        ("leave", "error", "exit code 3"),
        ("kill", "error", "signal 9"),
        ("raise", "error", "my_scores:misbehave raised ValueError at "),
        ("nan", "invalid", "nan"),
        ("memory", "error", "MemoryError"),
        ("spawn", "ok", "0.5"),
    ],
)
def test_a_bad_function_call_costs_its_own_part_only(text, outcome, said):
    rollouts = [rollout(n, text if n == 3 else "fine", {}) for n in range(8)]
    scores, events = _score([MISBEHAVE, {"kind": "format"}], rollouts, worker_memory_mib=1024)
    bad = scores.pop(3)
    assert bad.parts[0].outcome == outcome and said in bad.parts[0].reason
    assert bad.parts[1].outcome == "ok"
    assert {score.value for score in scores} == {0.5}
    assert events.kinds().count(f"reward.{outcome}") == (outcome != "ok")


def test_every_call_may_hang_and_each_is_told():
    scores, events = _score(
        [{**MISBEHAVE, "limit_s": 0.2}], [rollout(n, "sleep", {}) for n in range(5)]
    )
    assert {score.parts[0].outcome for score in scores} == {"timeout"}
    assert events.kinds().count("reward.worker_replaced") == 5


def test_the_deadline_ends_a_call():
    events = Events()

    async def go():
        config = RewardsConfig.model_validate(
            {"parts": [{**MISBEHAVE, "limit_s": 100.0}], "workers": 1}
        )
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        await scorer.score([rollout(0, "fine", {})], deadline_s=60.0)
        late = await scorer.score(
            [rollout(n, "fine" if n else "sleep", {}) for n in range(4)], deadline_s=0.3
        )
        after = await scorer.score([rollout(0, "fine", {})], deadline_s=60.0)
        await scorer.close()
        return late, after

    late, after = asyncio.run(go())
    assert [score.parts[0].outcome for score in late] == ["timeout"] * 4
    assert "0.3 s after the call" in late[0].parts[0].reason
    assert after[0].value == 0.5
    assert events.kinds() == ["reward.worker_replaced"] + ["reward.timeout"] * 4


def test_calls_overlap_and_a_cancelled_one_frees_its_workers(tmp_path):
    events = Events()
    begun = tmp_path / "begun"

    async def go():
        config = RewardsConfig.model_validate(
            {"parts": [{**MISBEHAVE, "limit_s": 100.0}], "workers": 1}
        )
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        asked = rollout(0, "sleep", {"begun": str(begun)})
        hanging = asyncio.create_task(scorer.score([asked], deadline_s=100.0))
        while not begun.exists():
            await asyncio.sleep(0.01)
        second = asyncio.create_task(scorer.score([rollout(1, "fine", {})], deadline_s=60.0))
        await asyncio.sleep(0.01)
        hanging.cancel()
        (score,) = await second
        third = asyncio.create_task(scorer.score([rollout(2, "sleep", {})], deadline_s=100.0))
        await asyncio.sleep(0.05)
        await scorer.close()
        return score, (await third)[0]

    score, closed = asyncio.run(go())
    assert score.value == 0.5
    assert closed.parts[0].outcome == "timeout" and "closed" in closed.parts[0].reason


def test_the_death_of_the_fork_server_costs_nothing():
    events = Events()

    async def go():
        config = RewardsConfig.model_validate({"parts": [MISBEHAVE], "workers": 2})
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        await scorer.score([rollout(0, "fine", {})], deadline_s=60.0)
        os.kill(scorer.pool.server.process.pid, 9)
        while not events:
            await asyncio.sleep(0.005)
        scores = await scorer.score([rollout(n, "fine", {}) for n in range(6)], deadline_s=60.0)
        await scorer.close()
        return scores

    assert {score.value for score in asyncio.run(go())} == {0.5}
    assert events.kinds() == ["reward.fork_server_replaced"]


def test_end_markers_are_taken_off_however_many():
    texts = [
        "4" + end * count for end in ("</s>", " <|im_end|>\n</s>\n") for count in (0, 1, 3, 3000)
    ]
    rollouts = [rollout(n, text, {"answer": "4"}) for n, text in enumerate(texts)]
    scores, events = _score([{"kind": "answer", "forms": ["plain"]}], rollouts)
    assert {score.value for score in scores} == {1.0} and events.kinds() == []


def test_labels_that_cannot_be_read_are_invalid():
    rollouts = [
        rollout(0, "<answer>5</answer>", {}),
        rollout(1, "<answer>5</answer>", {"answer": "5"}),
    ]
    scores, events = _score([{"kind": "answer", "compare": "numeric"}], rollouts)
    assert [score.parts[0].outcome for score in scores] == ["invalid", "ok"]
    assert [score.value for score in scores] == [0.0, 1.0]
    assert events.kinds() == ["reward.invalid"]


def test_tasks_may_hold_numpy_and_bad_ones_are_labeled():
    rollouts = [
        rollout(0, "<answer>5</answer>", {"answer": np.int64(5), "more": np.arange(3)}),
        rollout(1, "<answer>5</answer>", {"answer": "5", "file": object()}),
        rollout(2, "<answer>\ud800</answer>", {"answer": "5"}),
        rollout(3, "x" * 300_000 + "<answer>5</answer>", {"answer": "5"}),
    ]
    scores, _ = _score([{"kind": "answer", "compare": "numeric"}], rollouts)
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 1.0]
    assert "not JSON-able" in scores[1].parts[0].reason


def test_programs_run_in_the_sandbox_and_say_how():
    task = {
        "function": "add",
        "tests": [{"args": [1, 2], "expected": 3}, "assert add(2, 2) == 4"],
        "setup": "ONE = 1",
    }
    texts = [
        "```python\ndef add(a, b): return a + b * ONE\n```",
        "```python\ndef add(a, b): return 3\n```",
        "none",
    ]
    rollouts = [rollout(n, text, task) for n, text in enumerate(texts)]
    rollouts.append(rollout(3, texts[0], {"tests": []}))
    scores, events = _score([{"kind": "code"}], rollouts)
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.0]
    assert "test 2: returned 3, expected 4" in scores[1].parts[0].reason
    assert scores[3].parts[0].outcome == "invalid"
    assert events.kinds()[0] in ("sandbox.started", "sandbox.weak")
    all_or_nothing, _ = _score([{"kind": "code", "score": "all"}], rollouts[:2])
    assert [score.value for score in all_or_nothing] == [1.0, 0.0]


def test_reasoning_gym_s_own_scorer():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    task = {"task": "chain_sum", **entry}
    texts = [f"<answer>{entry['answer']}</answer>", "<answer>no</answer>", "nothing"]
    rollouts = [rollout(n, text, task) for n, text in enumerate(texts)]
    rollouts.append(rollout(3, texts[0], {"answer": "1"}))
    scores, _ = _score([{"kind": "reasoning_gym"}], rollouts)
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0]
    assert scores[3].parts[0].outcome == "invalid"


def test_workers_load_no_torch():
    code = (
        "import gyre.rewards.pool.worker, sys; print(sorted({'torch', 'numpy', 'pydantic', "
        "'sympy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    async def go():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=environment
        )
        return (await process.communicate())[0]

    assert asyncio.run(go()) == b"[]\n"


def test_workers_that_cannot_start_end_the_call_with_the_reason(monkeypatch, tmp_path):
    (tmp_path / "msgspec.py").write_text("raise ImportError('no such package here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    events = Events()

    async def go():
        config = RewardsConfig.model_validate({"parts": [{"kind": "format"}], "workers": 1})
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        try:
            await scorer.score([rollout(0, "", {})], deadline_s=60.0)
        finally:
            await scorer.close()

    with pytest.raises(
        DeadlineError, match="did not start in 6 tries; the last one ended with exit code 1"
    ):
        asyncio.run(go())
    assert set(events.kinds()) == {"reward.fork_server_replaced"}


def test_refused_system_calls_are_an_event_that_the_report_counts():
    program = (
        "```python\nimport socket\ntry:\n    socket.socket(40, 1)\nexcept OSError:\n    "
        "print(7)\n```"
    )
    rollouts = [rollout(0, program, {"tests": [{"stdin": "", "stdout": "7\n"}]})]
    scores, events = _score([{"kind": "code"}], rollouts)
    assert scores[0].value == 1.0
    (told,) = [fields for kind, fields in events if kind == "sandbox.call_refused"]
    assert told["calls"] == {"socket(family 40, protocol 0)": 1} and told["part"] == "code"
    assert is_counted({"kind": "sandbox.call_refused"})
