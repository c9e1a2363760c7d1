"""Credits: collector and learner never wait for each other, and never part further than the lead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.loop.asynchronous.credits import Credits
from gyre.loop.config import lead_of, most_carries


class Model:
    """Both tasks, moved by hand: what each may do next, as the pipeline does it."""

    def __init__(self, lead: int, last: int) -> None:
        self.credits = Credits(lead=lead, last=last, collected=0, wanted=-lead)
        self.begun_at: dict[int, int] = {}  # collection -> published steps when it began
        self.published, self.trained = 0, []
        self.learner = "between"  # between, waiting, training, holding, handing_over
        self.step = 0

    def moves(self) -> list[str]:
        credits = self.credits
        found = ["begin"] if credits.may_begin else []
        found += ["end"] if credits.collecting else []
        if self.learner == "between" and self.step < credits.last:
            found += ["want", "look"]  # the next step, or an evaluation
        if self.learner == "waiting" and credits.has(self.step):
            found.append("train")
        if self.learner == "training":
            found += ["hold", "publish"]  # drain, or continue
        if self.learner in ("holding", "looking") and credits.is_at_rest:
            found.append("rested")
        return found

    def move(self, name: str) -> None:
        credits = self.credits
        if name == "begin":
            self.credits = credits.begin()
            self.begun_at[credits.collected + 1] = self.published
        elif name == "end":
            self.credits = credits.end()
        elif name == "want":
            self.step += 1
            self.credits, self.learner = credits.want(self.step), "waiting"
        elif name == "train":
            self.trained.append(self.step)
            self.learner = "training"
        elif name in ("hold", "look"):
            self.credits = credits.hold()
            self.learner = "holding" if name == "hold" else "looking"
        elif name == "rested":
            self.published += self.learner == "holding"
            self.credits, self.learner = credits.release(), "between"
        elif name == "publish":
            self.published, self.learner = self.published + 1, "between"


@given(lead=st.integers(0, 4), last=st.integers(1, 12), data=st.data())
def test_no_order_of_events_leads_to_a_deadlock_or_past_the_lead(lead, last, data):
    model = Model(lead, last)
    for _ in range(30 * last):
        moves = model.moves()
        if not moves:
            break
        model.move(data.draw(st.sampled_from(moves)))
        ahead = model.credits.collected + model.credits.collecting - len(model.trained)
        assert ahead <= lead + 1, "what waits in the queue, and the one under way"
    else:
        # evaluations may go on for ever; without them the rest ends
        while moves := [move for move in model.moves() if move != "look"]:
            model.move(moves[0])
    assert model.trained == list(range(1, last + 1)), "each collection once, in order"
    assert model.credits.collected == last
    for collection, published in model.begun_at.items():
        assert 0 <= collection - 1 - published <= lead


@given(last=st.integers(1, 8), data=st.data())
def test_with_no_lead_the_two_take_turns(last, data):
    model = Model(0, last)
    while moves := [move for move in model.moves() if move != "look"]:
        assert not (model.credits.collecting and model.learner != "waiting")
        model.move(data.draw(st.sampled_from(moves)))
    assert all(published == step - 1 for step, published in model.begun_at.items())


def test_nothing_begins_before_the_learner_wants_a_step_or_while_it_holds():
    credits = Credits(lead=2, last=9, collected=0, wanted=-2)
    assert not credits.may_begin and credits.want(1).may_begin
    held = credits.want(1).hold()
    assert not held.may_begin and held.is_at_rest and held.release().may_begin
    under_way = credits.want(1).begin().hold()
    assert not under_way.is_at_rest and under_way.end().is_at_rest
    with pytest.raises(AssertionError, match="hold"):
        held.want(2)


@pytest.mark.parametrize(
    ("max_tokens", "cap", "carries"), [(100, 0, 0), (100, 100, 0), (100, 99, 1), (100, 25, 3)]
)
def test_how_often_a_completion_is_set_aside(max_tokens, cap, carries):
    assert most_carries(max_tokens=max_tokens, max_tokens_per_iteration=cap) == carries


@given(st.integers(0, 64), st.integers(0, 64))
def test_the_lead_leaves_room_to_carry_where_the_bound_has_it(bound, carries):
    lead = lead_of(bound, carries)
    assert lead == 0 if bound == 0 else 1 <= lead <= bound
    if bound > carries:
        assert lead + carries <= bound or carries == 0
