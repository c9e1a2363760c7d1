"""What a call from Python may ask for, and the API's body that it becomes."""

from __future__ import annotations

import inspect
import re
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import DeadlineError, EngineRefused, InputError
from gyre.launch.python.requests import (
    ChatArgs,
    GenerateArgs,
    as_gyre_error,
    chat_asked,
    chats_asked,
    text_asked,
    texts_asked,
)
from gyre.server.bodies.schema import ApiError, ChatBody, CompletionBody

ASKED = [{"role": "user", "content": "is it?"}]


@pytest.mark.parametrize(("kind", "body"), [(GenerateArgs, CompletionBody), (ChatArgs, ChatBody)])
def test_each_argument_is_a_field_of_the_api(kind, body) -> None:
    assert set(kind.__optional_keys__) <= set(body.model_fields)
    assert not kind.__required_keys__


def test_defaults_are_those_of_the_api() -> None:
    text = text_asked("a", {}).body
    assert text == CompletionBody(model="local", prompt="a")
    chat = chat_asked(ASKED, {}).body
    assert chat == ChatBody.model_validate({"model": "local", "messages": ASKED})


@given(st.text(min_size=1, max_size=12))
def test_a_name_is_accepted_or_refused_with_what_is(name) -> None:
    accepted = typing.get_type_hints(GenerateArgs)
    if name in accepted:
        return
    with pytest.raises(InputError) as refused:
        text_asked("a", {name: 1})
    assert repr(name) in refused.value.message
    assert all(one in refused.value.message for one in accepted)


@pytest.mark.parametrize(
    ("name", "near"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("topp", "top_p")],
)
def test_the_nearest_name_is_said(name, near) -> None:
    with pytest.raises(InputError, match=re.escape(f"did you mean '{near}'")):
        text_asked("a", {name: 1})


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_a_prompt_of_ids_may_be_any_row(ids) -> None:
    for row in (ids, tuple(ids), np.asarray(ids, np.int64)):
        found = texts_asked(row, {})
        assert not isinstance(found, list) and found.body.prompt == ids
    for rows in ([ids, ids], (ids, np.asarray(ids)), np.asarray([ids, ids])):
        found = texts_asked(rows, {})
        assert isinstance(found, list)
        assert [one.body.prompt for one in found] == [ids, ids]


def test_a_list_of_one_is_a_list() -> None:
    assert isinstance(texts_asked(["a"], {}), list) and isinstance(chats_asked([ASKED], {}), list)
    assert texts_asked([], {}) == [] and chats_asked([], {}) == []


def test_values_of_python_become_those_of_json() -> None:
    asked = {"stop": ("a", "b"), "logit_bias": {7: 1}, "seed": np.int64(3), "temperature": 1}
    body = text_asked("a", asked).body
    assert body.stops == ("a", "b") and body.seed == 3
    assert body.logit_bias == {"7": 1.0}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"n": True}, "n = True"),
        ({"deadline_s": 0}, "deadline_s = 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(asked, said) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        text_asked("a", asked)


@pytest.mark.parametrize("prompt", [None, 7, {"a": 1}, [None], ["a", 7]])
def test_what_is_no_prompt_is_refused(prompt) -> None:
    with pytest.raises(InputError, match="prompt"):
        texts_asked(prompt, {})


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user"}, ["hi"], [[7]]])
def test_what_is_no_conversation_is_refused(messages) -> None:
    with pytest.raises(InputError, match="message"):
        chats_asked(messages, {})


def test_each_refusal_of_the_api_is_an_error_of_gyre() -> None:
    kinds = {400: InputError, 404: InputError, 429: EngineRefused, 503: EngineRefused}
    for status, kind in (kinds | {504: DeadlineError}).items():
        found = as_gyre_error(ApiError(status, "so"))
        assert type(found) is kind and found.message == "so"


def test_the_public_methods_name_their_arguments() -> None:
    from gyre import Engine

    for name in ("generate", "agenerate", "chat", "achat", "stream", "astream"):
        assert "asked" in inspect.signature(getattr(Engine, name)).parameters
