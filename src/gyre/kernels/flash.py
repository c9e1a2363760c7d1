"""Flash: attention of a training pass on a CUDA device, forward and backward, by external kernels.
In: q, k, v over packed tokens in BF16 or FP16, a PackedLayout. Out: attended values.

FlashAttention-4 is used where it is installed, supports the device and head dim, and agrees with
torch's kernel on a small pass. That is tested once per process and head shape. Torch's kernel
handles the rest, including sliding windows. Both read grouped keys directly. Both sum some
gradients in no fixed order, so two passes over the same batch differ by rounding. With torch they
are those of queries. With FlashAttention-4 they are those of keys and values that several query
heads share.
"""

# T packed tokens, H heads, K kv heads, D head dim

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.dispatch import why_too_old
from gyre.kernels.layout import PackedLayout

# tokens. Flash-attn-4 compiles other kernels, for seconds, where the bound is below its tiles
LEAST_BOUND = 512
PROBE_LENGTHS = (130, 1, 257)
PROBE_TOLERANCE = 2e-2  # of the norm of what is compared

if TYPE_CHECKING:
    from gyre.kernels.gpu.flash4 import TrainingFlash4


def flash_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    longest = max(layout.lengths)
    if window is None or window >= longest:
        flash4 = training_flash4(
            q_THD.device, q_THD.dtype, q_THD.shape[1] // k_TKD.shape[1], q_THD.shape[2]
        )
        if not isinstance(flash4, Unavailable):
            return flash4(q_THD, k_TKD, v_TKD, layout.offsets, max(longest, LEAST_BOUND))
    return TorchFlash.apply(q_THD, k_TKD, v_TKD, layout.offsets, longest, window)


class Broken(Unavailable):
    """An installed and supported kernel that failed its test."""


def choice(device: torch.device, dtype: torch.dtype, group: int, head_dim: int) -> dict[str, Any]:
    """Return the kernel for heads like these and the reason; `counted` if it replaces a broken
    one."""
    if (reason := why_too_old(device)) is not None:
        return {"kernel": "products and a softmax", "reason": reason, "counted": False}
    found = training_flash4(device, dtype, group, head_dim)
    if isinstance(found, Unavailable):
        return {"kernel": "torch", "reason": found.reason, "counted": isinstance(found, Broken)}
    return {
        "kernel": "flash-attn-4",
        "reason": "it is installed, fits, and agrees with torch's kernel",
    }


@functools.cache
def training_flash4(
    device: torch.device, dtype: torch.dtype, group: int, head_dim: int
) -> TrainingFlash4 | Unavailable:
    """Test the kernel on a few tokens, forward and backward, which also compiles it."""
    from gyre.kernels.gpu import flash4  # of no use without CUDA

    major = torch.cuda.get_device_capability(device)[0]
    if not flash4.is_installed():
        return Unavailable(reason="flash-attn-4 is not installed")
    if head_dim not in flash4.HEAD_DIMS or major not in flash4.TRAINING_CAPABILITIES:
        return Unavailable(
            reason=f"flash-attn-4 is not used for head dim {head_dim} on compute capability "
            f"{major}.x"
        )
    try:
        # A thread of its own has neither the grad mode nor the saved-tensor hooks of the pass that
        # asks.
        with ThreadPoolExecutor(1) as pool:
            attend = pool.submit(flash4.make_training_flash4).result()
            gap = pool.submit(_gap, attend, device, dtype, group, head_dim).result()
    except Exception as error:  # noqa: BLE001
        # whatever another package breaks in, torch's kernel serves
        return Broken(reason=f"flash-attn-4 failed: {type(error).__name__}: {str(error)[:200]}")
    if not gap <= PROBE_TOLERANCE:
        return Broken(reason=f"flash-attn-4 differs from torch's kernel by {gap:.3g} of the norm")
    return attend


def _gap(
    attend: TrainingFlash4, device: torch.device, dtype: torch.dtype, group: int, head_dim: int
) -> float:
    """Return the largest relative difference of its output and gradients from those of torch's
    kernel."""
    with torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)
        layout, tokens = PackedLayout.of(PROBE_LENGTHS, device), sum(PROBE_LENGTHS)

        def draw(heads: int) -> Tensor:
            return torch.randn(tokens, heads, head_dim, device=device, generator=generator).to(
                dtype
            )

        upstream, q_THD, k_TKD, v_TKD = draw(2 * group), draw(2 * group), draw(2), draw(2)
        inputs = [leaf.requires_grad_() for leaf in (q_THD, k_TKD, v_TKD)]
        bounds = layout.offsets, max(PROBE_LENGTHS)
        mine = attend(q_THD, k_TKD, v_TKD, *bounds)
        theirs = TorchFlash.apply(q_THD, k_TKD, v_TKD, *bounds, None)
        pairs = ([out, *torch.autograd.grad(out, inputs, upstream)] for out in (mine, theirs))
        return max(
            float((a - b).float().norm() / b.float().norm()) for a, b in zip(*pairs, strict=True)
        )


class TorchFlash(torch.autograd.Function):
    """Torch's variable-length kernel. `varlen_attn` of torch before 2.13 requires equal numbers of
    key and query heads; the underlying operators do not."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        offsets: Tensor,
        longest: int,
        window: int | None,
    ) -> Tensor:
        ctx.bounds, ctx.causal = (offsets, offsets, longest, longest), window is None
        ctx.window = {
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }
        out_THD, log_total, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, *ctx.bounds, 0.0, ctx.causal, False, **ctx.window
        )
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, log_total, random_state, unused)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *parts, random_state, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(),
            *parts,
            *ctx.bounds,
            0.0,
            ctx.causal,
            random_state,
            unused,
            **ctx.window,
        )
        return *found, None, None, None
