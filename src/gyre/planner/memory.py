"""Memory: predicted bytes of each component and of each phase's working memory. Pure arithmetic.

In: sizes of the models and batches. Out: ComponentPlans, bytes by phase. Callers: `planner.decide`. What a run really
holds is measured by `vram.manager`; the components agree to the byte (up to alignment), working memory is an estimate
from above, checked against saved tensors by a test.

Letters: E hidden, M MLP, H heads, K KV heads, D head size, V vocabulary, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.core.records import Checkpointing, Phase, Tier
from gyre.engine.config import plan_num_slots
from gyre.planner.plan import ComponentPlan, DeviceKind, Dtype, ModelNumbers, PlanInputs
from gyre.vram.config import Leave
from gyre.vram.phases import default_needs, leave_tiers, match_name

ITEM_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2}
LOGIT_ROWS = 1024  # rows of logits that exist at a time in the trainer, at most, where torch works on them
FUSED_LOGITS = 2**27  # logits that exist at a time where Triton kernels work on them and do not keep them
TRUNCATION_ROWS, TRUNCATION_BYTES = 64, 48  # as in engine.truncation: rows at a time, bytes per row and token


def kv_bytes_per_page(model: ModelNumbers, dtype: Dtype, page_tokens: int) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * page_tokens * ITEM_BYTES[dtype]


def activation_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    tokens: int,
    *,
    longest: int,
    device: DeviceKind,
    checkpointing: Checkpointing = "none",
) -> int:
    """What one chunk keeps for its backward pass, and the largest temporaries of that pass."""
    m, fused = model, device == "cuda" and dtype == "bfloat16"
    kept = layer_numbers(m, checkpointing, longest=longest, device=device, fused=fused)
    passing = 4 * m.mlp_size + 2 * m.hidden_size + 2 * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    if checkpointing != "none":
        # of the layer whose backward pass runs, what was not kept is there again
        passing += layer_numbers(m, "none", longest=longest, device=device, fused=fused)
    logits = logit_bytes(m, tokens, fused=fused, kept=checkpointing == "none")
    return tokens * ITEM_BYTES[dtype] * (m.num_layers * kept + passing) + logits


def layer_numbers(m: ModelNumbers, mode: Checkpointing, *, longest: int, device: DeviceKind, fused: bool) -> int:
    """Numbers per token that one layer keeps, from above: statistics and what torch's paths copy are in it.
    docs/training.md has the exact sums."""
    if mode == "full":
        return m.hidden_size
    q_size, qkv = m.num_heads * m.head_dim, (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    # Without kernels attention copies q, k and v and keeps its probabilities; on CUDA these never exist.
    copies = m.num_heads * longest if device == "cpu" else 0
    if mode == "selective":
        return 3 * m.hidden_size + qkv + 2 * q_size + copies + (qkv if device == "cpu" else 0)
    return 5 * m.hidden_size + 2 * qkv + 2 * q_size + (2 if fused else 4) * m.mlp_size + copies


def forward_bytes(model: ModelNumbers, dtype: Dtype, tokens: int, *, longest: int, device: DeviceKind) -> int:
    """A forward pass without a backward: one layer's temporaries at a time."""
    one_layer = ModelNumbers(**{**_as_dict(model), "num_layers": 1})
    return activation_bytes(one_layer, dtype, tokens, longest=longest, device=device, checkpointing="full")


def logit_bytes(model: ModelNumbers, rows: int, *, fused: bool, kept: bool) -> int:
    """The dearest of the head's paths. A truncated support goes by torch: float32 logits, softmax and gradient."""
    by_torch = 3 * 4 * min(rows, LOGIT_ROWS) * model.vocab_size
    whole = rows * model.vocab_size
    return max(by_torch, 2 * (whole if kept else min(whole, FUSED_LOGITS))) if fused else by_torch


def engine_bytes(model: ModelNumbers, dtype: Dtype, *, tokens: int, running: int, longest: int) -> int:
    """One engine step: a layer's temporaries, gathered keys and values, float32 logits of all running sequences, and
    truncation of some of them at a time. The C kernels' work area and logits on a CPU are less, up to 16
    threads at least."""
    m, item = model, ITEM_BYTES[dtype]
    heads = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    layer = tokens * item * (4 * m.hidden_size + 2 * heads + 4 * m.mlp_size)
    gathered = 2 * running * longest * m.num_kv_heads * m.head_dim * item
    sampling = (3 * 4 * running + TRUNCATION_BYTES * min(running, TRUNCATION_ROWS)) * m.vocab_size
    return layer + gathered + sampling


def working_bytes(
    inputs: PlanInputs, *, dtype: Dtype, device: DeviceKind, tokens_per_chunk: int, max_running: int
) -> dict[Phase, int]:
    """Device bytes beside the components, by phase."""
    model, longest = inputs.model, inputs.max_prompt_tokens + inputs.max_completion_tokens
    scored = [model] + ([inputs.reward_model] if inputs.reward_model is not None else [])
    score = max(forward_bytes(m, dtype, tokens_per_chunk, longest=longest, device=device) for m in scored)
    generate = engine_bytes(model, dtype, tokens=inputs.engine_tokens_per_step, running=max_running, longest=longest)
    return {
        "rollout": generate if inputs.online else 0,
        "score": score if inputs.online or inputs.reference else 0,
        "train": activation_bytes(
            model, dtype, tokens_per_chunk, longest=longest, device=device, checkpointing=inputs.checkpointing
        ),
        "handover": 0,
        "evaluate": generate if inputs.online else score,
    }


def predict_components(
    inputs: PlanInputs, *, dtype: Dtype, page_tokens: int, kv_pages: int
) -> tuple[ComponentPlan, ...]:
    """Bytes and places of each component that the run will have."""
    needs = default_needs(shared_weights=inputs.shared_weights)
    keeping: tuple[Tier, ...] = ("device", "host", "disk") if inputs.disk_tier else ("device", "host")
    rows: list[tuple[str, int, tuple[Tier, ...], str]] = []
    rows += _trained("actor", inputs.model, dtype, keeping)
    if inputs.critic:
        rows += _trained("critic", inputs.model, dtype, keeping)
    if inputs.reference:
        rows.append(("reference", *_weights(inputs.model, dtype, keeping)))
    if inputs.reward_model is not None:
        rows.append(("reward", *_weights(inputs.reward_model, dtype, keeping)))
    if inputs.online:
        if not inputs.shared_weights:
            rows.append(("engine.weights", *_weights(inputs.model, dtype, (*keeping, "none"))))
        page = kv_bytes_per_page(inputs.model, dtype, page_tokens)
        formula = f"({kv_pages} pages + 1 spare) × {page} bytes"
        rows.append(("engine.kv", (kv_pages + 1) * page, (*keeping, "none"), formula))
        if slots := plan_num_slots(inputs.kv_host_bytes, page_bytes=page):
            rows.append(("engine.kv_host", slots * page, ("host", "none"), f"{slots} slots × {page} bytes"))
    return tuple(_component(row, needs, inputs.leave) for row in rows)


def _trained(owner: str, model: ModelNumbers, dtype: Dtype, keeping: tuple[Tier, ...]) -> list:
    """Weights that are trained: float32 gradients and moments, and float32 masters beside lower-precision weights."""
    count = model.num_parameters
    rows = [
        (f"{owner}.params", *_weights(model, dtype, keeping)),
        (f"{owner}.grads", 4 * count, ("device", "none"), f"{count} × 4 bytes"),
        (f"{owner}.optimizer", 8 * count, keeping, f"{count} × 2 moments × 4 bytes"),
    ]
    if dtype != "float32":
        rows.append((f"{owner}.master", 4 * count, keeping, f"{count} × 4 bytes"))
    return rows


def _weights(model: ModelNumbers, dtype: Dtype, tiers: tuple[Tier, ...]) -> tuple[int, tuple[Tier, ...], str]:
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
        phases=need.phases,
        leave=leave_tiers(name, tiers, leave),
        formula=formula,
    )


def _as_dict(model: ModelNumbers) -> dict[str, int]:
    return {name: getattr(model, name) for name in ModelNumbers.__dataclass_fields__}
