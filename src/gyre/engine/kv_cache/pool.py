"""KV pool: the pages of keys and values of all layers. In: sizes, a device. Out: pages to be
written and gathered."""

# T tokens, K kv heads, D head dim

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class KvPool:
    """KV pages of all layers. Page 0 stays zero. Its tensors keep their identity when the bytes
    move away."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_tokens: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        shape = (num_layers, num_pages + 1, 2, num_kv_heads, page_tokens, head_dim)
        self.tensor = zeros(shape, device=device, dtype=dtype)
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_tokens = page_tokens
        self._slots = [layer.view(-1, head_dim) for layer in self.tensor]  # rows that take writes
        # rows that are gathered
        self._planes = [layer.view(-1, page_tokens * head_dim) for layer in self.tensor]

    def layer(self, index: int) -> Tensor:
        """Return a layer's pages, [page, 2, K, page_tokens, D]."""
        return self.tensor[index]

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, write_2TK: Tensor) -> None:
        self._slots[layer].index_put_((write_2TK[0],), k_TKD)
        self._slots[layer].index_put_((write_2TK[1],), v_TKD)

    def gather(self, layer: int, gather: Tensor) -> Tensor:
        return self._planes[layer].index_select(0, gather)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole pages, all layers at once."""
        if not copies:
            return
        pairs = torch.tensor(copies, device=self.tensor.device)
        self.tensor.index_copy_(1, pairs[:, 1], self.tensor.index_select(1, pairs[:, 0]))

    def zero_pages(self, pages: np.ndarray) -> None:
        self.tensor.index_fill_(
            1, torch.tensor(pages, device=self.tensor.device, dtype=torch.int64), 0.0
        )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
