"""Bytes that the planner predicts, to the last one, of models small enough to be counted by hand.
Past 500 lines: all counts are of the same few models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.core.errors import ConfigError
from gyre.engine.runners.gpu_work import buffer_bytes
from gyre.planner.memory_model.activations import (
    again_bytes,
    block_columns,
    forward_layer_bytes,
    head_backward_bytes,
    head_forward_bytes,
    kept_by_layer,
    layer_backward_bytes,
    layer_bytes,
    saved_bytes,
)
from gyre.planner.memory_model.components import staging_bytes
from gyre.planner.memory_model.engine import (
    GRAPH_BYTES,
    engine_buffer_bytes,
    engine_bytes,
    kv_bytes_per_page,
)
from gyre.planner.memory_model.peaks import forward_bytes
from gyre.planner.memory_model.states import (
    Layout,
    away_bytes,
    coded_parameters,
    device_staging_bytes,
    disk_state_bytes,
    frozen_bytes,
    gathered_bytes,
    head_parameters,
    host_staging_bytes,
    host_state_bytes,
    layer_buffer_bytes,
    layer_group_bytes,
    matrix_shapes,
    most_chunks,
    on_one_gpu,
    root_parameters,
    state_bytes,
    unsummed_bytes,
)
from gyre.planner.plan import ModelNumbers, PlanInputs, Shards
from planner_cases import activation_bytes, predict_components, working_bytes

# Per layer: q|k|v 64 rows, output 20 × 32, MLP 3 × 20 × 50, norms 2 × 20 + 2 × 8: 1,280 + 640 + 3,000 + 56 = 4,976.
# Around: embedding 100 × 20 and the final norm, 2,020.
TOY = ModelNumbers(
    num_parameters=3 * 4976 + 2020,
    vocab_size=100,
    hidden_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=50,
    context_tokens=1024,
    tied=True,
    qkv_bias=False,
    qk_norm=True,
)
UNTIED = replace(TOY, tied=False, num_parameters=TOY.num_parameters + 2000)
P = 16_948  # of TOY
# Rows of whole blocks of 256: two matrices 300 × 256; per layer 512 × 256, 256 × 256, 1024 × 256
# and 256 × 512.
CODED = 2 * 300 * 256 + 2 * (512 + 256 + 1024 + 512) * 256
WIDE = ModelNumbers(
    num_parameters=CODED + 2 * 640 + 256,
    vocab_size=300,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=512,
    context_tokens=1024,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
)


def make_layout(**changes: Any) -> Layout:
    base: dict[str, Any] = {
        "gpus": 8, "zero": 3, "shard_ranks": 8, "checkpointing": "none", "tokens_per_chunk": 10,
        "offload_optimizer": "none", "offload_gradients": False,
    }  # fmt: skip
    return Layout(**{**base, **changes})


ONE = make_layout(gpus=1, zero=0, shard_ranks=1)
FLAT = make_layout(zero=0, shard_ranks=1)


def make_inputs(**changes: Any) -> PlanInputs:
    base: dict[str, Any] = {
        "model": TOY,
        "objective": "grpo",
        "online": True,
        "prompts_per_step": 4,
        "completions_per_prompt": 2,
        "max_prompt_tokens": 10,
        "max_completion_tokens": 30,
        "engine_tokens_per_step": 7,
    }
    return PlanInputs(**{**base, **changes})


# Activations.


def test_each_tensor_that_a_layer_keeps() -> None:
    """In bfloat16, of H 20, M 50, 4 heads and 2 KV heads of 8."""
    everywhere = {
        "x_TE": 40, "normed_TE": 40, "rstd_T1": 4, "qkv_TR": 128, "rstd_TJ1": 24, "attended_TA": 64,
        "mlp.middle_TE": 40, "mlp.normed_TE": 40, "mlp.rstd_T1": 4, "mlp.gate_up_T2M": 200,
    }  # fmt: skip
    fused = everywhere | {"attention.qk": 96, "attention.log_total": 16}
    product, activated = {"mlp.product_TM": 100}, {"mlp.activated_TM": 100}
    kept = {
        how: kept_by_layer(TOY, "bfloat16", how, longest=100)
        for how in ("triton", "c_cpu", "torch_cuda")
    }
    assert kept == {
        "triton": fused,
        "c_cpu": fused | product,
        "torch_cuda": fused | product | activated,
    }
    assert kept_by_layer(
        TOY, "bfloat16", "torch_cpu", longest=100
    ) == everywhere | product | activated | {
        "attention.q_k_v": 128,
        "attention.probabilities": 2 * 4 * 100,
    }
    plain = replace(TOY, qk_norm=False)
    assert kept_by_layer(plain, "float32", "triton", longest=100)["rstd_TJ1"] == 0
    assert kept_by_layer(plain, "float32", "triton", longest=100)["qkv_TR"] == 256
    assert kept_by_layer(TOY, "float16", "triton", longest=100) == fused


@pytest.mark.parametrize(
    ("longest", "scores"),
    [
        (100, 100),
        (128, 128),  # one block of queries sees all keys
        (129, (65 * 65 + 64 * 129) // 129),  # two blocks; the first sees the keys up to its end
        (256, (128 * 128 + 128 * 256) // 256),
        (257, 0),  # they are computed again
    ],
)
def test_probabilities_are_kept_by_blocks_of_queries(longest: int, scores: int) -> None:
    kept = kept_by_layer(TOY, "float32", "torch_cpu", longest=longest)
    assert kept["attention.probabilities"] == 4 * 4 * scores


def test_what_checkpointing_leaves_of_a_layer() -> None:
    def sizes(saving: Any) -> list[int]:
        modes: tuple[Any, ...] = ("none", "selective", "full")
        return [layer_bytes(TOY, "bfloat16", saving, mode, longest=300) for mode in modes]

    assert sizes("triton") == [696, 696 - 40 - 40 - 200 - 96, 40]
    assert sizes("c_cpu") == [796, 320, 40] and sizes("torch_cuda") == [896, 320, 40]
    assert sizes("torch_cpu") == [784 + 128, 784 + 128 - 480, 40]

    def again(saving: Any, mode: Any) -> int:
        return again_bytes(TOY, "bfloat16", saving, mode, 10, longest=300)

    assert [again("triton", mode) for mode in ("none", "selective", "full")] == [
        0,
        10 * 240,
        10 * 656,
    ]
    assert again("c_cpu", "selective") == 10 * 340
    assert forward_layer_bytes(TOY, "bfloat16", "triton", 10, longest=300) == 10 * 696


def test_what_a_chunk_keeps_from_embedding_to_log_probs() -> None:
    """Ids and rotary tables 8 + 32 per token; per target two rows of 40, 24 of statistics and
    indices, 200 of the vocabulary. Where not every token is a target the last MLP and the head have
    the targets' rows alone."""
    token, target = 8 + 2 * 8 * 2, 2 * 40 + 4 + 8 + 12 + 200

    def saved(saving: Any, mode: Any, targets: int) -> int:
        return saved_bytes(TOY, "bfloat16", saving, mode, tokens=10, targets=targets, longest=300)

    every = 10 * (token + target)
    assert saved("triton", "none", 10) == 3 * 10 * 696 + every
    assert saved("triton", "full", 10) == 3 * 10 * 40 + every
    some = 10 * token + 4 * target
    assert saved("triton", "none", 4) == 3 * 10 * 696 - 6 * 284 + 4 * (64 + 8) + some
    assert saved("triton", "selective", 4) == 3 * 10 * 320 - 6 * 44 + 4 * (64 + 8) + some
    assert saved("triton", "full", 4) == 3 * 10 * 40 + some
    attended = 10 * 64  # attention by torch keeps none of its output
    assert saved("torch_cpu", "none", 4) == 3 * 10 * 912 - 6 * 484 + 4 * (64 + 8) - attended + some


def test_blocks_of_the_vocabulary() -> None:
    """2^24 logits at a time by torch, 2^27 by Triton, in whole 128s, 1,024 columns at least."""
    columns = {8192: 2048, 8300: 1920, 16_384: 1024, 100_000: 1024}
    assert {rows: block_columns("torch_cuda", rows) for rows in columns} == columns
    assert block_columns("triton", 65_536) == 2048
    assert block_columns("torch_cpu", 0) == block_columns("torch_cpu", 1) == 2**24
    large = replace(TOY, vocab_size=1920)
    assert head_forward_bytes(large, "torch_cuda", 8300) == 14 * 8300 * 1920
    assert head_forward_bytes(large, "torch_cuda", 16_384) == 14 * 16_384 * 1024
    assert head_forward_bytes(large, "triton", 100) == 4 * 100 * 1920

    def head_of_each(saving: Any, mode: Any, targets: int, vocab: int) -> int:
        model = replace(TOY, vocab_size=vocab, num_layers=1)
        saved = saved_bytes(
            model, "bfloat16", saving, mode, tokens=targets, targets=targets, longest=300
        )
        return saved // targets - layer_bytes(model, "bfloat16", saving, mode, longest=300) - 40

    assert head_of_each("torch_cuda", "none", 8300, 1920) == 104 + 2 * 1920
    assert head_of_each("torch_cuda", "none", 8300, 1921) == 104, (
        "several blocks: each is made again"
    )
    assert head_of_each("triton", "none", 65_536, 2049) == 104 + 2 * 2049, "Triton keeps logits"
    assert head_of_each("triton", "selective", 65_536, 2049) == 104


def test_temporaries_of_a_backward_pass() -> None:
    assert (
        head_backward_bytes(TOY, "bfloat16", "triton", 10)
        == 2 * 2000 + 10 * 20 * (4 + 4 + 2) + 4 * 10 * 100
    )
    assert (
        head_backward_bytes(TOY, "float32", "torch_cpu", 10)
        == 4 * 2000 + 10 * 20 * 12 + 14 * 10 * 100
    )
    # A 8: each of the three places is once the widest
    narrow = replace(TOY, num_heads=1, num_kv_heads=1)
    widest = {
        10: 10 * (2 * 20 + 2 * 50 + 8) + 3 * 20 * 50 + 20 * 8,
        100: 100 * (3 * 20 + 2 * 50) + 3 * 20 * 50,
        1000: 1000 * (20 + 3 * 50),
    }
    for tokens, numbers in widest.items():
        assert layer_backward_bytes(narrow, "bfloat16", tokens) == 2 * numbers
        rounded = tokens * (4 * 50 + 20) + 2 * 20 * 50
        assert layer_backward_bytes(narrow, "bfloat16", tokens, "fp8") == 2 * numbers + rounded


# Layouts.


def test_words_of_a_layout() -> None:
    rest = ", checkpointing none, chunks of 12,000 tokens"

    def words(**changes: Any) -> str:
        return make_layout(tokens_per_chunk=12_000, **changes).words()

    assert words(gpus=1, zero=0, shard_ranks=1) == "one GPU" + rest
    assert words(zero=0, shard_ranks=1) == "data parallel" + rest
    assert words(zero=1) == "ZeRO-1" + rest
    assert words(zero=1, shard_ranks=4) == "ZeRO-1 in 2 groups of 4" + rest
    assert (
        words(zero=2, sum_gradients="update") == f"ZeRO-2{rest}, gradients summed once per update"
    )
    assert words(zero=1, sum_gradients="update") == "ZeRO-1" + rest
    away = {
        "offload_optimizer": "disk",
        "offload_gradients": True,
        "offload_parameters": ("actor", "critic"),
    }
    assert words(moments="8_bit", **away) == (
        f"ZeRO-3{rest}, moments in 8 bits, optimizer state on disk, gradients on the host, "
        "weights of actor and critic on the host"
    )


@pytest.mark.parametrize(
    ("layout", "dtype", "sizes"),
    [
        (FLAT, "bfloat16", {"params": 2 * P, "grads": 4 * P, "optimizer": 8 * P, "master": 4 * P}),
        (FLAT, "float32", {"params": 4 * P, "grads": 4 * P, "optimizer": 8 * P}),
        # 16,948 / 8 is 2,118.5
        (make_layout(zero=1), "bfloat16", {"params": 2 * P, "grads": 4 * P, "optimizer": 8 * 2119, "master": 4 * 2119}),
        (make_layout(zero=2), "bfloat16", {"params": 4 * 2119, "grads": 4 * 2119, "optimizer": 8 * 2119}),
        (make_layout(shard_ranks=4), "float32", {"params": 4 * 4237, "grads": 4 * 4237, "optimizer": 8 * 4237}),
        # weights on the host are computed with, and masters are beside them, in float32 too
        (replace(FLAT, offload_parameters=("actor",)), "float32",
         {"params": 4 * P, "grads": 4 * P, "optimizer": 8 * P, "master": 4 * P}),
    ],
)  # fmt: skip
def test_states_of_a_rank(layout: Layout, dtype: Any, sizes: dict[str, int]) -> None:
    assert state_bytes(TOY, dtype, layout) == {
        f"actor.{name}": size for name, size in sizes.items()
    }


def test_moments_in_8_bits() -> None:
    """Both moments of 256 numbers: 512 codes and two scales, 520 bytes. Norms stay in float32."""
    assert WIDE.num_parameters == 1_334_784 and CODED == 1_333_248
    assert coded_parameters(WIDE, "8_bit") == CODED and coded_parameters(WIDE, "float32") == 0
    assert coded_parameters(TOY, "8_bit") == 0
    heads, layer = [(300, 256)], [(512, 256), (256, 256), (1024, 256), (256, 512)]
    assert matrix_shapes(WIDE) == 2 * heads + 2 * layer
    assert matrix_shapes(replace(WIDE, tied=True)) == heads + 2 * layer

    def moments(**changes: Any) -> int:
        return state_bytes(WIDE, "bfloat16", make_layout(moments="8_bit", **changes))[
            "actor.optimizer"
        ]

    assert moments(zero=0, shard_ranks=1) == 8 * 1536 + 520 * 5208
    assert moments(zero=1, shard_ranks=1000) == 8 * 1335, (
        "one slice of ZeRO-1 may have all that is not coded"
    )
    assert moments(zero=2, shard_ranks=1000) == 8 * 2 + 520 * 5
    assert moments(zero=3) == 8 * 192 + 520 * 651


def test_where_offloaded_state_lives() -> None:
    states = state_bytes(TOY, "bfloat16", ONE)
    params, grads, optimizer, master = ({f"actor.{n}": k * P} for n, k in (
        ("params", 2), ("grads", 4), ("optimizer", 8), ("master", 4)
    ))  # fmt: skip

    def away(**changes: Any) -> tuple[dict[str, int], dict[str, int]]:
        layout = replace(ONE, **changes)
        on_host, on_disk = host_state_bytes(states, layout), disk_state_bytes(states, layout)
        assert away_bytes(states, layout) == on_host | on_disk
        return on_host, on_disk

    assert away() == ({}, {})
    assert away(offload_optimizer="host") == (optimizer | master, {})
    assert away(offload_optimizer="disk", offload_gradients=True) == (grads, optimizer | master)
    assert away(offload_optimizer="host", offload_parameters=("actor",)) == (
        params | optimizer | master,
        {},
    )
    assert away(offload_parameters=("critic",)) == ({}, {})
    assert layer_buffer_bytes(TOY, "bfloat16") == 2 * (2020 + 2 * 4976)


@pytest.mark.parametrize(
    ("changes", "dtype", "on_device", "on_host"),
    [
        ({}, "bfloat16", 0, 0),
        # a block of 256: master 4, moments 8, gradient 4; three places of as many blocks as 10,000
        # bytes hold
        ({"offload_optimizer": "host"}, "bfloat16", 3 * 3 * 256 * 12, 0),
        ({"offload_optimizer": "host"}, "float32", 3 * 4 * 256 * 8, 0),
        ({"offload_optimizer": "host", "offload_gradients": True}, "bfloat16", 3 * 2 * 256 * 16, 2 * 10_000),
        ({"offload_gradients": True}, "bfloat16", 3 * 9 * 256 * 4, 2 * 10_000),
        ({"offload_optimizer": "host", "moments": "8_bit"}, "bfloat16", 3 * 2 * (256 * 12 + 520), 0),
        ({"offload_optimizer": "disk"}, "bfloat16", 3 * 3 * 256 * 12, 3 * 3 * 256 * 12),
        ({"offload_optimizer": "disk", "offload_gradients": True}, "bfloat16", 3 * 2 * 256 * 16,
         3 * 2 * 256 * 12 + 2 * 10_000),
        # eight ranks: 2,119 numbers each, which three places of one block hold in three turns
        ({"gpus": 8, "shard_ranks": 8, "zero": 1, "offload_gradients": True}, "bfloat16", 3 * 3 * 256 * 4, 2 * 10_000),
        ({"gpus": 8, "shard_ranks": 8, "zero": 2, "offload_gradients": True}, "bfloat16", 3 * 3 * 256 * 4,
         2 * 4 * 2119),
        ({"gpus": 8, "shard_ranks": 8, "zero": 2, "offload_optimizer": "host"}, "bfloat16", 3 * 3 * 256 * 8, 0),
    ],
)  # fmt: skip
def test_places_through_which_offloaded_state_goes(
    changes: Any, dtype: Any, on_device: int, on_host: int
) -> None:
    layout = replace(ONE, **changes)
    assert device_staging_bytes(TOY, dtype, layout, 10_000) == on_device
    assert host_staging_bytes(TOY, dtype, layout, 10_000) == on_host
    file = 3 * 2 * 256 * 12 if layout.offload_gradients else on_host
    on_cpu = on_host - (file if layout.offload_optimizer == "disk" else 0)
    assert host_staging_bytes(TOY, dtype, layout, 10_000, device="cpu") == on_cpu, (
        "a file is read to where it is"
    )


def test_a_file_is_read_through_as_many_blocks_as_a_cut_holds() -> None:
    layout = replace(ONE, offload_optimizer="disk")
    for cut_bytes, blocks in ((3 * 3072, 3), (3 * 3072 - 1, 2)):
        assert host_staging_bytes(TOY, "bfloat16", layout, cut_bytes) == 3 * blocks * 3072


def test_models_that_are_asked() -> None:
    for zero, each in ((0, P), (1, P), (2, 2119), (3, 2119)):
        layout = make_layout(zero=zero, shard_ranks=8 if zero else 1)
        assert frozen_bytes(TOY, "bfloat16", layout) == 2 * each
        assert frozen_bytes(TOY, "bfloat16", layout, average=True) == 6 * each


def test_what_fsdp2_gathers() -> None:
    zero1, zero2, zero3 = (make_layout(zero=zero) for zero in (1, 2, 3))
    layers = 3 * 4976
    for model, around, head in ((TOY, 2020, 0), (UNTIED, 4020, 2000)):
        assert (root_parameters(model), head_parameters(model)) == (2020, head)
        assert [gathered_bytes(model, "bfloat16", one) for one in (zero1, zero2, zero3)] == [
            0, 2 * (around + layers), 2 * around
        ]  # fmt: skip
    assert gathered_bytes(TOY, "bfloat16", zero2, "fp8") == 2 * 2020 + layers
    group = [layer_group_bytes(TOY, "bfloat16", one) for one in (zero1, zero2, zero3)]
    assert group == [0, (2 + 4) * 4976, (2 * 2 + 2 + 4) * 4976]
    assert layer_group_bytes(TOY, "bfloat16", zero3, "fp8") == (2 * 1 + 2 + 4) * 4976


def test_chunks_of_a_rank() -> None:
    """1,000 tokens over 3 ranks are 34 sequences of 10, of which 35 tokens hold three."""
    assert most_chunks(1000, longest=10, ranks=3, tokens_per_chunk=35) == 12
    assert most_chunks(990, longest=10, ranks=3, tokens_per_chunk=35) == 11
    assert most_chunks(1000, longest=10, ranks=3, tokens_per_chunk=5) == 34
    assert most_chunks(0, longest=10, ranks=3, tokens_per_chunk=35) == 1
    once = make_layout(zero=2, sum_gradients="update")
    assert [unsummed_bytes(TOY, once, chunks) for chunks in (1, 2)] == [0, 4 * P]
    assert unsummed_bytes(TOY, make_layout(zero=2), 2) == 0
    assert unsummed_bytes(TOY, replace(once, zero=1), 2) == 0
    one = on_one_gpu(make_layout(moments="8_bit"))
    assert one == replace(ONE, moments="8_bit")


# What the ledger of a run is told.


def test_working_memory_of_a_pass() -> None:
    assert kv_bytes_per_page(TOY, "bfloat16", 16) == 2 * 3 * 2 * 8 * 16 * 2
    kept = 10 * (3 * 696 + 40) - 284 + 9 * (64 + 8 + 304)  # nine of ten tokens are targets
    head = 2 * 2000  # its gradient waits for the embedding's
    layer = head + 2 * (10 * (2 * 20 + 2 * 50 + 32) + 3 * 20 * 50 + 20 * 32)
    given: dict[str, Any] = {"longest": 300, "saving": "triton"}
    assert activation_bytes(TOY, "bfloat16", 10, **given) == kept + layer
    again = 10 * 656
    assert activation_bytes(TOY, "bfloat16", 10, checkpointing="full", **given) == (
        10 * (3 * 40 + 40) + 9 * 304 + again + layer
    )
    rounded = 10 * 220 + 2000
    assert activation_bytes(TOY, "bfloat16", 10, matmul="fp8", **given) == kept + layer + rounded
    words = replace(TOY, vocab_size=1000)  # a head that is larger than a layer
    head = 2 * 20_000 + 9 * 20 * 10 + 4 * 9 * 1000
    assert activation_bytes(words, "bfloat16", 10, **given) == kept + 9 * 2 * 900 + head
    assert forward_bytes(TOY, "bfloat16", 10, **given) == 10 * 696 + 4 * 10 * 100


def test_working_memory_of_an_engine() -> None:
    """Per token 4·E + 2·(q|k|v) + 4·M in bfloat16; keys and values that are gathered; three float32 rows of logits per
    completion, and 48 bytes per token of the vocabulary in each of 64 that are truncated together."""
    layer, gathered = 2 * (80 + 2 * 64 + 200), 2 * 2 * 8 * 2
    few = engine_bytes(TOY, "bfloat16", tokens=7, running=3, longest=11)
    assert few == 7 * layer + 3 * 11 * gathered + (12 * 3 + 48 * 3) * 100
    many = engine_bytes(TOY, "bfloat16", tokens=7, running=100, longest=11)
    assert many == 7 * layer + 100 * 11 * gathered + (12 * 100 + 48 * 64) * 100


BUFFERS: dict[str, Any] = {
    "max_running": 16,
    "token_budget": 7,
    "pool_tokens": 16 * 256,
    "page_tokens": 64,
    "context_tokens": 1024,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "logit_bytes": 2,
    "invariant": False,
}


def test_working_memory_of_each_phase() -> None:
    """Of a chunk of 12 tokens on a GPU; sequences have 156 + 100 tokens."""
    inputs = make_inputs(max_prompt_tokens=156, max_completion_tokens=100)
    asked: dict[str, Any] = {"page_tokens": 64, "max_running": 16}
    assert engine_buffer_bytes(inputs, dtype="bfloat16", **asked) == buffer_bytes(**BUFFERS)
    kept = buffer_bytes(**BUFFERS) + GRAPH_BYTES
    gathered, generate = (
        engine_bytes(TOY, "bfloat16", tokens=7, running=16, longest=longest)
        for longest in (256, 0)  # Triton's kernels read keys and values where they are
    )
    score, train = (
        12 * 696 + 4 * 12 * 100,
        activation_bytes(TOY, "bfloat16", 12, longest=256, saving="triton"),
    )

    def working(**changes: Any) -> dict[str, int]:
        saving = changes.pop("saving", "triton")
        changed = replace(inputs, **changes)
        found = working_bytes(
            changed, dtype="bfloat16", saving=saving, tokens_per_chunk=12, **asked
        )
        return {phase: found[phase] for phase in found}

    def with_kept(**sizes: int) -> dict[str, int]:
        return {phase: size + kept for phase, size in sizes.items()}

    online = with_kept(rollout=generate, score=score, train=train, handover=0, evaluate=generate)
    assert working() == online
    apart = 6 * P  # weights in the compute dtype: below two buckets, and what they replace
    assert working(shared_weights=False) == online | {"handover": apart + kept}
    large = replace(TOY, num_parameters=10**9)
    assert working(shared_weights=False, model=large)["handover"] == (
        2 * (256 << 20) + 2 * 10**9 + kept
    )
    offline = {"rollout": 0, "score": 0, "train": train, "handover": 0, "evaluate": score}
    assert working(online=False) == offline
    assert working(online=False, reference=True) == offline | {"score": score}
    larger = working(online=False, reference=True, reward_model=replace(TOY, mlp_size=60))
    assert larger["score"] == score + 12 * 2 * 2 * 10
    by_torch = working(saving="c_cpu")
    assert (by_torch["rollout"], by_torch["handover"]) == (gathered, 0), (
        "a CPU's engine has no fixed buffers"
    )
    shown = working(checkpointing="full", matmul="fp8")
    assert shown["train"] == kept + activation_bytes(
        TOY, "bfloat16", 12, longest=256, saving="triton", checkpointing="full", matmul="fp8"
    )


def test_working_memory_where_models_are_in_shards() -> None:
    """What FSDP2 has whole for a while, of one layer at a time and of every model that is
    trained."""
    asked = make_inputs(
        online=False, ranks=4, sequences_per_update=4, max_prompt_tokens=4, max_completion_tokens=6
    )

    def more(**changes: Any) -> dict[str, int]:
        given: dict[str, Any] = {
            "dtype": "bfloat16",
            "saving": "triton",
            "page_tokens": 16,
            "max_running": 0,
        }
        tokens = changes.pop("tokens_per_chunk", 10)
        whole, split = (
            working_bytes(one, tokens_per_chunk=tokens, **given)
            for one in (replace(asked, **{**changes, "shards": {}}), replace(asked, **changes))
        )
        return {phase: split[phase] - whole[phase] for phase in ("score", "train")}

    zero1, zero2, zero3 = (Shards(zero=zero, ranks=4) for zero in (1, 2, 3))
    group2, group3 = 6 * 4976, 10 * 4976
    assert more(shards={"actor": zero1}) == {"score": 0, "train": 0}
    assert more(shards={"actor": zero2})["train"] == group2 + 2 * P
    assert more(shards={"actor": zero3})["train"] == group3 + 2 * 2020
    assert more(shards={"actor": Shards(zero=3, ranks=2)})["train"] == group3 + 2 * 2020
    assert more(shards={"actor": Shards(zero=3, ranks=1)})["train"] == 0, (
        "one that no rank shares is whole"
    )
    both = {"actor": zero2, "critic": zero3}
    assert more(shards=both)["train"] == group2 + 2 * P
    assert more(shards=both, critic=True)["train"] == group3 + 2 * P + 2 * 2020
    assert more(shards={"actor": zero2}, matmul="fp8")["train"] == group2 + 2 * 2020 + 3 * 4976

    once: dict[str, Any] = {
        "sum_gradients": "update",
        "shards": {"actor": zero2, "critic": zero1},
        "critic": True,
    }
    held = group2 + 2 * P
    assert more(**once)["train"] == held, "four sequences over four ranks are one chunk"
    assert more(**once, sequences_per_update=5)["train"] == held + 4 * P
    assert more(**once, sequences_per_update=8, tokens_per_chunk=20)["train"] == held
    assert more(**once, sequences_per_update=None)["train"] == held + 4 * P, (
        "4 prompts × 2 completions"
    )

    asks: dict[str, Any] = {"reference": True}
    layers = 2 * 2 * 4976
    assert more(shards={"actor": zero3}, **asks)["score"] == layers + 2 * 2020
    assert more(shards={"reference": zero2}, **asks)["score"] == layers + 2 * P
    assert more(shards={"reward": zero3}, reward_model=UNTIED, **asks)["score"] == layers + 2 * 4020
    assert more(shards={"reward": zero3}, **asks)["score"] == 0, "there is none"
    assert more(shards={"reference": zero1}, **asks)["score"] == 0
    one = {"actor": zero3, "reference": zero2}
    assert more(shards=one, **asks)["score"] == layers + 2 * P, "one model is asked at a time"


def test_host_memory_of_background_snapshots() -> None:
    def staged(**changes: Any) -> int:
        base: dict[str, Any] = {"trained": 1, "reference": False, "average": False, "ranks": 1}
        return staging_bytes(changes.pop("model", TOY), "bfloat16", **{**base, **changes})

    assert staged() == 12 * P
    assert staged(trained=2, reference=True, average=True) == (2 * 12 + 2 + 4) * P
    assert staged(average=True) == 12 * P, "there is no reference whose average it would be"
    assert staged(ranks=7) == 29_054  # 203,376 / 7 is 29,053.7
    assert staged(model=WIDE, moments="8_bit") == 12 * WIDE.num_parameters - 8 * CODED + 520 * 5208


def told(**changes: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """(bytes, tiers) of each component, in bfloat16, with pages of 16 tokens."""
    inputs, device = make_inputs(**changes), changes.get("device", "cpu")
    found = predict_components(inputs, dtype="bfloat16", page_tokens=16, kv_pages=5, device=device)
    return {one.name: (one.size_bytes, one.tiers) for one in found}


KEEPING, BRIEF = ("device", "host"), ("device", "none")
TRAINED = {
    "params": (2 * P, KEEPING),
    "grads": (4 * P, BRIEF),
    "optimizer": (8 * P, KEEPING),
    "master": (4 * P, KEEPING),
}


def owned(owner: str, **changes: Any) -> dict[str, Any]:
    return {f"{owner}.{name}": row for name, row in {**TRAINED, **changes}.items()}


def test_components_of_a_run_and_where_they_may_be() -> None:
    page = 3072
    pages = {"engine.kv": (6 * page, (*KEEPING, "none"))}
    assert told() == owned("actor") | pages
    assert told(online=False, critic=True) == owned("actor") | owned("critic")
    models = {"reference": (2 * P, KEEPING), "reward": (2 * 18_948, KEEPING)}
    assert told(online=False, reference=True, reward_model=UNTIED) == owned("actor") | models
    weights = {"engine.weights": (2 * P, (*KEEPING, "none"))}
    assert told(shared_weights=False) == owned("actor") | weights | pages
    slots = {"engine.kv_host": (3 * page, ("host", "none"))}
    assert told(kv_host_bytes=4 * page - 1) == owned("actor") | pages | slots
    with pytest.raises(ConfigError, match="one KV page has 3072 bytes"):
        told(kv_host_bytes=page - 1)
    everywhere = ("device", "host", "disk")
    kept = {name: (TRAINED[name][0], everywhere) for name in ("params", "optimizer", "master")}
    assert told(online=False, disk_tier=True) == owned("actor", **kept)


def test_components_of_offloaded_state() -> None:
    cut = {"offload_cut_bytes": 10_000, "online": False}
    state = {"optimizer": (8 * P, ("host",)), "master": (4 * P, ("host",))}
    places = {"actor.staging": (3 * 3 * 3072, BRIEF)}
    assert told(offload_optimizer="host", **cut) == owned("actor", **state) | places
    on_disk = {name: (size, ("disk",)) for name, (size, _) in state.items()}
    between = {"actor.staging_host": (3 * 3 * 3072, ("host",))}
    asked = {"offload_optimizer": "disk", "device": "cuda", **cut}
    assert told(**asked) == owned("actor", **on_disk) | places | between
    assert told(**asked | {"device": "cpu"}) == owned("actor", **on_disk) | places
    grads = owned("actor", **state, grads=(4 * P, ("host",)))
    places = {"actor.staging": (3 * 2 * 4096, BRIEF), "actor.staging_host": (20_000, ("host",))}
    assert told(offload_optimizer="host", offload_gradients=True, **cut) == grads | places
    rooms = 2 * (2020 + 2 * 4976)
    weights = owned("actor", **state, params=(2 * P, ("host",))) | {
        "actor.layer_buffers": (rooms, BRIEF)
    }
    places = {"actor.staging": (3 * 3 * 3072, BRIEF)}
    asked = {
        "offload_optimizer": "host",
        "offload_parameters": ("actor", "reference"),
        "reference": True,
    }
    frozen = {"reference": (2 * P, ("host",)), "reference.layer_buffers": (rooms, BRIEF)}
    assert told(**asked, **cut) == weights | places | frozen


def test_components_say_where_their_bytes_come_from() -> None:
    def formulas(**changes: Any) -> dict[str, str]:
        inputs = make_inputs(**changes)
        found = predict_components(inputs, dtype="bfloat16", page_tokens=16, kv_pages=5)
        return {one.name: one.formula for one in found}

    assert formulas(reference=True, shared_weights=False, kv_host_bytes=9216) == {
        "actor.params": "16948 × 2 bytes",
        "actor.grads": "16948 × 4 bytes",
        "actor.optimizer": "16948 × 2 moments × 4 bytes",
        "actor.master": "16948 × 4 bytes",
        "reference": "16948 × 2 bytes",
        "engine.weights": "16948 × 2 bytes",
        "engine.kv": "(5 pages + 1 spare) × 3072 bytes",
        "engine.kv_host": "3 slots × 3072 bytes",
    }
    lain: dict[str, Any] = {
        "online": False,
        "ranks": 4,
        "reference": True,
        "reference_average": True,
    }
    split = {owner: Shards(zero=1, ranks=4) for owner in ("actor", "reference")}
    assert formulas(shards=split, **lain) == {
        "actor.params": "16948 × 2 bytes",
        "actor.grads": "16948 × 4 bytes",
        "actor.optimizer": "16948 × 2 moments × 4 bytes / 4 ranks",
        "actor.master": "16948 × 4 bytes / 4 ranks",
        "reference": "16948 × (2 + 4 of the average) bytes",
    }
    split = {owner: Shards(zero=2, ranks=4) for owner in ("actor", "reference")}
    assert formulas(shards=split, **lain) == {
        "actor.params": "16948 × 4 bytes / 4 ranks",
        "actor.grads": "16948 × 4 bytes / 4 ranks",
        "actor.optimizer": "16948 × 2 moments × 4 bytes / 4 ranks",
        "reference": "16948 × (2 + 4 of the average) bytes / 4 ranks",
    }
    coded = formulas(model=WIDE, online=False, moments="8_bit")["actor.optimizer"]
    assert coded == "2 moments × (1536 × 4 + 1333248 × (1 + 4/256)) bytes"
    held = predict_components(make_inputs(), dtype="bfloat16", page_tokens=16, kv_pages=5)
    assert {one.name: one.leave for one in held} == {
        "actor.params": ("host",),
        "actor.grads": ("none",),
        "actor.optimizer": ("host",),
        "actor.master": ("host",),
        "engine.kv": ("none",),
    }
