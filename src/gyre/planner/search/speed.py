"""Speed: predicted seconds of one optimizer update on one rank, to rank layouts by. Pure
arithmetic.

In: a Job, a Layout, a Gpu. Out: StepTime by cause, and the bytes that each rank sends. The share of
the data sheet that steps reach is a peer's measured one (`gpus.py`); what differs between layouts
is arithmetic: work done twice, bytes sent, bytes over the host link. bench/train.py measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.core.rounding import ceil_div
from gyre.memory.config import Residency
from gyre.planner.gpus import DISK_BYTES_PER_S, NETWORK_BYTES_PER_S, Gpu
from gyre.planner.memory_model.activations import ITEM_BYTES, block_columns
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import host_bytes_of
from gyre.planner.memory_model.states import (
    FLOAT,
    Layout,
    away_bytes,
    disk_state_bytes,
    head_parameters,
    layer_item_bytes,
    matrix_shapes,
    root_parameters,
    state_bytes,
)
from gyre.planner.search.exchanges import exchange_time, sent_by_tensor_ranks
from gyre.planner.search.generation import rollout_seconds
from gyre.trainer.offload.slices import LAYER_BUFFERS

HIDDEN_SHARE = 0.8  # of the compute time under which FSDP2's traffic can hide
# of one layer's forward and backward kernels, about 60 of 10 µs: small chunks wait for these
LAYER_LAUNCH_S = 0.6e-3
# read and written by AdamW per parameter of a shard, counted over trainer/optim/flat.py
UPDATE_BYTES = 60
COLLECTIVE_S = 40e-6  # to start one
# read and written per gathered parameter, out of the gathered buffer into the layer's tensors
COPY_BYTES = 4
SUM_BYTES = 10  # read and written per parameter to add a chunk's gradient to the float32 sum
LEAVE_BYTES = 8  # read and written per parameter to put a float32 sum where it is sent from
# Of the layers' products in 8 bits, casts included, where the data sheet says 2: torchtitan's 8B
# step on eight H200s is 12,218 against 9,515 tokens/s (survey, 1.1), with 79 % of its work in these
# products.
FP8_GAIN = 1.39
FLOAT32_SHARE = 1 / 15  # of the bfloat16 rate: no tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one update, by cause."""

    compute_s: float
    again_s: float  # work that is done twice
    traffic_s: float  # of collectives of data ranks, all of it
    exposed_s: float  # of these, not hidden by compute
    memory_s: float  # optimizer and gradient sums, bound by device memory
    host_s: float  # copies of offloaded state
    switch_s: float  # parking and waking between rollout and training, shared out over the updates
    exchange_s: float = 0.0  # of collectives of tensor ranks, all of it
    waited_s: float = 0.0  # of these, not hidden by compute
    rollout_s: float = 0.0  # completions, shared out over the updates that learn from them

    @property
    def seconds(self) -> float:
        return (
            self.compute_s
            + self.again_s
            + self.exposed_s
            + self.memory_s
            + self.host_s
            + self.switch_s
            + self.waited_s
            + self.rollout_s
        )


def chunks_per_update(job: TrainingJob, layout: Layout) -> int:
    """Return the chunks of each rank in an update."""
    return max(1, ceil_div(job.tokens_per_update, layout.data_ranks * layout.tokens_per_chunk))


def forward_flops(job: TrainingJob) -> tuple[float, float, float]:
    """Per token: (of the layers' products, of attention, of the head). Attention sees half of its
    sequence."""
    m = job.model
    products = 2 * m.num_layers * m.layer_parameters
    attention = 4 * m.num_layers * m.query_size * job.mean_tokens / 2
    return products, attention, 2 * m.embedding_parameters


def sent_bytes(job: TrainingJob, layout: Layout) -> dict[str, int]:
    """Bytes that each rank sends per update, by collective, with the ring factors (n - 1) / n. The
    gradient is reduced in float32, or by FSDP2 (ZeRO-2, 3) after each chunk in the compute dtype
    that it was found in. Weights are gathered in the compute dtype; under ZeRO-3 twice per chunk,
    embedding and head once. FSDP2 gathers layers in 8 bits where they are multiplied so. Groups of
    a hybrid are kept equal once per update. Tensor ranks share the model, and exchange rows."""
    chunks = chunks_per_update(job, layout)
    return _sent_by_data_ranks(job, layout, chunks) | sent_by_tensor_ranks(
        job, layout, chunks=chunks
    )


def _sent_by_data_ranks(job: TrainingJob, layout: Layout, chunks: int) -> dict[str, int]:
    count, root = (
        job.model.num_parameters * job.copies,
        job.copies * (root_parameters(job.model) + head_parameters(job.model)),
    )
    item = ITEM_BYTES[job.dtype]
    ring = (layout.shard_ranks - 1) / layout.shard_ranks
    if layout.data_ranks == 1:
        return {}
    if layout.zero == 0:
        return {"all-reduce": int(2 * (layout.data_ranks - 1) / layout.data_ranks * FLOAT * count)}
    reduced = ITEM_BYTES[job.dtype] * chunks if layout.zero >= 2 and not layout.sums_once else FLOAT
    layers = (layer_item_bytes(job.dtype, job.matmul) if layout.zero >= 2 else item) * (
        count - root
    )
    gathered = item * root + layers if layout.zero < 3 else chunks * (item * root + 2 * layers)
    sent = {"reduce-scatter": int(ring * reduced * count), "all-gather": int(ring * gathered)}
    if layout.hybrid:
        among = 2 * (layout.replicas - 1) / layout.replicas
        sent["all-reduce among groups"] = int(among * FLOAT * count / layout.shard_ranks)
    return sent


def step_time(
    job: TrainingJob, layout: Layout, gpu: Gpu, residency: Residency, running: int = 0
) -> StepTime:
    """Seconds of one update on one rank. `running` completions have KV pages in its engine."""
    tokens, chunks = job.tokens_per_update / layout.data_ranks, chunks_per_update(job, layout)
    rate = (gpu.bf16_flops or gpu.fp16_flops) * gpu.training_share
    rate *= FLOAT32_SHARE if job.dtype == "float32" else 1.0
    products, attention, head = (flops * tokens / rate * job.copies for flops in forward_flops(job))
    products /= FP8_GAIN if job.matmul == "fp8" else 1.0
    products *= _narrow(job, layout, rate, gpu)
    layers = products + attention
    compute = max(3 * (layers + head), chunks * job.model.num_layers * LAYER_LAUNCH_S)
    # selective makes it again
    gate_up = 2 * job.model.hidden_size * job.model.mlp_size / job.model.layer_parameters
    again = {"none": 0.0, "selective": gate_up * products, "full": layers}[layout.checkpointing]
    keeps_logits = job.saving == "triton" and layout.checkpointing == "none"
    if (
        not keeps_logits
        and block_columns(job.saving, layout.tokens_per_chunk) < job.model.vocab_size
    ):
        again += head  # log-probs by blocks make each block's logits twice
    traffic = sum(
        size / _link_rate(name, layout, gpu)
        for name, size in _sent_by_data_ranks(job, layout, chunks).items()
    )
    gathers, scatters = (
        {0: 0, 1: 0, 2: 1, 3: 2 * chunks}[layout.zero],
        1 if layout.sums_once else chunks,
    )
    traffic += (
        COLLECTIVE_S * job.model.num_layers * job.copies * (gathers + scatters if gathers else 0)
    )
    per_parameter = UPDATE_BYTES / layout.shard_ranks + chunks * SUM_BYTES + gathers * COPY_BYTES
    per_parameter += LEAVE_BYTES if layout.sums_once and chunks > 1 else 0
    memory = job.model.num_parameters * job.copies * per_parameter / gpu.hbm_bytes_per_s
    exchanges = exchange_time(job, layout, gpu, chunks=chunks, products_s=products)
    rollouts = rollout_seconds(job, gpu, running=running, tensor_ranks=layout.engine_tensor_ranks)
    return StepTime(
        compute_s=compute,
        again_s=again,
        traffic_s=traffic,
        exposed_s=_exposed_seconds(job, layout, gpu, traffic, compute / chunks),
        memory_s=memory,
        host_s=_host_seconds(job, layout, gpu, chunks)
        + _weights_seconds(job, layout, gpu, chunks, compute),
        switch_s=_switch_seconds(job, layout, gpu, residency),
        exchange_s=exchanges.all_s,
        waited_s=exchanges.waited_s,
        rollout_s=rollouts / job.updates_per_step,
    )


def _narrow(job: TrainingJob, layout: Layout, rate: float, gpu: Gpu) -> float:
    """Return how many times longer the products of a rank's part take, where some are so narrow
    that they wait for memory. At 6,144 of 12,288 MLP columns none is: they were as fast as whole
    ones (775 against 734 TFLOP/s, train_2x_..._tensor2.json and train_1x_..._16layers.json)."""
    if layout.tensor_ranks == 1:
        return 1.0
    rows, item = layout.tokens_per_chunk, ITEM_BYTES[job.dtype]
    arithmetic_s = longer_s = 0.0
    for outputs, inputs in matrix_shapes(job.model):
        flops_s = 2 * rows * outputs * inputs / rate
        moved = item * (rows * (outputs + inputs) + outputs * inputs)
        arithmetic_s += flops_s
        longer_s += max(flops_s, moved / gpu.hbm_bytes_per_s)
    return longer_s / arithmetic_s


def _exposed_seconds(
    job: TrainingJob, layout: Layout, gpu: Gpu, traffic_s: float, chunk_s: float
) -> float:
    """Return the seconds of collectives that FSDP2 cannot hide. Gradients that are summed once have
    one chunk to hide under."""
    if layout.zero < 2:
        return traffic_s
    exposed = max(0.0, traffic_s - HIDDEN_SHARE * chunk_s * chunks_per_update(job, layout))
    if not layout.sums_once:
        return exposed
    sent = _sent_by_data_ranks(job, layout, chunks_per_update(job, layout))
    scatter = sent.get("reduce-scatter", 0) / _link_rate("reduce-scatter", layout, gpu)
    return max(exposed, scatter - HIDDEN_SHARE * chunk_s)


def _link_rate(collective: str, layout: Layout, gpu: Gpu) -> float:
    """Return the rate of the slowest link that the collective's group crosses. Its ranks are as far
    apart as there are tensor ranks."""
    group = layout.data_ranks if layout.zero == 0 or "among" in collective else layout.shard_ranks
    inside = group * layout.tensor_ranks <= gpu.gpus_per_host
    return gpu.collective_bytes_per_s if inside else NETWORK_BYTES_PER_S


def _host_seconds(job: TrainingJob, layout: Layout, gpu: Gpu, chunks: int) -> float:
    """Optimizer state there and back once per update, both ways at once; what is in a file waits
    for the disk, which a host's GPUs share. Gradients go as often as they are summed, once there
    and back to be summed over flat ranks, and come for the update."""
    states = state_bytes(job.model, job.dtype, layout)
    away, on_disk = away_bytes(states, layout), sum(disk_state_bytes(states, layout).values())
    state = sum(size for name, size in away.items() if not name.endswith(".grads"))
    item = FLOAT if layout.zero >= 2 else ITEM_BYTES[job.dtype]
    sums = away.get("actor.grads", 0)
    passes = (
        (1 if layout.sums_once else chunks) * item / FLOAT
        + (2 if layout.data_ranks > 1 and (layout.zero < 2 or layout.hybrid) else 0)
        + 1
    )
    busy = min(layout.gpus, gpu.gpus_per_host)
    seconds = max(
        state / gpu.host_copy_bytes_per_s(layout.gpus), 2 * on_disk * busy / DISK_BYTES_PER_S
    )
    return job.copies * (seconds + passes * sums / gpu.host_copy_bytes_per_s(layout.gpus))


def _weights_seconds(
    job: TrainingJob, layout: Layout, gpu: Gpu, chunks: int, compute_s: float
) -> float:
    """Weights on the host come twice per chunk, but for the layers at which it turns, beside the
    computation; what is outside the layers comes once per update, and new weights leave with the
    state that they are made of."""
    away, m = (
        [owner for owner in ("actor", "critic")[: job.copies] if not layout.holds_weights(owner)],
        job.model,
    )
    layers = (
        ITEM_BYTES[job.dtype] * m.layer_parameters * (m.num_layers - LAYER_BUFFERS) * 2 * chunks
    )
    rate = gpu.host_copy_bytes_per_s(layout.gpus)
    around = ITEM_BYTES[job.dtype] * (root_parameters(m) + head_parameters(m)) / rate
    return len(away) * around + max(0.0, len(away) * layers / rate - compute_s)


def _switch_seconds(job: TrainingJob, layout: Layout, gpu: Gpu, residency: Residency) -> float:
    if residency == "resident" or job.engine is None:
        return 0.0
    moved = host_bytes_of(job, layout, residency) - host_bytes_of(job, layout, "resident")
    return 2 * moved / gpu.host_copy_bytes_per_s(layout.gpus) / job.updates_per_step
