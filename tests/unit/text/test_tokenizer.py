"""Our own tokenizer: round trips, digits alone, boilerplate merged, the same in any process and in
transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import InputError
from gyre.text.tokenizer import (
    END,
    PAD,
    SPECIAL,
    Tokenizer,
    is_misread,
    load_tokenizer,
    train_tokenizer,
)

MESSAGES = [
    {"role": "system", "content": "Think first."},
    {"role": "user", "content": "What is 1 - -2?"},
    {"role": "assistant", "content": "<think>1 + 2 = 3</think><answer>3</answer>"},
    {"role": "user", "content": "And 40 + 2?"},
]


def training_texts() -> list[str]:
    return [
        f"State the final answer to the following problem: {a} - {b} =\n<think>{a} - {b} = "
        f"{a - b}</think>"
        f"<answer>{a - b}</answer>"
        for a in range(3, 40)
        for b in range(1, 30, 4)
    ]


TOKENIZER = train_tokenizer(training_texts(), vocab_size=400)
QWEN2 = train_tokenizer(training_texts(), vocab_size=400, style="qwen2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    return folder


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.int32
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)


@given(
    st.integers(),
    st.sampled_from(["", " + ", "x = ", "<answer>", "a-", "é"]),
    st.sampled_from(["", ".", "</answer>", " * "]),
)
def test_each_digit_and_sign_is_its_own_token(number: int, before: str, after: str) -> None:
    pieces = [TOKENIZER.decode([i]) for i in TOKENIZER.encode(f"{before}{number}{after}")]
    digits = [piece for piece in pieces if any(c in "0123456789" for c in piece)]
    assert digits == list(str(abs(number)))
    if number < 0:
        assert pieces[pieces.index(digits[0]) - 1] == "-"


@given(st.text(alphabet="abcxyz", min_size=3, max_size=12))
def test_letters_of_a_spelled_word_are_single(word: str) -> None:
    pieces = [
        TOKENIZER.decode([i])
        for i in TOKENIZER.encode("\n".join([" ".join(word), " ".join(word[::-1])]))
    ]
    assert pieces == list(" ".join(word) + "\n" + " ".join(word[::-1]))


def test_boilerplate_is_one_token() -> None:
    pieces = [
        TOKENIZER.decode([i])
        for i in TOKENIZER.encode("State the final answer to the following problem: 15 - 3 =\n")
    ]
    assert pieces == [
        "State the final answer to the following problem: ",
        "1",
        "5",
        " - ",
        "3",
        " =\n",
    ]


def test_special_tokens_have_the_first_ids_and_only_pad_and_end_are_skipped() -> None:
    assert TOKENIZER.encode("".join(SPECIAL)).tolist() == list(range(len(SPECIAL)))
    assert (TOKENIZER.pad_id, TOKENIZER.eos_ids, TOKENIZER.end_id, TOKENIZER.bos_id) == (
        0,
        (1,),
        1,
        None,
    )
    assert (
        TOKENIZER.decode(range(len(SPECIAL)), skip_special=True)
        == "<think></think><answer></answer>"
    )
    assert [TOKENIZER.is_special(i) for i in range(7)] == [
        True,
        True,
        False,
        False,
        False,
        False,
        False,
    ]


def test_no_merge_crosses_a_special_token() -> None:
    vocabulary = TOKENIZER.backend.get_vocab()
    assert [t for t in vocabulary if any(s in t for s in SPECIAL) and t not in SPECIAL] == []


def test_unknown_ids_decode_to_nothing() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5, *TOKENIZER.encode("7")]) == "7"


@settings(max_examples=5, deadline=None)
@given(st.randoms(use_true_random=False))
def test_training_does_not_depend_on_the_order_of_texts(random) -> None:
    texts = training_texts()
    random.shuffle(texts)
    assert train_tokenizer(texts, vocab_size=400).fingerprint == TOKENIZER.fingerprint


def test_training_is_the_same_in_another_process() -> None:
    code = "import unit.text.test_tokenizer as t; print(t.TOKENIZER.fingerprint)"
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert run.stdout.strip() == TOKENIZER.fingerprint


def test_own_tokenizer_needs_neither_transformers_nor_torch(saved: Path) -> None:
    code = (
        "import sys; from gyre.text.tokenizer import load_tokenizer; from gyre.text.render import "
        "render_prompt\n"
        f"render_prompt(load_tokenizer({str(saved)!r}), 'hi', system='s')\n"
        "print([m for m in ('transformers', 'torch', 'jinja2') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout.strip() == "[]"


def test_saved_folder_loads_as_the_same_tokenizer(saved: Path) -> None:
    again = load_tokenizer(saved)
    assert again.fingerprint == TOKENIZER.fingerprint
    assert (again.vocab_size, again.eos_ids, again.pad_id) == (
        TOKENIZER.vocab_size,
        TOKENIZER.eos_ids,
        TOKENIZER.pad_id,
    )
    other = train_tokenizer(training_texts(), vocab_size=300)
    assert other.fingerprint != TOKENIZER.fingerprint


@pytest.mark.parametrize(
    ("model_type", "tokenizer"),
    [
        ("", TOKENIZER),
        ("qwen3", TOKENIZER),
        ("llama", TOKENIZER),
        ("qwen2", QWEN2),
        ("qwen3", QWEN2),
        ("llama", QWEN2),
    ],
)
def test_transformers_reads_the_saved_folder_the_same_way(
    tmp_path: Path, model_type: str, tokenizer: Tokenizer
) -> None:
    """Also beside the config.json of an exported model, by which AutoTokenizer chooses its
    class."""
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "vocab_size": 400})
        )
    hub = AutoTokenizer.from_pretrained(str(tmp_path))
    assert not is_misread(tokenizer, model_type) and not is_misread(
        load_tokenizer(tmp_path), model_type
    )
    for text in (
        "State the final answer to the following problem: 15 - -3 =\n<think>",
        "é日本🙂 don 't .",
        f"{END}{PAD} 3 <|endoftext|>",
    ):
        ids = tokenizer.encode(text).tolist()
        assert hub(text)["input_ids"] == ids
        assert hub.decode(ids) == text
        assert hub.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special=True)
    assert (hub.eos_token_id, hub.pad_token_id, len(hub)) == (
        tokenizer.end_id,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    for messages in (MESSAGES, MESSAGES[1:2], MESSAGES[:2]):
        text = hub.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == tokenizer.render_chat(messages)


def test_files_that_transformers_would_read_otherwise_are_known(tmp_path: Path) -> None:
    """Qwen2Tokenizer takes the vocabulary from the file and the cuts from its own code."""
    from transformers import AutoTokenizer

    text = "State the final answer to the following problem: 15 - -3 ="
    TOKENIZER.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 400}))
    assert (
        AutoTokenizer.from_pretrained(str(tmp_path))(text)["input_ids"]
        != TOKENIZER.encode(text).tolist()
    )
    assert is_misread(TOKENIZER, "qwen2") and not is_misread(QWEN2, "qwen2")


def test_faults_say_what_to_do(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(InputError, match="vocab_size = 100"):
        train_tokenizer(["a"], vocab_size=100)
    with pytest.raises(InputError, match="no text"):
        train_tokenizer([], vocab_size=400)
    with pytest.raises(InputError, match="not a folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(InputError, match="lone surrogate"):
        TOKENIZER.encode("cut emoji \ud83d")
    (tmp_path / "tokenizer_config.json").write_bytes((saved / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "export the model again" in caught.value.hint
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        load_tokenizer(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no tokenizer could be loaded"):
        load_tokenizer(empty)
