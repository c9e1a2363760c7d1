"""Load: checkpoints in hub layout to our decoder, and verification of an export. In: a folder or a
hub name. Out: (ModelSpec, Decoder). Every tensor of the checkpoint must be known, present and of
the right shape; errors name the tensor. The public entry of this package: `export_hub` and
`init_weights` are importable here."""

# T tokens, V vocabulary

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.errors import GyreError, InputError, SnapshotError
from gyre.core.files import read_json
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.export import checksum, export_hub, rows_of, save_scalar_head
from gyre.models.hub.files import (
    SCALAR_HEAD_TENSOR,
    open_file,
    open_tensors,
)
from gyre.models.hub.folders import CHECKSUMS_FILE, CONFIG_FILE, SCALAR_HEAD_FILE
from gyre.models.init import init_weights
from gyre.models.names import hub_entries
from gyre.models.spec import ModelSpec

__all__ = [
    "export_hub",
    "init_weights",
    "load_hub",
    "load_scalar_head",
    "save_scalar_head",
    "verify_export",
]
PROBE_TOKENS = 8  # of the text that a loaded model is compared on


def load_hub(
    folder_or_name: str | Path, *, device: torch.device, dtype: torch.dtype
) -> tuple[ModelSpec, Decoder]:
    """Return the model of a hub-layout folder, or of a hub name (downloaded or cached)."""
    with contextlib.closing(Checkpoint(folder_or_name)) as source:
        decoder = Decoder(source.spec, device=device, dtype=dtype)
        for name, parameter in decoder.named_parameters():
            source.read(name, 0, parameter.numel(), parameter.detach().view(-1))
        return source.spec, decoder


def load_scalar_head(folder: str | Path, *, device: torch.device) -> ScalarHead:
    """Return the scalar head saved beside a reward model or critic."""
    path = Path(folder) / SCALAR_HEAD_FILE
    if not path.is_file():
        raise InputError(
            f"{folder} has no {SCALAR_HEAD_FILE}, so it is no reward model or critic",
            hint='train one with objective.kind = "rm" and name its export folder',
        )
    with open_file(path) as file:
        if SCALAR_HEAD_TENSOR not in file.keys():  # noqa: SIM118  safe_open is no mapping
            raise InputError(f"{path} lacks the tensor {SCALAR_HEAD_TENSOR}")
        weight_1E = file.get_tensor(SCALAR_HEAD_TENSOR)
    if (
        not weight_1E.is_floating_point()
        or weight_1E.dim() not in (1, 2)
        or weight_1E.numel() != weight_1E.shape[-1]
    ):
        raise InputError(
            f"{path}: {SCALAR_HEAD_TENSOR} is {weight_1E.dtype} {list(weight_1E.shape)}; need one "
            "row of floats",
            hint="copy the folder again, or train the reward model again",
        )
    head = ScalarHead(weight_1E.shape[-1], device=device)
    with torch.no_grad():
        head.weight.copy_(weight_1E.view(1, -1))
    return head


@torch.no_grad()
def verify_export(folder: str | Path, decoder: Decoder) -> None:
    """Verify that `folder` holds `decoder`: names, shapes, checksums of the bytes on disk, one
    logit vector."""
    folder = Path(folder)
    try:
        sums = {str(k): str(v) for k, v in read_json(folder / CHECKSUMS_FILE).items()}
        dtype = getattr(torch, read_json(folder / CONFIG_FILE)["dtype"])
        _, loaded = load_hub(folder, device=decoder.device, dtype=decoder.dtype)
    except (GyreError, KeyError, AttributeError) as fault:
        raise SnapshotError(
            f"export {folder} does not load: {fault}", hint="export again"
        ) from fault
    ours = {
        entry.hub_name: checksum(rows_of(decoder, entry).to(dtype))
        for entry in hub_entries(decoder.spec)
    }
    on_disk = checksums_on_disk(folder)
    for what, got in (("recorded checksum", sums), ("content", on_disk)):
        wrong = sorted(name for name in ours | got if ours.get(name) != got.get(name))
        if wrong:
            raise SnapshotError(
                f"export {folder}: {what} of {', '.join(wrong[:4])} is not that of the model "
                f"({len(wrong)} tensors)",
                hint="the folder holds another version or is damaged; export again",
            )
    got_V, want_V = probe_logits(loaded), probe_logits(decoder)
    # Rounding the weights to a narrower dtype moves logits by about its step; a wrong layout moves
    # them by their size.
    tolerance = (
        0.0 if dtype == decoder.dtype else 16 * torch.finfo(dtype).eps * want_V.abs().max().item()
    )
    worst = (got_V - want_V).abs().max().item()
    if not worst <= tolerance:
        raise SnapshotError(
            f"export {folder}: logits differ by {worst:.3g}, at most {tolerance:.3g} is rounding"
        )


def checksums_on_disk(folder: Path) -> dict[str, str]:
    with ExitStack() as files:
        return {
            name: checksum(stored.read()) for name, stored in open_tensors(folder, files).items()
        }


def probe_logits(decoder: Decoder) -> Tensor:
    """Return the last logits_V of a fixed short text."""
    device = decoder.device
    num_tokens = min(PROBE_TOKENS, decoder.spec.context_tokens)
    tokens_T = (torch.arange(num_tokens, device=device) * 7919 + 1) % decoder.spec.vocab_size
    layout = PackedLayout.of([num_tokens], device)

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return varlen_attention(q_THD, k_TKD, v_TKD, layout, decoder.spec.window_of(layer))

    hidden_TE = decoder.hidden(tokens_T, layout.positions_T, attend)
    return decoder.logits(hidden_TE[-1:])[0].float()
