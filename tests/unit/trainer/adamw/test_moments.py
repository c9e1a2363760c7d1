"""Moments in 8 bits: against two libraries' own optimizers, beside float32 moments, in every
layout."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.core.errors import ConfigError, SnapshotError
from gyre.core.records import TrainBatch, TrainSequence
from gyre.distributed.mesh import make_mesh
from gyre.distributed.process_group import alone
from gyre.models.layout import model_layout
from gyre.planner.memory_model.components import staging_bytes
from gyre.planner.memory_model.states import Layout, coded_parameters, state_bytes
from gyre.planner.model_zoo import model_numbers
from gyre.planner.plan import PlanInputs
from gyre.trainer.adamw import adamw_8bit
from gyre.trainer.adamw.adamw import Numbers, Span
from gyre.trainer.adamw.adamw_8bit import Codec, CodedUpdate, _blank
from gyre.trainer.adamw.blocks import BLOCK, block_layout, check_parts, coded_first, is_coded
from gyre.trainer.optim.flat import FlatOptimizer, lay_out
from gyre.weights.shards import ShardLayout, align, row_layout, slice_layout
from planner_cases import assert_planned
from saver_cases import load_latest, saver_on
from shown_settings import show
from trainer_cases import (
    CPU,
    assert_bits_equal,
    assert_same,
    make_batch,
    make_trainer,
    saved_tensors,
    weights_of,
    whole_tensors,
)
from zero_cases import (
    AWAY,
    BLOCKS,
    LAYOUTS,
    SPECS,
    TENSOR_LAYOUTS,
    coded_updates,
    decoder_on,
    equal_away,
    held_bytes,
    resume,
    saved,
)

bitsandbytes = pytest.importorskip("bitsandbytes")
functional = bitsandbytes.functional
DTYPES = ("float32", "bfloat16")
CODED = {"moments": "8_bit"}
NUMBERS = {"betas": (0.9, 0.95), "eps": 1e-8}


def blank_span(num_blocks: int, *, decays: bool = True) -> Span:
    return replace(_blank(num_blocks, CPU), decays=decays)


def moments_of(span: Span) -> list[tuple[bool, Tensor, Tensor]]:
    """(signed, codes, scales)"""
    assert span.exp_avg_scale_B is not None and span.exp_avg_sq_scale_B is not None
    return [
        (True, span.exp_avg_N, span.exp_avg_scale_B),
        (False, span.exp_avg_sq_N, span.exp_avg_sq_scale_B),
    ]


def decoded(span: Span) -> list[Tensor]:
    """Both moments, as the library decodes them."""
    dequantize = torch.ops.bitsandbytes.dequantize_blockwise
    maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    return [
        dequantize(codes_N, scale_B, values, BLOCK, torch.float32)
        for values, (_, codes_N, scale_B) in zip(maps, moments_of(span), strict=True)
    ]


def numbers_of(
    count: int, *, rate: float = 1e-3, scale: float = 1.0, decay: float = 0.0
) -> Numbers:
    return Numbers(
        learning_rate=rate, grad_scale=scale, weight_decay=decay, num_updates=count, **NUMBERS
    )


def gradient_of(size: int, seed: int, spread: float) -> Tensor:
    """Of magnitudes over `spread` powers of ten; some zeros; the first block now and then all
    zeros."""
    generator = torch.Generator().manual_seed(seed)
    grad_N = torch.randn(size, generator=generator) * 10.0 ** (
        -spread * torch.rand(size, generator=generator)
    )
    grad_N[torch.rand(size, generator=generator) < 0.1] = 0.0
    grad_N[:BLOCK] *= float(torch.rand((), generator=generator) < 0.5)
    return grad_N


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 4.0, 30.0]), signed=st.booleans())
def test_numbers_are_coded_by_the_nearest_value_of_the_library_s_map(seed, spread, signed):
    values = functional.create_dynamic_map(signed=signed)
    wide_N = gradient_of(8 * BLOCK, seed, spread)
    wide_N = wide_N if signed else wide_N.square()
    codes_N, scale_B = torch.empty(8 * BLOCK, dtype=torch.uint8), torch.empty(8)
    codec = Codec(values)
    codec.encode(wide_N.clone(), codes_N, scale_B)
    assert torch.equal(scale_B, wide_N.view(-1, BLOCK).abs().amax(1))
    shares_N = wide_N.double() / scale_B.double().repeat_interleave(BLOCK).clamp_min(1e-300)
    away_NV = (shares_N.unsqueeze(1) - values.double()).abs()
    found_N = away_NV.gather(1, codes_N.long().unsqueeze(1)).squeeze(1)
    assert bool((found_N <= away_NV.amin(1) + 1e-6 * shares_N.abs() + 1e-15).all())
    back_N = torch.ops.bitsandbytes.dequantize_blockwise(
        codes_N, scale_B, values, BLOCK, torch.float32
    )
    assert torch.equal(codec.decode(codes_N, scale_B), back_N)
    coarse_N, their_scale_B = torch.ops.bitsandbytes.quantize_blockwise(wide_N, values, BLOCK)
    assert torch.equal(scale_B, their_scale_B)
    off_N = (values[coarse_N.long()] - values[codes_N.long()]).abs()[shares_N.abs() > 1e-3]
    # the library's encoder for CPUs is one value off at most, where it can tell
    assert bool((off_N <= 0.015).all())


@settings(max_examples=20)
@given(
    num_blocks=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 3.0, 8.0]),
    rate=st.sampled_from([1e-4, 1e-2]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.25]),
)
def test_an_update_is_that_of_torchao_s_optimizer(num_blocks, seed, spread, rate, decay, scale):
    """From the same state, several times in a row: the same weights, and the same codes but where a
    number lies half-way between two values, and where a second moment would be rounded to zero."""
    single = pytest.importorskip("torchao.optim.adam").single_param_adam
    zeros = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros
    span, update = blank_span(num_blocks), CodedUpdate(CPU)
    span.weight_N.copy_(
        torch.randn(len(span.weight_N), generator=torch.Generator().manual_seed(seed))
    )
    for count in range(1, 6):
        grad_N, theirs_N = (
            gradient_of(num_blocks * BLOCK, seed + count, spread),
            span.weight_N.clone(),
        )
        states = [zeros(theirs_N.shape, signed, BLOCK) for signed in (True, False)]
        for state, (_, codes_N, scale_B) in zip(states, moments_of(span), strict=True):
            state.codes.copy_(codes_N)
            state.scale.copy_(scale_B)
        given_numbers = torch.tensor(float(count)), *states, None, torch.tensor(rate)
        single(
            theirs_N,
            grad_N * scale,
            *given_numbers,
            *NUMBERS["betas"],
            decay,
            NUMBERS["eps"],
            True,
            False,
        )
        span.grad_N.copy_(grad_N)
        update([span], numbers_of(count, rate=rate, scale=scale, decay=decay))
        assert not span.grad_N.any()
        torch.testing.assert_close(span.weight_N, theirs_N, rtol=1e-5, atol=1e-5 * rate)
        for state, (signed, codes_N, scale_B) in zip(states, moments_of(span), strict=True):
            nonzero_B = scale_B > 0
            torch.testing.assert_close(
                scale_B[nonzero_B], state.scale[nonzero_B], rtol=1e-6, atol=0
            )
            other_N = codes_N.int() - state.codes.int()
            other_N[(codes_N == 1) & (state.codes == 0) & ~torch.tensor(signed)] = 0
            other_N = other_N.view(-1, BLOCK)[nonzero_B]
            assert (
                bool((other_N.abs() <= 1).all())
                and int(other_N.count_nonzero()) <= 0.01 * other_N.numel()
            )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_are_those_of_the_library_s_own_optimizer(decay):
    """By its operator to the bit, and by torch's operations nearly, of magnitudes that its encoder
    for CPUs tells apart: what is done around the operator changes nothing there. On a GPU the
    operator is a kernel."""
    weight_N = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(weight_N.clone())
    adamw = bitsandbytes.optim.AdamW8bit(
        [theirs], lr=1e-3, weight_decay=decay, min_8bit_size=1, **NUMBERS
    )
    exact, near, update = blank_span(8), blank_span(8), CodedUpdate(CPU)
    for count in range(1, 11):
        grad_N = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(count))
        grad_N = grad_N + 0.1 * grad_N.sign()
        for span, how in ((exact, update.by_kernel), (near, update.by_torch)):
            if count == 1:
                span.weight_N.copy_(weight_N)
            span.grad_N.copy_(grad_N)
            how(span, numbers_of(count, decay=decay, scale=0.5))
            assert not span.grad_N.any()
        theirs.grad = 0.5 * grad_N
        adamw.step()
    state = adamw.state[theirs]
    assert torch.equal(exact.weight_N, theirs.detach())
    for name, (_, codes_N, scale_B) in zip("12", moments_of(exact), strict=True):
        assert torch.equal(codes_N, state[f"state{name}"]) and torch.equal(
            scale_B, state[f"absmax{name}"]
        )
    apart_N = (near.weight_N - theirs.detach()).abs()
    assert float(apart_N.max()) < 0.1 * 10 * 1e-3 and float(apart_N.mean()) < 0.005 * 10 * 1e-3


def leaps(*, seed: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest update, in learning rates, of rows whose gradient comes and goes, as an
    embedding's does."""
    if not keeps:
        monkeypatch.setattr(adamw_8bit, "_keep_from_zero", lambda codes_sq_N, scale_sq_B: None)
    span, update, largest = blank_span(4), CodedUpdate(CPU), 0.0
    for count in range(1, 40):
        seen = torch.rand((), generator=torch.Generator().manual_seed(100 * seed + count)) < 0.3
        before_N = span.weight_N.clone()
        span.grad_N.copy_(gradient_of(4 * BLOCK, 100 * seed + count, 4.0) * seen)
        update([span], numbers_of(count))
        largest = max(largest, float((span.weight_N - before_N).abs().max()) / 1e-3)
    return largest


@pytest.mark.parametrize("seed", range(4))
def test_no_update_leaps_where_a_second_moment_is_small(seed, monkeypatch):
    """Float32 moments move a weight by at most a few learning rates; codes too. Without what keeps
    second moments from zero they would not."""
    assert leaps(seed=seed, keeps=True, monkeypatch=monkeypatch) < 6.0
    assert leaps(seed=seed, keeps=False, monkeypatch=monkeypatch) > 100.0


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 4.0, 15.0]))
def test_a_second_moment_is_zero_only_in_a_block_of_zeros(seed, spread):
    span, update = blank_span(4), CodedUpdate(CPU)
    for count in range(1, 6):
        grad_N = gradient_of(4 * BLOCK, seed + count, spread)
        wide_N = 0.95 * decoded(span)[1].double() + 0.05 * grad_N.double() ** 2
        span.grad_N.copy_(grad_N)
        update([span], numbers_of(count))
        coded_NK = decoded(span)[1].view(-1, BLOCK)
        some_B = wide_N.view(-1, BLOCK).amax(1) > 1e-30
        assert bool((coded_NK[some_B] > 0).all()) and not coded_NK[~some_B].any()


@settings(max_examples=30)
@given(
    rows=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    blocks=st.integers(1, 3),
    num_ranks=st.integers(1, 6),
)
def test_no_cut_between_rows_parts_a_block(rows, blocks, num_ranks):
    """Every rank has whole blocks, at the start of its flat state; together they are each block
    once."""
    shapes = (
        {"norm": (77,)}
        | {f"m{i}": (count, blocks * BLOCK) for i, count in enumerate(rows)}
        | {"odd": (5, 100)}
    )
    coded = frozenset(name for name, shape in shapes.items() if is_coded(shape))
    assert coded == {f"m{i}" for i in range(len(rows))}
    starts, coded_stop, _, size = lay_out(
        shapes, {name: len(shape) > 1 for name, shape in shapes.items()}, coded
    )
    assert coded_stop == sum(rows) * blocks * BLOCK
    sliced = align(size, num_ranks * BLOCK)
    for layout in (
        row_layout(coded_first(shapes, coded), num_ranks=num_ranks),
        slice_layout(shapes, starts, sliced, num_ranks=num_ranks, replicated=frozenset()),
    ):
        check_blocks(layout, coded)


def check_blocks(layout: ShardLayout, coded: frozenset[str]) -> None:
    found = block_layout(layout.of(list(coded)))
    for name, (count, width) in found.shapes.items():
        runs = [(places[name].start, places[name].stop) for places in found.ranks]
        assert sum(stop - start for start, stop in runs) == count * width
        for places, wide in zip(found.ranks, layout.ranks, strict=True):
            place, numbers = places[name], wide[name]
            assert [BLOCK * x for x in (place.start, place.stop, place.at)] == [
                numbers.start,
                numbers.stop,
                numbers.at,
            ]


def batch_of_rules(seed: int) -> TrainBatch:
    """Sequences that count upwards by one of three steps: something to learn."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(16):
        start, step = rng.integers(1, 48), rng.integers(1, 4)
        tokens = ((start + step * np.arange(24)) % 48 + 1).astype(np.int32)
        mask = np.arange(24) >= 2
        sequences.append(TrainSequence(tokens=tokens, columns={"loss_mask": mask}))
    return TrainBatch(sequences=tuple(sequences), step=seed)


@pytest.mark.slow
def test_a_model_learns_as_with_float32_moments():
    losses = {}
    for moments in ("float32", "8_bit"):
        decoder = decoder_on(CPU, torch.float32, spec="blocks")
        trainer = make_trainer(
            "sft", decoder=decoder, learning_rate=2e-3, tokens_per_chunk=512, moments=moments
        )
        losses[moments] = [
            trainer.step_now(batch_of_rules(step)).metrics["loss"] for step in range(60)
        ]
    first, wide, coded = losses["float32"][0], *(np.mean(found[-10:]) for found in losses.values())
    assert losses["8_bit"][0] == first and wide < 0.3 * first, (first, wide)
    assert abs(coded - wide) < 0.1 * wide, (first, wide, coded)
    assert losses["8_bit"] != losses["float32"]


def test_what_is_told_and_what_is_wide():
    events: list = []
    make_trainer(
        "sft", decoder=decoder_on(CPU, torch.float32, spec="blocks"), events=events, **CODED
    )
    (fields,) = [fields for name, fields in events if name == "trainer.moments"]
    assert (
        fields["coded_numbers"]
        == coded_parameters(model_numbers(BLOCKS), "8_bit")
        < fields["numbers"]
    )
    assert fields["counted"] and set(fields["left_wide"]) == {
        f"layers.{i}.out.weight" for i in range(2)
    }
    assert "(256, 32)" in fields["left_wide"]["layers.0.out.weight"]


def test_a_model_without_whole_blocks_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"no matrix of the actor has rows of whole blocks of 256 numbers \(rows of ",
    ):
        make_trainer("sft", **CODED)


@pytest.mark.slow
def test_a_cpu_user_reads_nothing_of_kernels_that_nobody_asks_for():
    code = (
        "import torch; from gyre.trainer.adamw.adamw_8bit import CodedUpdate; "
        "CodedUpdate(torch.device('cpu'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stderr == told.stdout == ""


def test_without_the_library_the_setting_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes") as caught:
        make_trainer("sft", decoder=decoder_on(CPU, torch.float32, spec="blocks"), **CODED)
    assert "gyre-rl[moments]" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("dtype", show(("float32",), DTYPES))
def test_one_process_trains_to_the_same_bits_with_state_away(tmp_path, dtype):
    assert (
        equal_away(None, "sft", list(AWAY), str(tmp_path), dtype=dtype, spec="blocks", **CODED)
        == []
    )


@pytest.mark.parametrize("how", [None, *AWAY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_planner_knows_the_bytes(tmp_path, how, dtype):
    away = AWAY.get(how, {})
    settings = {"offload_cut_bytes": 8192, **away, **CODED}
    decoder = decoder_on(CPU, getattr(torch, dtype), spec="blocks")
    trainer = make_trainer("sft", decoder=decoder, disk_folder=tmp_path, **settings)
    inputs = PlanInputs(
        model=model_numbers(BLOCKS),
        objective="sft",
        online=False,
        prompts_per_step=1,
        completions_per_prompt=1,
        max_prompt_tokens=8,
        max_completion_tokens=8,
        disk_tier=True,
        **settings,
    )
    found = assert_planned(trainer.components(), inputs, dtype, relative=0.01, pages=6)
    count, coded = (
        model_numbers(BLOCKS).num_parameters,
        coded_parameters(model_numbers(BLOCKS), "8_bit"),
    )
    optimizer = found["actor.optimizer"].size_bytes
    assert optimizer == pytest.approx(
        8 * (count - coded) + (2 + 8 / BLOCK) * coded, rel=0.01, abs=6 * 4096
    )
    trainer.close_now()


@pytest.mark.parametrize("how", ["host", "disk and gradients"])
def test_state_that_is_away_is_moved_as_codes(tmp_path, how):
    """Bytes that an update brings to the device: 4 of a master, about 2 of moments."""
    moved = {}
    for moments in ("float32", "8_bit"):
        decoder = decoder_on(CPU, torch.bfloat16, spec="blocks")
        folder = tmp_path / moments
        trainer = make_trainer(
            "sft", decoder=decoder, disk_folder=folder, moments=moments, **AWAY[how]
        )
        measured = trainer.step_now(make_batch()).measured
        gradients = 4 if "gradients" in how else 0
        moved[moments] = (
            measured["offload_in_bytes"] / model_numbers(BLOCKS).num_parameters - gradients
        )
        trainer.close_now()
    assert moved["float32"] == pytest.approx(12, rel=0.01) and 6.0 < moved["8_bit"] < 6.5


def test_a_snapshot_comes_back_to_the_bit():
    """Through components that are parked meanwhile, too."""
    decoders = [decoder_on(CPU, torch.bfloat16, spec="blocks") for _ in range(2)]
    first, second = (make_trainer("sft", decoder=decoder, **CODED) for decoder in decoders)
    first.step_now(make_batch())
    names = [one.name for one in first.components() if {"device", "host"} <= set(one.tiers)]
    first.move(names, "host")
    second.restore_now(first.snapshot_now())
    first.move(names, "device")
    assert_bits_equal(saved_tensors(first), saved_tensors(second))
    for trainer in (first, second):
        trainer.step_now(make_batch(seed=1))
    assert_bits_equal(weights_of(first), weights_of(second))
    kinds = {name: tensor.dtype for name, tensor in saved_tensors(first).items()}
    assert (
        kinds["actor.exp_avg_codes.embed.weight"]
        == kinds["actor.exp_avg_sq_codes.embed.weight"]
        == torch.uint8
    )
    assert saved_tensors(first)["actor.exp_avg_sq_scale.embed.weight"].shape == (50, 1)


def test_a_snapshot_in_files_comes_back_to_the_bit(tmp_path):
    """Staged in as many bytes as the planner says."""
    first, second = (
        make_trainer("sft", decoder=decoder_on(CPU, torch.float32, spec="blocks"), **CODED)
        for _ in "12"
    )
    first.step_now(make_batch())
    saver, store, events = saver_on(None, tmp_path, background=True)
    saver.save(1, parts=first.live_snapshot, state={}, blobs={})
    saver.finish()
    (staged,) = [fields["buffer_bytes"] for kind, fields in events if kind == "snapshot.begun"]
    given = {"trained": 1, "reference": False, "average": False, "ranks": 1}
    planned = staging_bytes(model_numbers(BLOCKS), "float32", moments="8_bit", **given)
    assert planned <= staged < planned + 64 * (len(saved_tensors(first)) + 1)
    found = load_latest(store)
    assert found is not None
    second.restore_now({"tensors": found.tensors, "state": found.state["trainer"]})
    assert_bits_equal(saved_tensors(first), saved_tensors(second))


@pytest.mark.parametrize(
    "how", ["host", pytest.param("disk and gradients", marks=pytest.mark.slow)]
)
def test_snapshots_go_both_ways_with_state_away(tmp_path, how):
    decoders = [decoder_on(CPU, torch.bfloat16, spec="blocks") for _ in range(3)]
    plain, again = (make_trainer("sft", decoder=decoder, **CODED) for decoder in decoders[:2])
    settings = {"disk_folder": tmp_path, "offload_cut_bytes": 8192, **AWAY[how], **CODED}
    offloaded = make_trainer("sft", decoder=decoders[2], **settings)
    plain.step_now(make_batch())
    offloaded.restore_now(plain.snapshot_now())
    for trainer in (plain, offloaded):
        trainer.step_now(make_batch(seed=1))
    assert_bits_equal(saved_tensors(plain), saved_tensors(offloaded))
    again.restore_now(offloaded.snapshot_now())
    for trainer in (plain, again):
        trainer.step_now(make_batch(seed=2))
    assert_bits_equal(weights_of(plain), weights_of(again))
    offloaded.close_now()


@pytest.mark.parametrize(("was", "now"), [("float32", "8_bit"), ("8_bit", "float32")])
def test_a_snapshot_of_the_other_moments_is_refused(was, now):
    decoders = [decoder_on(CPU, torch.float32, spec="blocks") for _ in range(2)]
    trainers = [
        make_trainer("sft", decoder=d, moments=kind)
        for d, kind in zip(decoders, (was, now), strict=True)
    ]
    state, before = trainers[0].snapshot_now(), saved_tensors(trainers[1])
    with pytest.raises(
        SnapshotError, match=f'with trainer.moments = "{was}", this run has "{now}"'
    ) as caught:
        trainers[1].restore_now(state)
    assert f'trainer.moments = "{was}"' in caught.value.hint
    assert_bits_equal(before, saved_tensors(trainers[1]))


def test_a_snapshot_from_before_there_was_a_choice_is_of_float32():
    trainer = make_trainer("sft", decoder=decoder_on(CPU, torch.float32, spec="blocks"))
    state = trainer.snapshot_now()
    del state["state"]["moments"]
    trainer.restore_now(state)
    coded = make_trainer("sft", decoder=decoder_on(CPU, torch.float32, spec="blocks"), **CODED)
    with pytest.raises(SnapshotError, match=r'with trainer\.moments = "float32"'):
        coded.restore_now(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout not in ("mixed", "zero3_once")]
)
@pytest.mark.parametrize("dtype", show(("float32",), DTYPES))
def test_every_layout_updates_to_the_same_bits(ranks, tmp_path, layout, dtype):
    """From the same gradients: masters, codes and scales, wherever a rank's part ends and wherever
    it lives."""
    expected, _ = coded_updates(None, dtype=dtype)
    for how in (None, "host and gradients", "disk"):
        found, _ = ranks.run(
            coded_updates, dtype=dtype, layout=layout, how=how, folder=str(tmp_path)
        )[0]
        assert found.keys() == expected.keys()
        wrong = [
            name for name, tensor in expected.items() if not np.array_equal(found[name], tensor)
        ]
        assert wrong == [], how


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in TENSOR_LAYOUTS if name != "tensor4"])
def test_ranks_that_share_layers_update_to_the_same_bits(ranks, layout):
    """And a snapshot of theirs has the blocks of one process."""
    given = {"spec": "blocks_parted", "dtype": "bfloat16"}
    expected, _ = coded_updates(None, **given)
    found, _ = ranks.run(coded_updates, layout=layout, **given)[0]
    assert_same(found, expected)
    state = saved(None, "sft", steps=1, **given, **CODED)
    start = whole_tensors(state["tensors"].values())
    _, _, state = ranks.run(resume, state, "sft", steps=range(0), layout=layout, **given, **CODED)[
        0
    ]
    assert_bits_equal(start, whole_tensors(state["tensors"].values()))


def test_a_cut_within_a_block_is_refused():
    table = model_layout(SPECS["blocks"], 2)
    with pytest.raises(ConfigError, match=r"128 of the 256 columns of layers\.0\.down\.weight"):
        check_parts("actor", table)
    check_parts("actor", model_layout(SPECS["blocks_parted"], 2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "hybrid1", "hybrid3"])
def test_training_over_ranks_is_near_one_process(ranks, layout):
    """Sums in another order flip codes at the edge between two, so this is near and no more."""
    given = {"spec": "blocks", "dtype": "float32", "learning_rate": 1e-3, **CODED}
    expected = resume(None, saved(None, "sft", steps=0, **given), "sft", steps=range(3), **given)
    state = saved(None, "sft", steps=0, **given)
    reports, found, _ = ranks.run(resume, state, "sft", steps=range(3), layout=layout, **given)[0]
    losses = [[report.metrics["loss"] for report in each] for each in (reports, expected[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, tensor in expected[1].items():
        if name.startswith("actor.master"):
            assert np.abs(found[name] - tensor).max() < 2e-3, name  # of three updates of 1e-3


@pytest.mark.slow
def test_a_snapshot_moves_between_any_numbers_of_ranks(ranks):
    """One process → 4 ranks of each layout → one process: the same bits all the way."""
    given = {"spec": "blocks", "dtype": "bfloat16", **CODED}
    state = saved(None, "sft", steps=2, **given)
    start = whole_tensors(state["tensors"].values())
    assert any(tensor.dtype == torch.uint8 and tensor.any() for tensor in start.values())
    for layout in ("zero1", "zero3", "hybrid3", "hybrid1", "zero2"):
        _, _, state = ranks.run(resume, state, "sft", steps=range(0), layout=layout, **given)[0]
        assert_bits_equal(start, whole_tensors(state["tensors"].values()))
    _, _, state = resume(None, state, "sft", steps=range(0), **given)
    assert_bits_equal(start, whole_tensors(state["tensors"].values()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3", "hybrid1", "hybrid3"])
def test_the_planner_knows_the_bytes_of_each_layout(ranks, layout):
    """Of the rank that holds most."""
    held = ranks.run(held_bytes, "sft", layout=layout, spec="blocks", dtype="bfloat16", **CODED)
    parallel = LAYOUTS[layout]
    planned = state_bytes(
        model_numbers(BLOCKS),
        "bfloat16",
        Layout(
            gpus=4,
            zero=parallel.zero,
            shard_ranks=(parallel.shard_ranks or 4) if parallel.zero else 1,
            checkpointing="none",
            tokens_per_chunk=64,
            offload_optimizer="none",
            offload_gradients=False,
            moments="8_bit",
        ),
    )
    most = {name: max(rank.get(name, 0) for rank in held) for name in planned}
    for name, size_bytes in planned.items():
        assert most[name] == pytest.approx(size_bytes, rel=0.05), name


def test_a_rank_alone_has_no_codes_without_the_setting():
    parameters = {"matrix": torch.nn.Parameter(torch.zeros(4, BLOCK))}
    optimizer = FlatOptimizer(parameters, weight_decay=0.0, mesh=make_mesh(alone(), 0), **NUMBERS)
    assert not optimizer.coded and set(optimizer.moments) == {"exp_avg", "exp_avg_sq"}
