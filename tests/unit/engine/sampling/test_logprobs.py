"""Raw log-probs and whole choices: their memory is what is stated, and nothing in a choice looks at
a value."""

# N rows, V vocabulary

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gyre.core.records import Sampling
from gyre.engine.config import EngineConfig, scoring_bytes
from gyre.engine.sampling.logits_processors import Past, make_shaping, penalize
from gyre.engine.sampling.logprobs import find_best, score_targets
from gyre.engine.sampling.sampler import Rules, choose, make_rules
from gyre.engine.sampling.truncation import BYTES_EACH, ROWS_AT_ONCE, keep_by_bisection, make_cut
from gyre.planner.memory_model.engine import TRUNCATION_BYTES, TRUNCATION_ROWS

CPU, VOCAB = torch.device("cpu"), 5000


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations made and that are alive together, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            StorageWeakRef(leaf.untyped_storage())
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = StorageWeakRef(storage)
                if key not in given and key not in self._seen:
                    self._made(storage, key)
        self.most = max(self.most, self.now)
        return result

    def _made(self, storage: torch.UntypedStorage, key: StorageWeakRef) -> None:
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size

        def gone() -> None:
            self._seen.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def peak(work: Callable[[], Any]) -> int:
    with Peak() as mode:
        work()
    return mode.most


def test_memory_stays_within_what_is_stated() -> None:
    bound = scoring_bytes(EngineConfig(rows_at_once=8), vocab_size=VOCAB)
    hidden_TE, weight_EV = torch.randn(64, 4), torch.randn(4, VOCAB)
    places, targets = torch.arange(64), torch.arange(64)
    logits_NV = torch.randn(8, VOCAB)
    past = Past(
        ids_LW=torch.randint(0, VOCAB, (8, 10)),
        prompt_L1=torch.full((8, 1), 3),
        length_L1=torch.full((8, 1), 9),
    )
    rates = {
        name: torch.full((8, 1), 1.1) for name in ("repetition_L1", "frequency_L1", "presence_L1")
    }
    measured = {
        "prompts": peak(
            lambda: score_targets(
                hidden_TE, places, targets, lambda h_NE: h_NE @ weight_EV, best=5, rows_at_once=8
            )
        ),
        "alternatives": peak(lambda: find_best(logits_NV, 5, rows_at_once=8)),
        "penalties": peak(lambda: penalize(logits_NV, past, **rates)),
    }
    small = 64 * 11 * 8 * 4  # the results, and what goes by the token
    assert bound * 0.4 < max(measured.values()) < bound + small, {
        k: v / 8 / VOCAB for k, v in measured.items()
    }
    cut = make_cut(np.full(8, 40), np.full(8, 0.9), np.full(8, 0.01), vocab_size=VOCAB, device=CPU)
    bisection = peak(lambda: keep_by_bisection(logits_NV, cut)) / (8 * VOCAB)
    assert bisection < BYTES_EACH, bisection
    # the planner reckons without torch
    assert (ROWS_AT_ONCE, BYTES_EACH) == (TRUNCATION_ROWS, TRUNCATION_BYTES)


def on_meta(record: Any) -> Any:
    """The same record without any value."""
    fields = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            value = torch.empty_like(value, device="meta")
        elif dataclasses.is_dataclass(value):
            value = on_meta(value)
        fields[field.name] = value
    return type(record)(**fields)


def all_rules(count: int) -> Rules:
    s = Sampling(
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((5, 2.0),),
        min_tokens=9,
    )
    full = np.ones(count)
    return make_rules(
        (full * 0.8).astype(np.float32),
        (full * 40).astype(np.int64),
        full * 0.9,
        full * 0.01,
        full > 0,
        vocab_size=VOCAB,
        device=CPU,
        shaping=make_shaping(range(count), [(s, (1, 2))] * count, device=CPU),
        num_top_N=(full * 20).astype(np.int64),
    )


def test_a_choice_under_all_rules_looks_at_no_value(monkeypatch) -> None:
    """On the meta device there are no values: reading one on the host fails. This is the way that
    CUDA takes."""
    monkeypatch.setattr("gyre.engine.sampling.truncation.keep_by_candidates", keep_by_bisection)
    past = Past(
        ids_LW=torch.zeros((4, 30)), prompt_L1=torch.zeros((4, 1)), length_L1=torch.zeros((4, 1))
    )
    choice = choose(
        torch.empty((4, VOCAB), device="meta"),
        on_meta(all_rules(4)),
        torch.empty(4, dtype=torch.float64, device="meta"),
        chosen_N=torch.empty(4, dtype=torch.int64, device="meta"),
        past=on_meta(past),
    )
    assert (
        choice.tokens_N.shape == (4,)
        and choice.best is not None
        and choice.best.ids_NK.shape == (4, 20)
    )
