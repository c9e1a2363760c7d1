"""Names: the mapping between hub tensor names and ours. In: ModelSpec. Out: HubEntry rows, one per
hub tensor, each naming the rows of our (fused) parameter that it fills. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gyre.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEntry:
    """One tensor of the hub layout and its location in our parameters."""

    hub_name: str
    name: str  # our parameter
    row_start: int  # first row of our parameter that it fills
    row_stop: int  # one past the last
    shape: tuple[int, ...]  # of the hub tensor


def hub_entries(spec: ModelSpec) -> tuple[HubEntry, ...]:
    """Return the whole table. It names every row of every parameter exactly once."""
    shapes = spec.parameter_shapes()
    entries: list[HubEntry] = []

    def add(name: str, *parts: tuple[str, int]) -> None:
        start = 0
        for hub_name, rows in parts:
            entries.append(
                HubEntry(
                    hub_name=hub_name,
                    name=name,
                    row_start=start,
                    row_stop=start + rows,
                    shape=(rows, *shapes[name][1:]),
                )
            )
            start += rows
        assert start == shapes[name][0], name

    def whole(name: str, hub_name: str) -> None:
        add(name, (hub_name, shapes[name][0]))

    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    whole("embed.weight", "model.embed_tokens.weight")
    for i in range(spec.num_layers):
        ours, hub = f"layers.{i}.", f"model.layers.{i}."
        whole(ours + "attn_norm.weight", hub + "input_layernorm.weight")
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            attention = hub + "self_attn."
            add(
                ours + f"qkv.{kind}",
                (attention + f"q_proj.{kind}", q_rows),
                (attention + f"k_proj.{kind}", kv_rows),
                (attention + f"v_proj.{kind}", kv_rows),
            )
        if spec.qk_norm:
            whole(ours + "q_norm.weight", hub + "self_attn.q_norm.weight")
            whole(ours + "k_norm.weight", hub + "self_attn.k_norm.weight")
        whole(ours + "out.weight", hub + "self_attn.o_proj.weight")
        whole(ours + "mlp_norm.weight", hub + "post_attention_layernorm.weight")
        add(
            ours + "gate_up.weight",
            (hub + "mlp.gate_proj.weight", spec.mlp_size),
            (hub + "mlp.up_proj.weight", spec.mlp_size),
        )
        whole(ours + "down.weight", hub + "mlp.down_proj.weight")
    whole("final_norm.weight", "model.norm.weight")
    if not spec.tied:
        whole("head.weight", "lm_head.weight")
    return tuple(entries)
