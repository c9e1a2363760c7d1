"""Engine weights: which version the engine runs, and how the next one comes in. In: manifests and
tensors. Out: a decoder whose weights are of one version whole.

Shared weights are the trainer's own storage: a version is a number, and no byte moves. One that
lies in shards over the ranks is gathered into the engine's storage at the commit, a bucket at a
time, and never exists a second time. Any other is staged beside the running one, verified, and
copied over it in one go. Addresses stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.records import Manifest
from gyre.memory.pools.cuda_vmm import is_present
from gyre.models.decoder import Decoder
from gyre.models.init import init_dummies
from gyre.weights.gather import ShardSource
from gyre.weights.transports.inprocess import shares_storage, stage, swap_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version that waits for its commit."""

    version: int
    staged: Mapping[str, Tensor] | None = None
    shards: ShardSource | None = None  # neither: the weights are shared


class EngineWeights:
    """The decoder's parameters, their version, and whether they are real or dummies."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        shared: bool,
        version: int,
        device: torch.device,
        emit: Emit,
    ) -> None:
        self.decoder, self.shared, self.version, self.emit = decoder, shared, version, emit
        self.is_dummy = False  # no work until a commit
        self._device = device
        self._prepared: Prepared | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}

    @property
    def present(self) -> bool:
        """Whether there are bytes under the parameters; whoever owns them may have parked them."""
        return is_present(self.decoder.embed.weight.untyped_storage())

    def forget(self) -> None:
        """Refuse work until a commit, whatever the weights hold."""
        self.is_dummy = True

    def make_dummy(self) -> None:
        """Refuse work until a commit. The engine's own weights become random; shared ones are not
        touched."""
        self.forget()
        if not self.shared:
            init_dummies(self.decoder)

    def prepare(self, manifest: Manifest, source: Mapping[str, Tensor]) -> None:
        """Receive a version beside the running one and verify it. A second call for the same
        version is a no-op."""
        if self._prepared is not None and self._prepared.version == manifest.version:
            return
        own = self.tensors
        if self.shared or manifest.shared:
            if not (self.shared and manifest.shared and shares_storage(source, own)):
                raise InputError(
                    f"version {manifest.version} is {'shared' if manifest.shared else 'a copy'}, "
                    "but the engine was "
                    f"built on {'shared weights' if self.shared else 'weights of its own'}"
                    + (
                        ""
                        if self.shared != manifest.shared
                        else ", and not on the tensors given here"
                    ),
                    hint="build engine and trainer on one decoder, or make the manifest with "
                    "shared=False and the engine with shared_weights=False",
                )
            self._prepared = Prepared(version=manifest.version)
            return
        if isinstance(source, ShardSource):
            self._check_shapes(
                {name: tuple(shape) for name, shape in source.layout.shapes.items()}, own
            )
            self._prepared = Prepared(version=manifest.version, shards=source)
            return
        self._check_fits(source, own)
        staged = stage(manifest, source, device=self._device, emit=self.emit)
        self._prepared = Prepared(version=manifest.version, staged=staged)

    def is_prepared(self, version: int) -> bool:
        return self._prepared is not None and self._prepared.version == version

    def commit(self, version: int) -> None:
        """Swap to the prepared version, whole. Shards are gathered now: every rank's engine must be
        at it. One that fails midway takes no work until another commit."""
        assert self._prepared is not None and self._prepared.version == version
        staged, shards = self._prepared.staged, self._prepared.shards
        if (staged is not None or shards is not None) and not self.present:
            raise InputError(
                f"version {version} cannot be committed: engine.weights is not on the device",
                hint="move engine.weights to the device first",
            )
        # while they are neither version
        self.is_dummy = self.is_dummy or staged is not None or shards is not None
        if staged is not None:
            swap_in(staged, self.tensors)
        if shards is not None:
            size_bytes = shards.gather_into(self.tensors)
            self.emit("weights.gathered", version=version, size_bytes=size_bytes)
        self.version, self.is_dummy, self._prepared = version, False, None

    def rollback(self) -> None:
        """Forget a prepared version and free what was staged."""
        self._prepared = None

    def _check_fits(self, source: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        self._check_shapes({name: tuple(tensor.shape) for name, tensor in source.items()}, own)
        self._refuse([name for name, tensor in own.items() if source[name].dtype != tensor.dtype])

    def _check_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Tensor]
    ) -> None:
        self._refuse(
            sorted(shapes.keys() ^ own.keys())
            or [name for name, tensor in own.items() if shapes[name] != tuple(tensor.shape)]
        )

    def _refuse(self, wrong: Sequence[str]) -> None:
        if wrong:
            raise InputError(
                f"{len(wrong)} tensors do not fit the engine's model (names, shapes and dtypes "
                "must agree): "
                f"{', '.join(wrong[:3])}",
                hint="publish weights of the same model and dtype as the engine was built with",
            )
