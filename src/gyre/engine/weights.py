"""Engine weights: which version the engine runs, and how the next one comes in. In: offers. Out: a
decoder whose weights are of one version whole.

`weights.receive` decides how the numbers come, `weights.swap` moves them and puts them back. A
commit that fails leaves the last version serving, to the bit. Addresses stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.memory.pools.cuda_vmm import is_present
from gyre.models.decoder import Decoder
from gyre.models.init import init_dummies
from gyre.weights.receive import receive
from gyre.weights.swap import Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version that waits for its commit."""

    version: int
    swap: Swap


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

    def prepare(self, offer: Offer) -> None:
        """Receive a version beside the running one and verify it. A second call for the same
        version is a no-op."""
        if self.is_prepared(offer.version):
            return
        swap = receive(offer, self.tensors, shared=self.shared, device=self._device, emit=self.emit)
        self._prepared = Prepared(version=offer.version, swap=swap)

    def is_prepared(self, version: int) -> bool:
        return self._prepared is not None and self._prepared.version == version

    def commit(self, version: int) -> None:
        """Swap to the prepared version. Shards are gathered now: every rank's engine must be at
        it."""
        with self.swapping(version):
            pass

    @contextmanager
    def swapping(self, version: int) -> Iterator[None]:
        """Swap to the prepared version, whole, and keep it if the block ends well. After any error
        the last version is there as it was, and the prepared one waits for another commit."""
        assert self._prepared is not None and self._prepared.version == version
        swap, last = self._prepared.swap, (self.version, self.is_dummy)
        if swap.moves_bytes and not self.present:
            raise InputError(
                f"version {version} cannot be committed: engine.weights is not on the device",
                hint="move engine.weights to the device first",
            )
        try:
            swap.run()
            self.version, self.is_dummy = version, False
            yield
        except BaseException:
            self._undo(swap, last)
            raise
        swap.settle()
        self._prepared = None

    def rollback(self) -> None:
        """Forget a prepared version and free what was staged."""
        self._prepared = None

    def _undo(self, swap: Swap, last: tuple[int, bool]) -> None:
        """Put the last version back. Where even that fails the weights are neither version: no work
        until another commit."""
        version, self.is_dummy = self.version, True
        swap.undo()
        self.version, self.is_dummy = last
        self.emit("weights.commit_failed", version=version, serving=self.version)
