"""Activations: the bytes that one chunk keeps for its backward pass, tensor by tensor, and the
largest temporaries of the passes. Pure arithmetic.

In: sizes of the model, dtype, tokens, where the layers run. Out: bytes. Each row of `kept_by_layer`
is a tensor that models/layers/blocks.py, heads.py or attention.py saves, under the name that it has
there; a test compares the sums with what autograd really saves.

Of a model whose rows tensor ranks split, the residual stream and its norms are of a rank's own
rows. Products and their gradients are of all, which a rank has while it needs them.

Letters: E hidden, M MLP, H heads, K KV heads, D head size; A = H·D, R = A + 2·K·D rows of q|k|v;
V vocabulary, T tokens of a chunk, N targets among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.core.records import Checkpointing, Matmul
from gyre.core.rounding import ceil_div
from gyre.planner.plan import Dtype, ModelNumbers, Saving

ITEM_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
STATISTIC = 4  # bytes of a float32 number per row: rstd of a norm, log Σ exp of attention
INDEX = 8  # bytes of an int64

BLOCK_LOGITS, FUSED_BLOCK_LOGITS = 2**24, 2**27  # as in kernels.logprobs: by torch, by Triton
FEWEST_COLUMNS, WHOLE_COLUMNS = 1024, 128  # as in kernels.logprobs
QUERY_BLOCK, KEEP_TOKENS = 128, 256  # as in kernels.layout

# What selective checkpointing makes again: everything but the inputs of the products that are dear,
# and attention.
MADE_AGAIN = (
    "normed_TE",
    "attention.qk",
    "mlp.normed_TE",
    "mlp.gate_up_T2M",
    "mlp.activated_TM",
    "mlp.product_TM",
)


def kept_by_layer(
    model: ModelNumbers, dtype: Dtype, saving: Saving, *, longest: int
) -> dict[str, int]:
    """Bytes per token of each tensor that one layer keeps when nothing is computed again."""
    item, m = ITEM_BYTES[dtype], model
    row, statistic = ceil_div(item * m.hidden_size, m.row_ranks), ceil_div(STATISTIC, m.row_ranks)
    query, kv, mlp = m.query_size, m.kv_size, m.mlp_size
    kept = {
        "x_TE": row,
        "normed_TE": row,
        "rstd_T1": statistic,
        "qkv_TR": item * (query + 2 * kv),
        "rstd_TJ1": STATISTIC * (m.num_heads + m.num_kv_heads) if m.qk_norm else 0,
        "attended_TA": item * query,
        "mlp.middle_TE": row,
        "mlp.normed_TE": row,
        "mlp.rstd_T1": statistic,
        "mlp.gate_up_T2M": item * 2 * mlp,
    }
    if saving != "triton":  # it makes the product again as it goes
        kept["mlp.product_TM"] = item * mlp
    if saving in ("torch_cuda", "torch_cpu"):
        kept["mlp.activated_TM"] = item * mlp
    return kept | _kept_by_attention(model, item, saving, longest)


def _kept_by_attention(m: ModelNumbers, item: int, saving: Saving, longest: int) -> dict[str, int]:
    """Return what attention keeps beside its output, which the next block keeps, and v, which is in
    qkv_TR."""
    turned = {"attention.qk": item * (m.query_size + m.kv_size)}
    if saving == "torch_cpu":
        copies = {"attention.q_k_v": item * (m.query_size + 2 * m.kv_size)}
        return copies | {"attention.probabilities": item * m.num_heads * _scores_per_token(longest)}
    return turned | {"attention.log_total": STATISTIC * m.num_heads}


def _scores_per_token(length: int) -> int:
    """Probabilities per head and token that a padded bucket of this length keeps, by blocks of
    queries."""
    if length > KEEP_TOKENS:
        return 0
    blocks = ceil_div(length, QUERY_BLOCK)
    size = ceil_div(length, blocks)
    stops = [min(start + size, length) for start in range(0, length, size)]
    return (
        sum((stop - start) * stop for start, stop in zip([0, *stops], stops, strict=False))
        // length
    )


def layer_bytes(
    model: ModelNumbers, dtype: Dtype, saving: Saving, checkpointing: Checkpointing, *, longest: int
) -> int:
    """Bytes per token that one layer keeps between its forward and its backward pass."""
    kept = kept_by_layer(model, dtype, saving, longest=longest)
    if checkpointing == "full":
        return kept["x_TE"]
    again = MADE_AGAIN if checkpointing == "selective" else ()
    return sum(size for name, size in kept.items() if name not in again)


def saved_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    saving: Saving,
    checkpointing: Checkpointing,
    *,
    tokens: int,
    targets: int,
    longest: int,
) -> int:
    """Return what a chunk keeps, from the embedding to the log-probs. The last layer continues with
    the targets' rows only, unless every token is one."""
    item, m = ITEM_BYTES[dtype], model
    kept = kept_by_layer(model, dtype, saving, longest=longest)
    per_token = layer_bytes(model, dtype, saving, checkpointing, longest=longest)
    total = (m.num_layers - 1) * tokens * per_token
    total += tokens * per_token
    if checkpointing != "full" and targets < tokens:
        again = MADE_AGAIN if checkpointing == "selective" else ()
        mlp = sum(
            size for name, size in kept.items() if name.startswith("mlp.") and name not in again
        )
        total -= (tokens - targets) * mlp
        # which attention keeps of every token
        output = 0 if saving == "torch_cpu" else tokens * kept["attended_TA"]
        total += targets * (kept["attended_TA"] + INDEX) + output - tokens * kept["attended_TA"]
    tables = tokens * (INDEX + 2 * m.head_dim * item)  # token ids; cos and sin of the positions
    return total + tables + targets * _head_row_bytes(m, item, saving, checkpointing, targets)


def _head_row_bytes(
    m: ModelNumbers, item: int, saving: Saving, checkpointing: Checkpointing, targets: int
) -> int:
    """Return the bytes of final norm and log-probs: its rows before and after, which every rank
    has, statistics, the target. By torch also probabilities where the vocabulary is one block and
    not of several ranks; by Triton logits of one block, or where nothing is made again."""
    row = (
        item * m.hidden_size
        + ceil_div(item * m.hidden_size, m.row_ranks)
        + STATISTIC
        + INDEX
        + 3 * STATISTIC
    )
    fused = saving == "triton"
    keeps = (fused and checkpointing == "none") or (
        block_columns(saving, targets) >= m.vocab_size and (fused or m.row_ranks == 1)
    )
    return row + (item * m.vocab_size if keeps else 0)


def block_columns(saving: Saving, rows: int) -> int:
    """Columns of a vocabulary block, before the vocabulary ends."""
    most = FUSED_BLOCK_LOGITS if saving == "triton" else BLOCK_LOGITS
    return max(FEWEST_COLUMNS, most // max(1, rows) // WHOLE_COLUMNS * WHOLE_COLUMNS)


def head_forward_bytes(model: ModelNumbers, saving: Saving, targets: int) -> int:
    """Temporaries of the log-probs' forward pass. By Triton: two blocks of logits. By torch: logits
    in the compute dtype and in float32, beside the block before's logits and probabilities."""
    block = targets * min(model.vocab_size, block_columns(saving, targets))
    return (4 if saving == "triton" else 14) * block


def head_backward_bytes(model: ModelNumbers, dtype: Dtype, saving: Saving, targets: int) -> int:
    """Temporaries of the log-probs' backward pass: the head's gradient whole, the hidden rows'
    gradient in float32 with a block's part of it, and two blocks as in the forward pass."""
    item = ITEM_BYTES[dtype]
    rows = targets * model.hidden_size * (4 + 4 + item)
    return item * model.embedding_parameters + rows + head_forward_bytes(model, saving, targets)


def layer_backward_bytes(
    model: ModelNumbers, dtype: Dtype, tokens: int, matmul: Matmul = "same"
) -> int:
    """Temporaries of the backward pass behind attention, at the widest of its three wide places:
    the gated product; the norm, with the MLP's gradients; the output projection, with all of this
    half's gradients. With matmul "fp8" also 8-bit copies: the gradient of gate and up twice, the
    rows that they come from, the weight."""
    item, m = ITEM_BYTES[dtype], model
    mlp, out = 3 * m.hidden_size * m.mlp_size, m.hidden_size * m.query_size
    own = ceil_div(m.hidden_size, m.row_ranks)  # of a row, on average
    on_their_way = m.hidden_size if m.row_ranks > 1 else 0  # normed rows of all ranks
    own_too = own if m.row_ranks > 1 else 0
    rounded = (
        tokens * (4 * m.mlp_size + m.hidden_size) + 2 * m.hidden_size * m.mlp_size
        if matmul == "fp8"
        else 0
    )
    return rounded + item * max(
        tokens * (m.hidden_size + on_their_way + own_too + 3 * m.mlp_size),
        tokens * (2 * m.hidden_size + own + own_too + 2 * m.mlp_size) + mlp,
        tokens * (m.hidden_size + own + 2 * m.mlp_size + m.query_size) + mlp + out,
    )


def again_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    saving: Saving,
    checkpointing: Checkpointing,
    tokens: int,
    *,
    longest: int,
) -> int:
    """Return what the layer whose backward pass runs has made again, behind attention where that is
    widest."""
    kept = kept_by_layer(model, dtype, saving, longest=longest)
    if checkpointing == "none":
        return 0
    if checkpointing == "full":
        return tokens * (sum(kept.values()) - kept["x_TE"])
    return tokens * sum(
        size for name, size in kept.items() if name in MADE_AGAIN and name.startswith("mlp.")
    )


def forward_layer_bytes(
    model: ModelNumbers, dtype: Dtype, saving: Saving, tokens: int, *, longest: int
) -> int:
    """Return the bytes of one layer of a pass without a backward one."""
    kept = sum(kept_by_layer(model, dtype, saving, longest=longest).values())
    return tokens * (kept + (ITEM_BYTES[dtype] * model.hidden_size if model.row_ranks > 1 else 0))
