"""Tensor parallel on two GPUs, over NCCL: collectives inside a captured graph, gradients, the fused
inference pass and an engine do what one GPU does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from choice_cases import Chosen, choose_many, chosen_by_ranks, scored_by_ranks
from collective_cases import (
    every_collective,
    expected_of_all,
    numbers_of,
    rows_of,
    run_all,
    sent_rows,
)
from float8_cases import products
from gyre.core.records import Request, Sampling
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.scheduler.journal import Add, Commit, Entry, Start, Steps
from layout_cases import spec_of
from rank_pool import RankPool, by_itself
from tensor_cases import (
    answers,
    close,
    decoder_of,
    gradients_of,
    joined,
    logprobs_of,
    played,
    served,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZES = {"hidden_size": 256, "num_layers": 2, "vocab_size": 1001, "mlp_size": 512}
SPECS = {
    family: replace(spec_of(family, **SIZES), head_dim=64, context_tokens=256)
    for family in ("llama", "qwen2", "qwen3")
}
PAGE_TOKENS, LENGTHS = 64, [70, 1, 130]


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(2, backend="nccl", device="cuda", timeout_s=60.0)
    yield pool
    pool.close()


def in_a_graph(group: RankGroup) -> dict[str, Any]:
    """Run every collective, capture all once, and replay them on other numbers."""
    given_N = numbers_of(group)
    plain = every_collective(group, given_N)  # the first of a kind makes its buffers
    torch.cuda.synchronize()
    group.traffic.take()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        group.capturing() as captured,
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        outs = run_all(group, given_N)
    results = []
    for turn in range(3):
        given_N.copy_(numbers_of(group, turn))
        graph.replay()
        group.traffic.replayed(captured)
        results.append([x_N.tolist() for x_N in outs])
    return {
        "plain": plain,
        "results": results,
        "sent": dict(group.traffic.take().bytes_by_kind),
    }


def test_collectives_are_captured_and_replayed(pair: RankPool) -> None:
    for rank, found in enumerate(pair.run(in_a_graph)):
        assert found["plain"] == expected_of_all(rank)
        assert found["results"] == [expected_of_all(rank, turn) for turn in range(3)]
        kinds = {"all_reduce": 2 * 16, "all_gather": 16, "reduce_scatter": 8, "send": 16}
        once = {**kinds, "all_to_all": (3 if rank == 0 else 2) * 4}
        assert found["sent"] == {kind: 3 * sent for kind, sent in once.items()}


@pytest.mark.parametrize("counts", [[[2, 0], [5, 1]], [[0, 0], [0, 3]], [[0, 4], [0, 0]]])
def test_uneven_rows_reach_every_rank(pair: RankPool, counts: list[list[int]]) -> None:
    for rank, found in enumerate(pair.run(sent_rows, counts, 3)):
        expected = [row for one in (0, 1) for row in rows_of(one, rank, counts[one][rank], 3)]
        assert found["rows"] == torch.tensor(expected, dtype=torch.float64).tolist()
        assert found["sent"] == {"all_to_all": counts[rank][1 - rank] * 3 * 8}


def summed_by_peers(group: RankGroup, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """The residual stream and its norms after calls in turn, by peers' memory and by NCCL; an odd
    number of them in a graph that is replayed, one outside."""
    from gyre.engine.runners.peer_memory import meet_peers
    from gyre.kernels.gpu.peer_sums import add_peer_sum, add_peer_sum_rms_norm
    from gyre.kernels.gpu.pointwise import add_rms_norm

    given: dict[str, Any] = {"device": group.device, "dtype": torch.bfloat16}
    events: list[str] = []
    peers = meet_peers(
        group, width=width, dtype=torch.bfloat16, emit=lambda kind, **_: events.append(kind)
    )
    assert peers is not None and not events
    draw = torch.Generator(group.device).manual_seed(7 + group.rank)
    part_TE = torch.randn(rows, width, generator=draw, **given)
    weight_E = torch.linspace(0.5, 2.0, width, **given)
    found = []
    for by_peers in (True, False):
        x_TE, out_TE, y_TE = (torch.zeros(rows, width, **given) for _ in range(3))

        def add(x_TE=x_TE, out_TE=out_TE, y_TE=y_TE, by_peers=by_peers) -> None:
            if by_peers:
                add_peer_sum_rms_norm(peers, x_TE, part_TE, weight_E, 1e-6, out_TE)
                return
            y_TE.copy_(part_TE)
            group.all_reduce(y_TE)
            add_rms_norm(x_TE, y_TE, weight_E, 1e-6, out_TE)

        add()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with (
            group.capturing(),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            for _ in range(3):
                add()
                part_TE.mul_(-0.75)
        kept = part_TE.clone()
        norms = []
        for turn in range(50):
            if group.rank == turn % 2:
                torch.cuda._sleep(200_000)  # one rank is late, each in its turn
            graph.replay()
            norms.append(out_TE.clone())
            part_TE.copy_(kept * (1 + turn))
        if by_peers:
            add_peer_sum(peers, x_TE, part_TE)
        else:
            y_TE.copy_(part_TE)
            group.all_reduce(y_TE)
            x_TE.add_(y_TE)
        part_TE.copy_(kept)
        found.append(torch.stack([x_TE, *norms]).cpu())
    return found[0], found[1]


@pytest.mark.parametrize(("rows", "width"), [(1, 5120), (3, 256), (256, 5120)])
def test_sums_by_peers_have_the_bits_of_nccl(pair: RankPool, rows: int, width: int) -> None:
    (first, by_nccl), (second, _) = pair.run(summed_by_peers, rows, width)
    assert by_nccl.abs().sum() > 0 and torch.equal(first, second)
    assert torch.equal(first, by_nccl)


@pytest.mark.parametrize("how", ["replicated", "sequence"])
@pytest.mark.parametrize("which", SPECS)
def test_gradients_are_those_of_one_gpu(pair: RankPool, which: str, how: str) -> None:
    spec, given = SPECS[which], ("selective", torch.float32)
    hidden_NE, logits_NV, expected, _ = pair.run(by_itself, gradients_of, spec, *given)[0]
    results = pair.run(gradients_of, spec, *given, how=how)
    for found_NE, found_NV, _, _ in results:
        close(found_NE, hidden_NE, "hidden", relative=1e-3)
        close(found_NV, logits_NV, "logits", relative=1e-3)
    for name, whole in expected.items():
        parts = [gradients[name] for _, _, gradients, _ in results]
        norms = ("attn_norm.weight", "mlp_norm.weight", "final_norm.weight")
        if how == "replicated" and name.endswith(norms):
            close(parts[1], whole, name, relative=1e-3)
        else:
            close(joined(spec, "", name, parts), whole, name, relative=1e-3)


@pytest.mark.parametrize("vocab_size", [512, 517, 1], ids=["even", "padded", "only padding"])
@pytest.mark.parametrize(
    "how", [{}, {"keep_logits": True}, {"chunk": 128}, {"unused": "entropy"}, {"truncated": True}]
)
def test_logprobs_of_a_cut_vocabulary(pair: RankPool, vocab_size: int, how: dict[str, Any]) -> None:
    """By Triton kernels, but for truncation: those of one GPU within the rounding of bfloat16."""
    given = {"dtype": torch.bfloat16, **how}
    expected, _ = pair.run(by_itself, logprobs_of, vocab_size, **given)[0]
    results = pair.run(logprobs_of, vocab_size, **given)
    for found, _ in results:
        for name, relative in (("logprobs", 1e-4), ("entropy", 1e-3), ("hidden", 2e-2)):
            close(found[name].float(), expected[name].float(), name, relative=relative)
            assert torch.equal(found[name], results[0][0][name]), "equal on every rank"
    head = torch.cat([found["head"] for found, _ in results]).float()
    close(head[:vocab_size], expected["head"].float(), "head", relative=2e-2)
    assert not head[vocab_size:].any(), "padding has no gradient"


@torch.inference_mode()
def fused_logits(group: RankGroup, which: str, invariant: bool) -> Tensor:
    """Logits of every token of packed sequences, by the fused pass in bfloat16."""
    from gyre.kernels.gpu.decode_attention import (
        PROGRAMS_PER_SM,
        DecodeScratch,
        cut_slabs,
        decode_attention,
        send,
    )
    from gyre.kernels.gpu.work_list import lay_out_pages
    from gyre.models.fused_forward import FusedForward
    from gyre.trainer.passes.batch_invariant import most_scratch

    device, lengths_S = group.device, np.asarray(LENGTHS)
    decoder = decoder_of(SPECS[which], group, dtype=torch.bfloat16)
    spec = decoder.spec
    row = np.repeat(np.arange(len(lengths_S)), lengths_S)
    position = np.arange(len(row)) - (np.cumsum(lengths_S) - lengths_S)[row]
    table_SP, num_pages = lay_out_pages(lengths_S, PAGE_TOKENS)
    row_T, position_T, table = send(device, row, position, table_SP.reshape(-1))
    shape = (spec.num_layers, num_pages, 2, spec.num_kv_heads, PAGE_TOKENS, spec.head_dim)
    pages = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    slabs = cut_slabs(row, position, longest_tokens=int(lengths_S.max()), device=device)
    scratch = DecodeScratch.make(most_scratch(slabs), spec.num_heads, spec.head_dim, device)
    programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    table_RP = table.view(table_SP.shape)
    fused = FusedForward(decoder, pages.__getitem__, table_RP, invariant=invariant)

    def attend(index: int, q_THD: Tensor, out_THD: Tensor) -> None:
        for slab in slabs:
            decode_attention(
                q_THD[slab.span],
                pages[index],
                table_RP,
                slab.work,
                scratch,
                out_THD[slab.span],
                num_programs=programs,
            )

    tokens_T = torch.arange(len(row), device=device) * 7 % decoder.whole_spec.vocab_size
    return fused.logits(fused.residual(tokens_T, position_T, row_T, attend)).float().cpu()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("which", SPECS)
def test_the_fused_pass_gives_the_logits_of_one_gpu(
    pair: RankPool, which: str, invariant: bool
) -> None:
    one = pair.run(by_itself, fused_logits, which, invariant)[0]
    first, second = pair.run(fused_logits, which, invariant)
    again, _ = pair.run(fused_logits, which, invariant)
    assert torch.equal(first, second) and torch.equal(first, again), "a sum of two commutes"
    assert first.shape == one.shape == (sum(LENGTHS), SIZES["vocab_size"])
    error = float((first - one).norm() / one.norm())
    assert error < 2e-2, error


@pytest.mark.parametrize("cut", ["columns", "rows"])
def test_8_bit_products_of_parts_are_scaled_as_the_whole(pair: RankPool, cut: str) -> None:
    """To the bit the same scales; products and gradients within the rounding of bfloat16."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies 8-bit floats")
    whole = pair.run(by_itself, products, cut, "bfloat16")[0]
    found = pair.run(products, cut, "bfloat16")
    apart = pair.run(products, cut, "bfloat16", shares=False)
    assert not torch.equal(apart[0]["amaxes"], whole["amaxes"])
    summed, cut_up, axis = ("input", "y", 0) if cut == "columns" else ("y", "input", 1)
    for each in found:
        assert torch.equal(each["amaxes"], whole["amaxes"])
        close(each[summed].float(), whole[summed].float(), summed, relative=2e-2)
        close(each["halves"].float(), each["weight"].float(), "halves", relative=2e-2)
    for name, dim in ((cut_up, 1), ("weight", axis)):
        joined_parts = torch.cat([each[name] for each in found], dim=dim)
        close(joined_parts.float(), whole[name].float(), name, relative=2e-2)


def requests() -> list[Request]:
    return [
        Request(
            request_id=f"r{number}",
            tokens=np.random.default_rng(number).integers(0, 1001, 20 + number).astype(np.int32),
            sampling=Sampling(temperature=0.0, max_tokens=30),
        )
        for number in range(6)
    ]


def journal(**settings: Any) -> list[Entry]:
    given = {"page_tokens": 64, "max_running": 4, "token_budget": 32, "num_pages": 64, **settings}
    config = EngineConfig.model_validate(given).model_dump(mode="json")
    return [
        Start(settings=config, num_pages=64, num_slots=0, version=1, eos_ids=()),
        *map(Add.of, requests()),
        Steps(count=10),
        Commit(version=2, policy="keep_prefix"),
        Steps(count=200),
    ]


def tokens_of(found: dict[tuple[str, int], list[Any]]) -> dict[tuple[str, int], list[int]]:
    return {key: [token for chunk in chunks for token in chunk[0]] for key, chunks in found.items()}


@pytest.mark.parametrize("which", SPECS)
def test_an_engine_over_two_gpus_chooses_as_one(pair: RankPool, which: str) -> None:
    """In float32, which torch serves."""
    one, _ = pair.run(by_itself, played, SPECS[which], journal())[0]
    (first, kinds), (second, _) = pair.run(played, SPECS[which], journal())
    assert first == second and "engine.torch_kernels" in kinds
    assert tokens_of(first) == tokens_of(one)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("which", SPECS)
def test_graphs_over_two_gpus_choose_the_same_twice(
    pair: RankPool, which: str, invariant: bool
) -> None:
    """In bfloat16 with the collectives inside the graphs: both ranks have the same answers, and
    again in another run. Rounding differs from one GPU's, so a choice between near tokens may, and
    all that follow it: log-probs are compared up to there."""
    entries, given = journal(batch_invariant=invariant), (torch.bfloat16, 1.0)
    one, _ = pair.run(by_itself, played, SPECS[which], entries, *given)[0]
    (first, kinds), (second, _) = pair.run(played, SPECS[which], entries, *given)
    (again, _), _ = pair.run(played, SPECS[which], entries, *given)
    assert "engine.graphs_captured" in kinds and "engine.torch_kernels" not in kinds
    assert first == second == again
    close_up_to_a_choice(first, one)


@pytest.mark.parametrize("which", SPECS)
def test_graphs_that_choose_from_parts_of_the_logits(pair: RankPool, which: str) -> None:
    """`engine.sharded_sampling`: both ranks have the same answers, and again in another run."""
    entries, given = journal(sharded_sampling=True, tensor_ranks=2), (torch.bfloat16, 1.0)
    one, _ = pair.run(by_itself, played, SPECS[which], journal(), *given)[0]
    (first, kinds), (second, _) = pair.run(played, SPECS[which], entries, *given)
    (again, _), _ = pair.run(played, SPECS[which], entries, *given)
    assert "engine.graphs_captured" in kinds and "engine.torch_kernels" not in kinds
    assert first == second == again
    close_up_to_a_choice(first, one)


@torch.inference_mode()
def sampled_by_kernels(group: RankGroup, vocab_size: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and log-probs of a row each by the kernel for whole logits, and by the ranks' kernels
    in a graph that is replayed for other logits."""
    from gyre.kernels.gpu.sample import SampleScratch, sample
    from gyre.kernels.gpu.sample_shard import ShardScratch, sample_shard

    device, width = group.device, -(-vocab_size // group.size)
    draw = torch.Generator(device).manual_seed(vocab_size)
    whole = SampleScratch.make(rows, vocab_size, device)
    parts = ShardScratch.make(rows, vocab_size, group.rank, group.size, device)
    inverse_N = torch.linspace(0.5, 2.0, rows, device=device)
    inverse_N[::3] = 0.0  # greedy
    uniform_N = torch.rand(rows, generator=draw, device=device, dtype=torch.float64)
    row_N = torch.arange(rows, device=device, dtype=torch.int32)
    own_NV = torch.full((rows, width), -torch.inf, device=device, dtype=torch.bfloat16)
    outs = [
        (torch.zeros_like(row_N), torch.zeros_like(row_N), torch.zeros(2, rows, device=device))
        for _ in range(2)
    ]

    def by_parts() -> None:
        last_R, token_N, logprobs_2N = outs[1]
        sample_shard(
            own_NV, inverse_N, uniform_N, parts, row_N, last_R, token_N, logprobs_2N,
            group.all_gather,
        )  # fmt: skip

    by_parts()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        group.capturing() as captured,
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        by_parts()
    blocks = -(-width // 2048)
    sent = (group.size - 1) * (16 * rows * blocks + 8 * rows)
    assert captured.bytes_by_kind == {"all_gather": sent}
    found = []
    for _ in range(3):
        logits_NV = 3 * torch.randn(rows, vocab_size, generator=draw, device=device)
        logits_NV = logits_NV.bfloat16()
        own = logits_NV[:, group.rank * width : (group.rank + 1) * width]
        own_NV[:, : own.shape[1]] = own
        last_R, token_N, logprobs_2N = outs[0]
        sample(logits_NV, inverse_N, uniform_N, whole, row_N, last_R, token_N, logprobs_2N)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outs[1][0], outs[1][1]), "the rows' last tokens"
        found += [(token_N.cpu(), logprobs_2N.cpu()) for _, token_N, logprobs_2N in outs]
    return found


@pytest.mark.parametrize("vocab_size", [8192, 12_289, 151_936])
def test_kernels_choose_from_parts_what_they_choose_from_the_whole(
    pair: RankPool, vocab_size: int
) -> None:
    """To the bit where a rank's columns are whole blocks. Elsewhere a draw may fall on the other
    side of a border, by the rounding of float32 sums."""
    rows = 48
    results = pair.run(sampled_by_kernels, vocab_size, rows)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    for turn in range(3):
        (whole_N, whole_2N), (token_N, logprobs_2N) = results[0][2 * turn : 2 * turn + 2]
        if vocab_size == 8192:
            assert torch.equal(token_N, whole_N) and torch.equal(logprobs_2N, whole_2N)
            continue
        alike = token_N == whole_N
        assert alike[::3].all(), "greedy"
        assert int((~alike).sum()) <= 2
        torch.testing.assert_close(logprobs_2N[:, alike], whole_2N[:, alike], rtol=0, atol=2e-5)


def test_rules_over_parts_of_the_logits_on_gpus(pair: RankPool) -> None:
    """Truncation by digits, penalties, alternatives and prompts, as on one CPU."""
    s = Sampling(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.001, repetition_penalty=1.2,
        frequency_penalty=0.1, logit_bias=((5, 2.0),), top_logprobs=7,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for vocab in (1001, 30_001):
        logits_NV = (generator.normal(size=(70, vocab)) * 3).astype(np.float32)
        asks = [(s, [1, 2, vocab - 1], [3, vocab - 2], [9])] * 70
        uniform_N = generator.random(70)
        whole = Chosen.of(choose_many(logits_NV, asks, uniform_N))
        (first, widened, _), (second, _, _) = pair.run(chosen_by_ranks, logits_NV, asks, uniform_N)
        assert first.bits() == second.bits() and not widened
        assert (first.tokens == whole.tokens).mean() > 0.97
        assert whole.kept is not None and (first.kept == whole.kept).mean() > 0.9999
        assert np.array_equal(first.best_ids, whole.best_ids)
        targets_N = generator.integers(0, vocab, 70)
        (scores, other) = pair.run(scored_by_ranks, logits_NV, targets_N, 5)
        assert scores.tobytes() == other.tobytes()
        expected = scored_by_ranks(alone(), logits_NV, targets_N, 5, whole=True)
        np.testing.assert_allclose(scores, expected, atol=2e-5)


def close_up_to_a_choice(
    first: dict[tuple[str, int], list[Any]], one: dict[tuple[str, int], list[Any]]
) -> None:
    """Plain log-probs are alike up to the first token that differs, and for long enough that most
    of them are of steps that only decode."""
    ours, theirs, compared = tokens_of(first), tokens_of(one), 0
    assert ours.keys() == theirs.keys()
    for key in theirs:
        pairs = zip(ours[key], theirs[key], strict=True)
        alike = next((at for at, (a, b) in enumerate(pairs) if a != b), len(theirs[key]))
        found, expected = (
            [number for chunk in answers_[key] for number in chunk[2]][:alike]
            for answers_ in (first, one)
        )
        np.testing.assert_allclose(found, expected, atol=0.15)
        compared += alike
    assert compared >= 4 * len(theirs), f"{compared} tokens of {len(theirs)} completions"


async def drive(engine: NativeEngine, offer: Callable[[int], Any]) -> list[Any]:
    await engine.start(dummy=False)
    found = [await answers(engine, requests())]
    await engine.prepare(offer(2))
    await engine.commit(2, policy="drain")
    found += [await answers(engine, requests())]
    await engine.terminate()
    return found


def test_a_leader_and_a_follower_serve_as_one_engine(pair: RankPool) -> None:
    settings = {"page_tokens": 16, "max_running": 4, "token_budget": 32, "num_pages": 64}
    one = pair.run(by_itself, served, SPECS["qwen3"], drive, settings)[0]
    found, steps = pair.run(served, SPECS["qwen3"], drive, settings)
    assert found == one and steps > 0
