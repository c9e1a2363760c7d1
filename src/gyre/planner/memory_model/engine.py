"""Engine: the bytes that generation needs beside the weights: pages, a step's temporaries, buffers.

In: sizes of the model, tokens, completions that run. Out: bytes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gyre.core.rounding import ceil_div
from gyre.engine.config import plan_num_slots
from gyre.engine.runners.gpu_work import PEER_ROWS, buffer_bytes
from gyre.kernels.gpu.work_list import peer_bytes
from gyre.planner.batch_sizes import longest_sequence
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.plan import Dtype, ModelNumbers, PlanInputs, Saving

GRAPH_BYTES = 256 << 20  # private pools of the engine's graphs; an estimate
# as in engine.sampling.truncation: rows at a time, bytes per row and token
TRUNCATION_ROWS, TRUNCATION_BYTES = 64, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDemand:
    """What generation needs on each GPU beside the trainer."""

    running: int  # completions of full length that should hold pages at the same time, per GPU
    longest: int  # tokens of a sequence
    kv_bytes_per_token: int
    working_bytes: int  # a step's temporaries and logits
    graph_bytes: int  # private pools of CUDA graphs
    buffer_bytes: int = 0  # scratch, staging and logits with fixed addresses, which the graphs have
    peer_bytes: int = 0  # that the other tensor ranks write; 0 with one rank
    page_tokens: int = 1
    host_slots: int = 0  # pages of host memory, for completions that wait
    own_weights: bool = False  # whole ones, although no shards keep it from the trainer's
    part: ModelNumbers | None = None  # that a rank holds of the model; None: all of it
    # completions of an iteration that one engine generates; 0: unknown, and without a time
    sequences: int = 0

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.kv_bytes_per_token

    @property
    def pages_per_sequence(self) -> int:
        """Return the pages of one completion of full length."""
        return ceil_div(self.longest, self.page_tokens)


def make_engine(
    inputs: PlanInputs,
    *,
    dtype: Dtype,
    saving: Saving,
    page_tokens: int,
    max_running: int,
    running: int,
) -> EngineDemand | None:
    """Return what generation needs, or None where nothing is generated. `running` of the
    `max_running` completions are of one GPU.

    Triton's kernels read keys and values where they are; others gather them. Graphs and buffers
    with fixed addresses are a GPU's.
    """
    if not inputs.online:
        return None
    part, longest = inputs.engine_part or inputs.model, longest_sequence(inputs)
    model = replace(part, vocab_size=inputs.model.vocab_size)  # logits of all ranks are gathered
    on_gpu = saving in ("triton", "torch_cuda")
    gathered = 0 if saving == "triton" else longest
    page = kv_bytes_per_page(model, dtype, page_tokens)
    fixed = engine_buffer_bytes(
        inputs, dtype=dtype, page_tokens=page_tokens, max_running=max_running
    )
    return EngineDemand(
        running=running,
        longest=longest,
        kv_bytes_per_token=kv_bytes_per_page(model, dtype, 1),
        working_bytes=engine_bytes(
            model,
            dtype,
            tokens=inputs.engine_tokens_per_step,
            running=running,
            longest=gathered,
        ),
        graph_bytes=GRAPH_BYTES if on_gpu else 0,
        buffer_bytes=fixed if on_gpu else 0,
        peer_bytes=engine_peer_bytes(inputs, dtype) if on_gpu else 0,
        page_tokens=page_tokens,
        host_slots=plan_num_slots(inputs.kv_host_bytes, page_bytes=page),
        own_weights=not inputs.shared_weights,
        part=inputs.engine_part,
    )


def engine_peer_bytes(inputs: PlanInputs, dtype: Dtype) -> int:
    """Return the memory of each rank of an engine that the others write their sums to."""
    if (part := inputs.engine_part) is None:
        return 0
    ranks = inputs.model.mlp_size // part.mlp_size  # what no layout pads or repeats
    width, item_bytes = part.hidden_size, ITEM_BYTES[dtype]
    return peer_bytes(ranks=ranks, rows=PEER_ROWS, width=width, item_bytes=item_bytes)


def kv_bytes_per_page(model: ModelNumbers, dtype: Dtype, page_tokens: int) -> int:
    return (
        2 * model.num_layers * model.num_kv_heads * model.head_dim * page_tokens * ITEM_BYTES[dtype]
    )


def engine_bytes(
    model: ModelNumbers, dtype: Dtype, *, tokens: int, running: int, longest: int
) -> int:
    """Return the bytes of one engine step: a layer's temporaries, gathered keys and values, float32
    logits of all running sequences, and truncation of some of them at a time. The C kernels' work
    area and logits on a CPU are less, up to 16 threads at least."""
    m, item = model, ITEM_BYTES[dtype]
    heads = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    layer = tokens * item * (4 * m.hidden_size + 2 * heads + 4 * m.mlp_size)
    gathered = 2 * running * longest * m.num_kv_heads * m.head_dim * item
    sampling = (3 * 4 * running + TRUNCATION_BYTES * min(running, TRUNCATION_ROWS)) * m.vocab_size
    return layer + gathered + sampling


def engine_buffer_bytes(
    inputs: PlanInputs, *, dtype: Dtype, page_tokens: int, max_running: int
) -> int:
    """Return what an engine on a GPU keeps from its start to its end, beside weights, pages and
    graphs. It stays in every phase: graphs have its addresses."""
    model = inputs.engine_part or inputs.model
    return buffer_bytes(
        max_running=max_running,
        token_budget=inputs.engine_tokens_per_step,
        pool_tokens=max_running * longest_sequence(inputs),
        page_tokens=page_tokens,
        context_tokens=model.context_tokens,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=inputs.model.vocab_size,
        logit_bytes=ITEM_BYTES[dtype],
        invariant=inputs.batch_invariant,
    )
