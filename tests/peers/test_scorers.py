"""Answers that we and the peers' scorers judge: every verdict is kept in answers.tsv, and none of
ours is a false right."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from environment import ask

from gyre.rewards.answers.answer import compare

HERE = Path(__file__).parent
PEERS = ("gsm8k", "dapo", "math", "trl", "rg")


class Case(NamedTuple):
    why: str  # the heading that it stands under
    truth: str  # "+": a careful reader calls the answer right
    ours: str
    peers: tuple[str, ...]
    label: str
    answer: str
    question: str


def read_cases() -> list[Case]:
    cases, why = [], ""
    for line in (HERE / "answers.tsv").read_text().split("\n"):
        if line.startswith("#"):
            why = line.lstrip("# ")
        elif line:
            truth, ours, *rest = line.split("\t")
            label, answer, question = [*rest[len(PEERS) :], ""][:3]
            cases.append(Case(why, truth, ours, tuple(rest[: len(PEERS)]), label, answer, question))
    return cases


CASES = read_cases()


def test_the_table_says_who_is_right_in_each_disagreement():
    assert len(CASES) >= 300
    assert len({(case.label, case.answer, case.question) for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.truth in "+-" and case.ours in "+-" and len(case.why) > 20
    assert sum({case.ours, *case.peers} != {case.truth} for case in CASES) > 300


def test_our_verdicts():
    found = []
    for case in CASES:
        outcome = compare(case.answer, case.label, how="auto", question=case.question).outcome
        found.append(("+" if outcome == "right" else "-", *case[4:]))
    assert found == [(case.ours, *case[4:]) for case in CASES]


def test_we_call_nothing_right_that_is_wrong_and_say_where_we_are_strict():
    assert [case for case in CASES if case.ours == "+" and case.truth == "-"] == []
    strict = {case.why for case in CASES if case.ours == "-" and case.truth == "+"}
    assert all("not to us" in why or "without the question" in why for why in strict)


@pytest.mark.slow
def test_verdicts_of_the_peers():
    found = ask(HERE / "ask_scorers.py", [(case.label, case.answer) for case in CASES])
    kept = [dict(zip(PEERS, case.peers, strict=True)) for case in CASES]
    changed = [
        (case.label, case.answer, now, was)
        for case, now, was in zip(CASES, found, kept, strict=True)
        if now != was
    ]
    assert changed == []
