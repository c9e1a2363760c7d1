"""Supervised examples and preference pairs, from rows and from traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.core.errors import InputError
from gyre.data.config import DataConfig
from gyre.data.examples import load_examples, tokenizer_texts
from gyre.data.pairs import load_pairs
from gyre.data.sources import PairSource, load_prompts
from gyre.data.tasks import answer_checker, generate_problems
from gyre.text.tokenizer import train_tokenizer
from unit.data.test_sources import Events, write_jsonl

CHAIN = DataConfig(
    task_options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    num_problems=400,
    system="S",
)
TOKENIZER = train_tokenizer(tokenizer_texts(CHAIN, num_texts=200, emit=Events()), vocab_size=400)


def answer_of(text: str) -> str:
    return text.split("<answer>")[1].split("</answer>")[0]


def test_traced_examples_are_the_prompts_with_right_answers() -> None:
    prompts = load_prompts(CHAIN, TOKENIZER, emit=Events())
    examples = load_examples(CHAIN, TOKENIZER, emit=Events())
    for some, others in ((prompts.train, examples.train), (prompts.held_out, examples.held_out)):
        assert len(some) == len(others) > 20
        for prompt, example in zip(some, others, strict=True):
            mask = example.columns["loss_mask"]
            assert mask.dtype == bool
            assert example.tokens[~mask].tolist() == prompt.tokens.tolist()
            response = TOKENIZER.decode(example.tokens[mask])
            assert response.startswith("<think>")
            assert response.endswith("</answer><|end|>")
            assert answer_of(response) == prompt.task["answer"]
            assert example.group_id == prompt.prompt_id


def test_rows_with_several_responses_stay_in_one_half(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i % 30}", "response": f"r{i}"} for i in range(60)]
    rows += [
        rows[0],
        {"prompt": "chat", "response": [{"role": "assistant", "content": "from a chat"}]},
    ]
    path = write_jsonl(tmp_path / "sft.jsonl", rows)
    events = Events()
    settings = DataConfig(source="jsonl", path=str(path), held_out_fraction=0.3)
    found = load_examples(settings, TOKENIZER, emit=events)
    texts = [[TOKENIZER.decode(s.tokens) for s in half] for half in (found.train, found.held_out)]
    assert sorted(texts[0] + texts[1]) == sorted(
        [f"p{i % 30}\nr{i}<|end|>" for i in range(60)] + ["chat\nfrom a chat<|end|>"]
    )
    assert not {t.split("\n")[0] for t in texts[0]} & {t.split("\n")[0] for t in texts[1]}
    assert events.named("data.loaded")[0]["dropped"]["duplicate"] == 1


def test_overlong_examples(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "response": "long " * (20 if i == 3 else 1)} for i in range(30)]
    path = write_jsonl(tmp_path / "sft.jsonl", rows)
    settings = {
        "source": "jsonl",
        "path": str(path),
        "held_out_fraction": 0.2,
        "max_sequence_tokens": 40,
    }
    with pytest.raises(
        InputError,
        match=r"sft\.jsonl:4: the sequence has 1\d\d tokens; data.max_sequence_tokens = 40",
    ):
        load_examples(DataConfig(**settings), TOKENIZER, emit=Events())
    found = load_examples(DataConfig(**settings, overlong="drop"), TOKENIZER, emit=Events())
    assert len(found.train) + len(found.held_out) == 29


def test_traced_pairs_differ_in_being_right() -> None:
    check = answer_checker(CHAIN)
    tasks = {p.prompt: dict(p.task) for p in generate_problems(CHAIN, emit=Events())}
    found = load_pairs(CHAIN, TOKENIZER, emit=Events())
    assert len(found.train) + len(found.held_out) == 400
    for half in (found.train, found.held_out):
        for index, (chosen, rejected) in enumerate(half):
            assert (chosen.pair_id, rejected.pair_id) == (index, index)
            assert (chosen.scalars["chosen"], rejected.scalars["chosen"]) == (1.0, 0.0)
            prompts = [
                TOKENIZER.decode(s.tokens[~s.columns["loss_mask"]]) for s in (chosen, rejected)
            ]
            assert prompts[0] == prompts[1]
            task = tasks[prompts[0].removeprefix("S\n").removesuffix("\n")]
            scores = [
                check(answer_of(TOKENIZER.decode(s.tokens)), task) for s in (chosen, rejected)
            ]
            assert scores[0] == 1.0 > scores[1]


def test_pairs_are_the_same_every_time() -> None:
    one, two = (load_pairs(CHAIN, TOKENIZER, emit=Events()) for _ in range(2))
    assert [r.tokens.tolist() for _, r in one.train] == [r.tokens.tolist() for _, r in two.train]
    other = load_pairs(CHAIN.model_copy(update={"num_problems": 300}), TOKENIZER, emit=Events())
    wrong = {c.group_id: r.tokens.tolist() for c, r in one.train}
    assert all(wrong[c.group_id] == r.tokens.tolist() for c, r in other.train)


def test_pairs_from_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    rows.append({"prompt": "same", "chosen": "x", "rejected": "x"})
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    events = Events()
    found = load_pairs(
        DataConfig(source="jsonl", path=str(path), held_out_fraction=0.3), TOKENIZER, emit=events
    )
    assert events.named("data.loaded")[0]["dropped"]["no_difference"] == 1
    texts = [[TOKENIZER.decode(s.tokens) for s in pair] for pair in (*found.train, *found.held_out)]
    assert sorted(texts) == sorted(
        [f"p{i}\ngood {i}<|end|>", f"p{i}\nbad {i}<|end|>"] for i in range(40)
    )


def test_a_batch_over_epochs_keeps_pairs_apart() -> None:
    pairs = load_pairs(CHAIN, TOKENIZER, emit=Events()).held_out
    batch = PairSource(pairs, seed=0, name="pairs").take(3 * len(pairs))
    assert len(batch) == 6 * len(pairs)
    assert [s.pair_id for s in batch] == [i // 2 for i in range(len(batch))]
    assert [s.scalars["chosen"] for s in batch] == [1.0, 0.0] * (3 * len(pairs))


def test_missing_response_and_untraced_task(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "output": "r", "chosen": "c"}])
    settings = DataConfig(source="jsonl", path=str(path), held_out_fraction=0)
    with pytest.raises(
        InputError, match=r":1: field 'response' is missing; the row has prompt, output, chosen"
    ) as caught:
        load_examples(settings, TOKENIZER, emit=Events())
    assert "data.response_field" in caught.value.hint
    with pytest.raises(InputError, match=r":1: field 'rejected' is missing"):
        load_pairs(settings, TOKENIZER, emit=Events())
    with pytest.raises(InputError, match="no worked traces") as caught:
        load_examples(DataConfig(task="countdown"), TOKENIZER, emit=Events())
    assert "jsonl" in caught.value.hint


def test_tokenizer_texts_are_what_examples_read_as(tmp_path: Path) -> None:
    examples = load_examples(CHAIN, TOKENIZER, emit=Events()).train
    texts = tokenizer_texts(CHAIN, num_texts=50, emit=Events())
    assert [text + "<|end|>" for text in texts] == [
        TOKENIZER.decode(s.tokens) for s in examples[:50]
    ]
    rows = [{"prompt": f"p{i}", "response": "r"} for i in range(9)] + [{"prompt": "only a prompt"}]
    settings = DataConfig(
        source="jsonl", path=str(write_jsonl(tmp_path / "rows.jsonl", rows)), held_out_fraction=0
    )
    assert tokenizer_texts(settings, num_texts=99, emit=Events()) == [
        f"p{i}\nr" for i in range(9)
    ] + ["only a prompt\n"]
