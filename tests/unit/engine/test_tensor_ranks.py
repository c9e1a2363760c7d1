"""An engine over the ranks of the tensor axis: cores in two or four processes play one journal, each
on its part of the model and its logits, and choose what one core with the whole model chooses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.records import Request, Sampling
from gyre.distributed.process_group import alone
from gyre.engine.config import EngineConfig
from gyre.engine.scheduler.journal import (
    Abort,
    Add,
    Commit,
    Entry,
    Expire,
    Flush,
    Interrupt,
    JournalWriter,
    MoveComponent,
    Start,
    Steps,
)
from gyre.models.spec import ModelSpec
from layout_cases import spec_of
from rank_pool import RankPool
from tensor_cases import played

SIZES = {"hidden_size": 16, "num_layers": 2, "vocab_size": 53, "mlp_size": 24}
SPECS = {
    "llama": spec_of("llama", **SIZES),
    "qwen2": spec_of("qwen2", **SIZES, tied=True),
    "qwen3": spec_of("qwen3", **SIZES),
    "repeated": spec_of("qwen3", **SIZES, num_kv_heads=1),
}
SCARCE = {"page_tokens": 4, "max_running": 4, "token_budget": 16, "num_pages": 30}
NAMES = [f"r{number}" for number in range(6)]


def spec_named(which: str) -> ModelSpec:
    return replace(SPECS[which], context_tokens=96, head_dim=8)


def start(*, num_slots: int = 0, **changes: object) -> Start:
    config = EngineConfig.model_validate({**SCARCE, "c_kernels": False, **changes})
    settings = config.model_dump(mode="json")
    return Start(
        settings=settings,
        num_pages=config.num_pages,
        num_slots=num_slots,
        version=1,
        eos_ids=(),
    )


def request(name: str, length: int, max_tokens: int, **sampling: object) -> Request:
    rng = np.random.default_rng([length, max_tokens])
    return Request(
        request_id=name,
        tokens=rng.integers(0, 5, length).astype(np.int32),
        sampling=Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        seed=length,
        chunk_tokens=3,
    )


def check_choices(pool: RankPool, tmp_path: Path, which: str, overlap: bool) -> None:
    """Greedy and sampled, with truncation, penalties, alternatives, log-probs of the prompt,
    preemption, an abort, a deadline and new weights on the way. All ranks read the same file."""
    spec, writer = spec_named(which), JournalWriter(tmp_path)
    asked = [
        request("greedy", 9, 40, temperature=0.0),
        request("sampled", 30, 40, temperature=1.0, n=2),
        request("nucleus", 7, 30, temperature=0.8, top_p=0.9, top_k=20),
        request("penalized", 11, 30, temperature=0.0, frequency_penalty=0.5, top_logprobs=3),
        request("scored", 20, 10, temperature=0.0, prompt_logprobs=2),
        request("aborted", 5, 50, temperature=0.0),
        request("late", 5, 50, temperature=0.0),
    ]
    entries: list[Entry] = [start(overlap=overlap), *map(Add.of, asked[:3]), Steps(count=4)]
    entries += [
        *map(Add.of, asked[3:]),
        Steps(count=9),
        Abort(request_ids=("aborted",), reason="x"),
    ]
    entries += [
        Commit(version=2, policy="keep_prefix"),
        Steps(count=5),
        Expire(request_ids=("late",)),
    ]
    entries += [Commit(version=3, policy="continue"), Steps(count=200)]
    for entry in entries:
        writer.write(entry)
    writer.flush()
    one, kinds = played(alone(), spec, str(writer.path))
    (first, its_kinds), *others = pool.run(played, spec, str(writer.path))
    assert all(found == first for found, _ in others), "the same answers, to the bit"
    assert its_kinds == kinds and "engine.preempted" in kinds and "engine.torch_kernels" in kinds
    assert first.keys() == one.keys() and ("sampled", 1) in one
    for key, chunks in one.items():
        assert [chunk[0] for chunk in first[key]] == [chunk[0] for chunk in chunks], key
        assert [chunk[3:] for chunk in first[key]] == [chunk[3:] for chunk in chunks], key
        for found, expected in zip(first[key], chunks, strict=True):
            np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
            np.testing.assert_allclose(found[2], expected[2], atol=1e-4)
    assert sum(len(chunk[0]) for chunks in one.values() for chunk in chunks) > 150


QUICK = ("llama", False), ("qwen3", True)


@pytest.mark.parametrize(
    ("which", "overlap"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(SPECS, (False, True))
    ],
)
def test_two_ranks_choose_as_one(pair: RankPool, tmp_path: Path, which: str, overlap: bool) -> None:
    check_choices(pair, tmp_path, which, overlap)


@pytest.mark.slow
def test_four_ranks_choose_as_one(ranks: RankPool, tmp_path: Path) -> None:
    check_choices(ranks, tmp_path, "qwen3", overlap=False)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sequences_go_on_after_a_swap_as_in_one_rank(pair: RankPool, overlap: bool) -> None:
    """Each rank has the KV of its own heads in host memory, under the same slots."""
    spec = spec_named("qwen3")
    asked = [request(f"r{number}", 9 + 5 * number, 40, temperature=1.0) for number in range(5)]
    first_entry = start(overlap=overlap, num_slots=200, kv_host_bytes=1 << 20)
    entries: list[Entry] = [first_entry, *map(Add.of, asked), Steps(count=400)]
    one, kinds = played(alone(), spec, entries)
    (first, its_kinds), (second, _) = pair.run(played, spec, entries)
    assert first == second and its_kinds == kinds and "engine.resumed" in kinds, "none was swapped"
    assert first.keys() == one.keys() and len(one) == 5
    for key, chunks in one.items():
        assert [chunk[0] for chunk in first[key]] == [chunk[0] for chunk in chunks], key
        assert sum(len(chunk[0]) for chunk in chunks) == 40


@st.composite
def journals(draw: st.DrawFn) -> list[Entry]:
    names, unused, version = st.sampled_from(NAMES).map(lambda name: (name,)), list(NAMES), 1
    entries: list[Entry] = [start(overlap=draw(st.booleans()), num_pages=draw(st.integers(24, 60)))]
    for kind in draw(st.lists(st.sampled_from(["add", "add", "steps", "other"]), max_size=16)):
        if kind == "add" and unused:
            entries.append(
                Add.of(
                    request(
                        unused.pop(0),
                        draw(st.integers(1, 40)),
                        draw(st.integers(1, 12)),
                        temperature=draw(st.sampled_from([0.0, 1.0])),
                        n=draw(st.integers(1, 2)),
                    )
                )
            )
        elif kind == "steps":
            entries.append(Steps(count=draw(st.integers(1, 6))))
        else:
            version += 1
            policies = st.sampled_from(["drain", "keep_prefix", "continue"])
            other = st.one_of(
                st.builds(Abort, request_ids=names, reason=st.just("test")),
                st.builds(Expire, request_ids=names),
                st.just(Interrupt()),
                st.just(Flush()),
                st.builds(Commit, version=st.just(version), policy=policies),
                st.just(MoveComponent(component="engine.kv", tier="none", forgets_kv=True)),
            )
            entry = draw(other)
            entries.append(entry)
            if isinstance(entry, MoveComponent):
                entries.append(MoveComponent(component="engine.kv", tier="device"))
    return [*entries, Steps(count=120)]


def test_two_ranks_play_any_journal_alike(pair: RankPool) -> None:
    spec = spec_named("qwen3")

    @settings(max_examples=8, derandomize=True)
    @given(journals())
    def play(entries: list[Entry]) -> None:
        one, _ = played(alone(), spec, entries)
        first, second = (found for found, _ in pair.run(played, spec, entries))
        assert first == second and first.keys() == one.keys()
        for key, chunks in one.items():
            assert [chunk[0] for chunk in first[key]] == [chunk[0] for chunk in chunks], key

    play()
