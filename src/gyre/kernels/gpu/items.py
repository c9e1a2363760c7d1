"""Items of the attention kernels' work lists: two numbers in one int32. In: nothing. Out: where the second ends. No
Triton here, so that the host's side is tested without. Callers: decode_attention, prefill_attention, engine.gpu_layout.
"""

from __future__ import annotations

ITEM_BITS = 16  # low bits hold the piece or tile, high bits the sequence or chunk
