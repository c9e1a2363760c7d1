"""Layout: the table of a dense decoder over the ranks of the tensor axis. In: a ModelSpec, a number
of tensor ranks. Out: the spec of one rank's local model, which box of each parameter it is, and
whose gradient ranks have in parts. Pure.

    qkv, gate_up     rows of each fused part: whole heads, MLP rows. With fewer KV heads than ranks,
                     neighbors hold the same head, and the first of them owns it.
    out, down        columns
    embed, head      rows; the last ranks' are padded to equal numbers
    norms            whole on every rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gyre.core.errors import ConfigError
from gyre.core.rounding import ceil_div
from gyre.distributed.layout import Box, ModelLayout, joined
from gyre.models.spec import ModelSpec


def local_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the model that each tensor rank holds. ConfigError names what does not divide, and the
    numbers of ranks that do."""
    if (reason := find_uneven(spec, num_ranks)) is not None:
        fits = [n for n in range(1, spec.num_heads + 1) if find_uneven(spec, n) is None]
        raise ConfigError(
            f"{reason} over {num_ranks} tensor ranks",
            hint=f"this model takes {', '.join(map(str, fits))} tensor ranks",
        )
    return replace(
        spec,
        vocab_size=ceil_div(spec.vocab_size, num_ranks),
        num_heads=spec.num_heads // num_ranks,
        num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
        mlp_size=spec.mlp_size // num_ranks,
    )


def find_uneven(spec: ModelSpec, num_ranks: int) -> str | None:
    """Return what does not divide evenly over so many ranks, or None."""
    for what, count in (("attention heads", spec.num_heads), ("MLP columns", spec.mlp_size)):
        if count % num_ranks:
            return f"{count} {what} do not divide"
    if spec.num_kv_heads % num_ranks and num_ranks % spec.num_kv_heads:
        return f"{spec.num_kv_heads} KV heads neither divide nor repeat evenly"
    return None


def model_layout(
    spec: ModelSpec, num_ranks: int, *, sequence_parallel: bool = False
) -> ModelLayout:
    """Return the table of the model. Over one rank every box is a whole tensor."""
    shapes = spec.parameter_shapes()
    local_shapes = local_spec(spec, num_ranks).parameter_shapes()
    return ModelLayout(
        shapes=shapes,
        local_shapes=local_shapes,
        ranks=tuple(
            {
                name: joined(_boxes(spec, name, shapes[name], num_ranks=num_ranks, rank=rank))
                for name in shapes
            }
            for rank in range(num_ranks)
        ),
        partial=frozenset(
            name
            for name in shapes
            if num_ranks > 1 and _is_partial(name, sequence_parallel=sequence_parallel)
        ),
    )


def _is_partial(name: str, *, sequence_parallel: bool) -> bool:
    """Return whether a rank that holds the tensor has a part of its gradient: that of its own
    heads, or with sequence parallel, of a norm, that of its own rows."""
    of_heads = (".qkv.weight", ".qkv.bias", ".q_norm.weight", ".k_norm.weight")
    return name.endswith(of_heads) or (sequence_parallel and name.endswith("norm.weight"))


def _boxes(
    spec: ModelSpec, name: str, shape: tuple[int, ...], *, num_ranks: int, rank: int
) -> Iterator[Box]:
    """Yield the rank's boxes of one parameter, in the order of its local tensor."""
    if num_ranks > 1 and name.endswith((".out.weight", ".down.weight")):
        width = shape[1] // num_ranks
        columns = (rank * width, (rank + 1) * width)
        yield Box(start=0, rows=shape[0], at=0, columns=columns, owner=rank)
        return
    first, at = 0, 0
    for rows, copies in _parts(spec, name, shape[0], num_ranks):
        share = ceil_div(rows * copies, num_ranks)
        low = min(rows, rank // copies * share)
        held = min(rows, low + share) - low
        yield Box(start=first + low, rows=held, at=at, owner=rank // copies * copies)
        first, at = first + rows, at + share


def _parts(spec: ModelSpec, name: str, rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return (rows, how many neighbors hold the same share) of each part that is cut by itself."""
    if ".qkv." in name:
        heads, copies = spec.num_heads * spec.head_dim, max(1, num_ranks // spec.num_kv_heads)
        keys = (spec.num_kv_heads * spec.head_dim, copies)
        return [(heads, 1), keys, keys]
    if ".gate_up." in name:
        return [(spec.mlp_size, 1), (spec.mlp_size, 1)]
    if name in ("embed.weight", "head.weight"):
        return [(rows, 1)]
    return [(rows, num_ranks)]
