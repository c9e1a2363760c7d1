"""Components: predicted bytes of each component and of each phase's working memory. Pure.

In: sizes of the models and batches. Out: ComponentPlans, bytes by phase. What a run really holds is
measured by `memory.manager`; the components agree to the byte (up to alignment), working memory is
an estimate from above, checked against saved tensors by a test.

Activations are counted tensor by tensor in `planner.memory_model.activations`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.core.records import Checkpointing, Matmul, Moments, Phase, Tier
from gyre.core.rounding import ceil_div
from gyre.engine.config import plan_num_slots
from gyre.engine.runners.gpu_work import buffer_bytes
from gyre.memory.config import Leave
from gyre.memory.phases import default_needs, leave_tiers, match_name, needing_phases
from gyre.planner.memory_model.activations import (
    ITEM_BYTES,
    again_bytes,
    forward_layer_bytes,
    head_backward_bytes,
    head_forward_bytes,
    layer_backward_bytes,
    saved_bytes,
)
from gyre.planner.memory_model.states import (
    CODED_BYTES,
    Layout,
    coded_parameters,
    device_staging_bytes,
    frozen_bytes,
    gathered_bytes,
    host_staging_bytes,
    layer_group_bytes,
    most_chunks,
    room_bytes,
    state_bytes,
    unsummed_bytes,
)
from gyre.planner.plan import (
    ComponentPlan,
    DeviceKind,
    Dtype,
    ModelNumbers,
    PlanInputs,
    Saving,
    Shards,
)
from gyre.trainer.adamw.blocks import BLOCK
from gyre.trainer.offload.slices import LAYER_ROOMS, SLOTS

BRIEF: tuple[Tier, ...] = ("device", "none")  # nothing to keep between steps
ROOMS = f"embedding, head and {LAYER_ROOMS} layers of weights on the host, on the device"
# two buckets, as in weights.gather, and what one rank of two sends of them
HANDOVER_BYTES = 3 * (256 << 20)
# as in engine.sampling.truncation: rows at a time, bytes per row and token
TRUNCATION_ROWS, TRUNCATION_BYTES = 64, 48


def kv_bytes_per_page(model: ModelNumbers, dtype: Dtype, page_tokens: int) -> int:
    return (
        2 * model.num_layers * model.num_kv_heads * model.head_dim * page_tokens * ITEM_BYTES[dtype]
    )


def activation_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    tokens: int,
    *,
    longest: int,
    saving: Saving,
    checkpointing: Checkpointing = "none",
    matmul: Matmul = "same",
) -> int:
    """Return what one chunk keeps for its backward pass, and the largest temporaries of that
    pass."""
    kept = saved_bytes(
        model, dtype, saving, checkpointing, tokens=tokens, targets=tokens, longest=longest
    )
    head = max(
        head_forward_bytes(model, saving, tokens), head_backward_bytes(model, dtype, saving, tokens)
    )
    again = again_bytes(model, dtype, saving, checkpointing, tokens, longest=longest)
    return kept + max(head, again + layer_backward_bytes(model, dtype, tokens, matmul))


def forward_bytes(
    model: ModelNumbers, dtype: Dtype, tokens: int, *, longest: int, saving: Saving
) -> int:
    """Return a forward pass without a backward: one layer's temporaries at a time."""
    layer = forward_layer_bytes(model, dtype, saving, tokens, longest=longest)
    return layer + head_forward_bytes(model, saving, tokens)


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
    model, longest = inputs.model, inputs.max_prompt_tokens + inputs.max_completion_tokens
    return buffer_bytes(
        max_running=max_running,
        token_budget=inputs.engine_tokens_per_step,
        pool_tokens=max_running * longest,
        page_tokens=page_tokens,
        context_tokens=model.context_tokens,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        logit_bytes=ITEM_BYTES[dtype],
        invariant=inputs.batch_invariant,
    )


def working_bytes(
    inputs: PlanInputs,
    *,
    dtype: Dtype,
    saving: Saving,
    tokens_per_chunk: int,
    page_tokens: int,
    max_running: int,
) -> dict[Phase, int]:
    """Device bytes beside the components, by phase; on a GPU with the engine's buffers, which stay
    in all of them."""
    model, longest = inputs.model, inputs.max_prompt_tokens + inputs.max_completion_tokens
    scored = [model] + ([inputs.reward_model] if inputs.reward_model is not None else [])
    score = max(
        forward_bytes(m, dtype, tokens_per_chunk, longest=longest, saving=saving) for m in scored
    )
    generate = engine_bytes(
        model, dtype, tokens=inputs.engine_tokens_per_step, running=max_running, longest=longest
    )
    kept = 0
    if inputs.online and saving in ("triton", "torch_cuda"):
        kept = engine_buffer_bytes(
            inputs, dtype=dtype, page_tokens=page_tokens, max_running=max_running
        )
    score += _gathered_to_score(inputs, dtype)
    own_weights = 0 if inputs.shared_weights else ITEM_BYTES[dtype] * model.num_parameters
    passing: dict[Phase, int] = {
        "rollout": generate if inputs.online else 0,
        "score": score if inputs.online or inputs.reference else 0,
        "train": activation_bytes(
            model,
            dtype,
            tokens_per_chunk,
            longest=longest,
            saving=saving,
            checkpointing=inputs.checkpointing,
            matmul=inputs.matmul,
        )
        + _gathered_to_train(inputs, dtype, tokens_per_chunk),
        # what a gather overwrites is kept until it is whole
        "handover": min(HANDOVER_BYTES, 2 * own_weights) + own_weights if inputs.online else 0,
        "evaluate": generate if inputs.online else score,
    }
    return {phase: size + kept for phase, size in passing.items()}


def _gathered_to_train(inputs: PlanInputs, dtype: Dtype, tokens_per_chunk: int) -> int:
    """Weights and gradients that FSDP2 makes whole for a while; of two models that are trained, one
    layer at a time. Whole gradients that wait for the end of an update are of both."""
    layouts = [
        _layout(inputs, owner) for owner in (("actor", "critic") if inputs.critic else ("actor",))
    ]
    given = inputs.model, dtype
    groups = [layer_group_bytes(*given, layout, inputs.matmul) for layout in layouts]
    longest = inputs.max_prompt_tokens + inputs.max_completion_tokens
    per_update = (
        inputs.sequences_per_update or inputs.prompts_per_step * inputs.completions_per_prompt
    )
    chunks = most_chunks(
        per_update * longest, longest=longest, ranks=inputs.ranks, tokens_per_chunk=tokens_per_chunk
    )
    waiting = sum(unsummed_bytes(inputs.model, layout, chunks) for layout in layouts)
    return (
        max(groups)
        + sum(gathered_bytes(*given, layout, inputs.matmul) for layout in layouts)
        + waiting
    )


def _gathered_to_score(inputs: PlanInputs, dtype: Dtype) -> int:
    """Return what the one model that runs has whole through the pass, and two of its layers."""
    found = [0]
    for owner in ("actor", "critic", "reference", "reward"):
        layout, model = (
            _layout(inputs, owner),
            inputs.reward_model if owner == "reward" else inputs.model,
        )
        if model is not None and layout.zero >= 2:
            layers = 2 * ITEM_BYTES[dtype] * model.layer_parameters
            found.append(gathered_bytes(model, dtype, layout, inputs.matmul) + layers)
    return max(found)


def staging_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    *,
    trained: int,
    reference: bool,
    average: bool,
    ranks: int,
    moments: Moments = "float32",
) -> int:
    """Host bytes per rank that background snapshots are staged in: float32 masters and both moments
    of each trained model, the reference, its average. Ranks share it evenly, whatever the
    layout."""
    coded = coded_parameters(model, moments)
    state = 12 * model.num_parameters - 8 * coded + CODED_BYTES * (coded // BLOCK)
    frozen = (ITEM_BYTES[dtype] if reference else 0) + (4 if reference and average else 0)
    return ceil_div(trained * state + frozen * model.num_parameters, ranks)


def predict_components(
    inputs: PlanInputs, *, dtype: Dtype, page_tokens: int, kv_pages: int, device: DeviceKind = "cpu"
) -> tuple[ComponentPlan, ...]:
    """Bytes and places of each component that the run will have."""
    needs = default_needs(shared_weights=inputs.shared_weights)
    keeping: tuple[Tier, ...] = (
        ("device", "host", "disk") if inputs.disk_tier else ("device", "host")
    )
    rows: list[tuple[str, int, tuple[Tier, ...], str]] = []
    rows += _trained("actor", inputs, dtype, device, keeping)
    if inputs.critic:
        rows += _trained("critic", inputs, dtype, device, keeping)
    if inputs.reference:
        rows += _frozen(inputs, "reference", inputs.model, dtype, keeping)
    if inputs.reward_model is not None:
        rows += _frozen(inputs, "reward", inputs.reward_model, dtype, keeping)
    if inputs.online:
        if not inputs.shared_weights:
            rows.append(("engine.weights", *_weights(inputs.model, dtype, (*keeping, "none"))))
        page = kv_bytes_per_page(inputs.model, dtype, page_tokens)
        formula = f"({kv_pages} pages + 1 spare) × {page} bytes"
        rows.append(("engine.kv", (kv_pages + 1) * page, (*keeping, "none"), formula))
        if slots := plan_num_slots(inputs.kv_host_bytes, page_bytes=page):
            rows.append(
                ("engine.kv_host", slots * page, ("host", "none"), f"{slots} slots × {page} bytes")
            )
    return tuple(_component(row, needs, inputs.leave) for row in rows)


def _trained(
    owner: str, inputs: PlanInputs, dtype: Dtype, device: DeviceKind, keeping: tuple[Tier, ...]
) -> list[tuple[str, int, tuple[Tier, ...], str]]:
    """Weights that are trained: float32 gradients and moments, and float32 masters beside
    lower-precision weights; what is offloaded, and the places through which it visits the
    device."""
    model, layout = inputs.model, _layout(inputs, owner)
    away: dict[str, tuple[Tier, ...]] = {"none": keeping, "host": ("host",), "disk": ("disk",)}
    state = away[inputs.offload_optimizer]
    weights: tuple[Tier, ...] = keeping if layout.holds_weights(owner) else ("host",)
    tiers = {"params": weights, "grads": ("host",) if inputs.offload_gradients else BRIEF}
    item, count = 4 if layout.zero >= 2 else ITEM_BYTES[dtype], model.num_parameters
    split = f" / {layout.shard_ranks} ranks" if layout.zero else ""
    each = {"params": f"{count} × {item}", "grads": f"{count} × 4", "master": f"{count} × 4"}
    each["optimizer"] = f"{count} × 2 moments × 4"
    if coded := coded_parameters(model, inputs.moments):
        each["optimizer"] = f"2 moments × ({count - coded} × 4 + {coded} × (1 + 4/{BLOCK}))"
    rows: list[tuple[str, int, tuple[Tier, ...], str]] = []
    for name, size_bytes in state_bytes(model, dtype, layout, owner).items():
        kind = name.rpartition(".")[2]
        whole = kind in tiers and layout.zero < 2
        formula = f"{each[kind]} bytes{'' if whole else split}"
        rows.append((name, size_bytes, tiers.get(kind, state), formula))
    if not layout.holds_weights(owner):
        rows.append((f"{owner}.rooms", room_bytes(model, dtype), BRIEF, ROOMS))
    if places := device_staging_bytes(model, dtype, layout, inputs.offload_cut_bytes, owner=owner):
        rows.append(
            (f"{owner}.staging", places, BRIEF, f"{SLOTS} cuts of offloaded state, on the device")
        )
    beside = host_staging_bytes(
        model, dtype, layout, inputs.offload_cut_bytes, owner=owner, device=device
    )
    if beside:
        rows.append(
            (
                f"{owner}.staging_host",
                beside,
                ("host",),
                "buffers between the device and what is offloaded",
            )
        )
    return rows


def _layout(inputs: PlanInputs, owner: str) -> Layout:
    """Return how a model is spread over the ranks. One that no ranks share is whole, whatever its
    ZeRO stage."""
    shards = inputs.shards.get(owner, Shards())
    return Layout(
        gpus=inputs.ranks,
        zero=shards.zero if shards.ranks > 1 else 0,
        shard_ranks=shards.ranks,
        checkpointing=inputs.checkpointing,
        tokens_per_chunk=0,
        offload_optimizer=inputs.offload_optimizer,
        offload_gradients=inputs.offload_gradients,
        offload_parameters=inputs.offload_parameters,
        moments=inputs.moments,
        sum_gradients=inputs.sum_gradients,
    )


def _frozen(
    inputs: PlanInputs, owner: str, model: ModelNumbers, dtype: Dtype, tiers: tuple[Tier, ...]
) -> list[tuple[str, int, tuple[Tier, ...], str]]:
    layout = _layout(inputs, owner)
    split = f" / {layout.shard_ranks} ranks" if layout.zero >= 2 else ""
    average = owner == "reference" and inputs.reference_average
    each = f"({ITEM_BYTES[dtype]} + 4 of the average)" if average else f"{ITEM_BYTES[dtype]}"
    formula = f"{model.num_parameters} × {each} bytes{split}"
    size_bytes = frozen_bytes(model, dtype, layout, average=average)
    if layout.holds_weights(owner):
        return [(owner, size_bytes, tiers, formula)]
    rooms = room_bytes(model, dtype)
    return [(owner, size_bytes, ("host",), formula), (f"{owner}.rooms", rooms, BRIEF, ROOMS)]


def _weights(
    model: ModelNumbers, dtype: Dtype, tiers: tuple[Tier, ...]
) -> tuple[int, tuple[Tier, ...], str]:
    item = ITEM_BYTES[dtype]
    return model.num_parameters * item, tiers, f"{model.num_parameters} × {item} bytes"


def _component(
    row: tuple[str, int, tuple[Tier, ...], str], needs: Mapping, leave: Mapping[str, Leave]
) -> ComponentPlan:
    name, size_bytes, tiers, formula = row
    need = match_name(needs, name)
    assert need is not None, name
    return ComponentPlan(
        name=name,
        size_bytes=size_bytes,
        tiers=tiers,
        phases=needing_phases(need, tiers),
        leave=leave_tiers(name, tiers, leave),
        formula=formula,
    )
