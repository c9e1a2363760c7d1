"""Learner: one model that is trained (actor, critic or reward model) with its optimiser state and memory components.
In: a Decoder, maybe a ScalarHead. Out: updated weights, named tensors, storage pools. Caller: trainer.native.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.core.records import Checkpointing, Tier
from gyre.models.decoder import Decoder
from gyre.models.heads import ScalarHead
from gyre.trainer.config import TrainerConfig
from gyre.trainer.optim import FlatOptimizer
from gyre.vram.pools import StoragePool
from gyre.vram.virtual import find_driver

HEAD_PREFIX = "scalar_head."


class Learner:
    """Decoder, scalar head (or None) and optimiser under one name, which prefixes components and snapshot keys."""

    def __init__(self, name: str, decoder: Decoder, head: ScalarHead | None, config: TrainerConfig) -> None:
        self.name, self.decoder, self.head = name, decoder, head
        self.checkpointing: Checkpointing = config.checkpointing
        parameters = dict(decoder.named_parameters())
        if head is not None:
            parameters |= {HEAD_PREFIX + key: parameter for key, parameter in head.named_parameters()}
        self.optimizer = FlatOptimizer(parameters, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def pools(self, folder: Path | None) -> list[StoragePool]:
        """One pool per component. With float32 weights the master is the compute weights and has no pool of its own.
        The compute weights keep their addresses: an engine that shares them has captured those in graphs."""
        optimizer, device = self.optimizer, self.decoder.device
        contents: dict[str, Mapping[str, Tensor]] = {
            "params": optimizer.compute_tensors(),
            "grads": {"grad": optimizer.grad_N},
            "optimizer": {"exp_avg": optimizer.exp_avg_N, "exp_avg_sq": optimizer.exp_avg_sq_N},
        }
        if not optimizer.master_is_compute:
            contents["master"] = {"master": optimizer.master_N}
        tiers: dict[str, tuple[Tier, ...]] = {"grads": ("device", "none")}  # zero between steps: nothing to keep
        return [
            StoragePool(
                f"{self.name}.{kind}",
                tensors,
                tiers=tiers.get(kind, ("device", "host", "disk")),
                folder=folder,
                device=device,
                driver=find_driver(device) if kind == "params" else None,
            )
            for kind, tensors in contents.items()
        ]

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a snapshot holds, by the component that it lives in. Gradients don't outlive a step."""
        optimizer = self.optimizer
        weights = "params" if optimizer.master_is_compute else "master"
        moments = {"exp_avg": optimizer.exp_avg_N, "exp_avg_sq": optimizer.exp_avg_sq_N}
        return {
            f"{self.name}.{weights}": {f"{self.name}.master.{k}": t.detach() for k, t in optimizer.masters().items()},
            f"{self.name}.optimizer": {f"{self.name}.optimizer.{key}": tensor for key, tensor in moments.items()},
        }

    def restore(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Copy a snapshot's tensors in, in place."""
        for parts in self.state_tensors().values():
            copy_in(parts, tensors)
        self.optimizer.num_updates = num_updates
        self.optimizer.zero_grad()
        self.optimizer.refresh_compute()


@torch.no_grad()
def copy_in(destination: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Overwrite tensors by those of the same name; all are checked before the first is written."""
    for name, tensor in destination.items():
        if name not in source or source[name].shape != tensor.shape or source[name].dtype != tensor.dtype:
            got = f"{source[name].dtype} {tuple(source[name].shape)}" if name in source else "nothing"
            raise SnapshotError(
                f"the snapshot holds {got} for {name}, this run needs {tensor.dtype} {tuple(tensor.shape)}",
                hint="resume with the config that the run was started with",
            )
    for name, tensor in destination.items():
        tensor.copy_(source[name])
