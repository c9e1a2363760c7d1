"""Engine weights: which version the engine runs, and how the next one comes in. In: offers. Out: a
decoder whose weights are of one version whole.

`weights.receive` decides how the numbers come, `weights.swap` moves them and puts them back. A
commit that fails leaves the last version serving, to the bit. Addresses stay. Tensor ranks take
their parts together: all have a version, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.offers import Offer, SourceKind, kinds_for
from gyre.memory.pools.cuda_vmm import is_present
from gyre.models.decoder import Decoder
from gyre.models.hub.verified import open_verified
from gyre.models.init import init_dummies
from gyre.models.layout import model_layout
from gyre.weights.protocol import (
    Lost,
    Prepared,
    ReceiverState,
    RolledBack,
    SwapBegan,
    SwapDone,
    SwapFailed,
)
from gyre.weights.receive import receive
from gyre.weights.swap import Swap
from gyre.weights.tensor_part import TensorPart
from gyre.weights.tensor_source import TensorSource
from gyre.weights.transports.opened import PartOpener, Reading


def part_of(decoder: Decoder) -> TensorPart | None:
    """Return what a decoder is of the whole model; None where it is all of it."""
    if (tensor := decoder.tensor) is None:
        return None
    return TensorPart(table=model_layout(decoder.whole_spec, tensor.group.size), group=tensor.group)


@torch.no_grad()
def read_weights(decoder: Decoder, source: TensorSource) -> None:
    """Fill a decoder from whole tensors. A tensor rank reads its own numbers alone."""
    part = part_of(decoder)
    own = source if part is None else part.cut(source)
    for name, parameter in decoder.named_parameters():
        own.read(name, 0, parameter.numel(), parameter.detach().view(-1))


class EngineWeights:
    """The decoder's parameters, their version, and whether they are real or dummies."""

    def __init__(
        self, decoder: Decoder, *, shared: bool, version: int, device: torch.device, emit: Emit
    ) -> None:
        self.decoder = decoder
        self.shared = shared
        self.emit = emit
        self.state = ReceiverState(version=version)
        self._device = device
        self._held = part_of(decoder)
        self.swap: Swap | None = None  # of the prepared version
        self._parts = PartOpener(pin=device.type == "cuda", emit=emit)

    @property
    def version(self) -> int:
        """Return the newest version that was here whole."""
        return self.state.version

    @property
    def is_dummy(self) -> bool:
        """Return whether the numbers are of no version: no work until a commit. What comes in the
        middle of a swap waits for it on the compute thread."""
        return not self.state.is_whole

    @property
    def sources(self) -> tuple[SourceKind, ...]:
        """Return the kinds of offers that can be taken."""
        reads_part = self._held is not None and not self.shared
        return kinds_for(shared=self.shared, reads_part=reads_part)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}

    @property
    def present(self) -> bool:
        """Return whether there are bytes under the parameters; their owner may have parked them."""
        return is_present(self.decoder.embed.weight.untyped_storage())

    def read_parts(self, reading: Reading) -> None:
        """Say how registered versions are read, if not from this host's shared memory alone."""
        self._parts.close()
        given = replace(reading, pin=self._device.type == "cuda", device=self._device)
        self._parts = PartOpener(given, emit=self.emit)

    def forget(self) -> None:
        """Refuse work until a commit, whatever the weights hold."""
        self.state = self.state.after(Lost())

    def make_dummy(self) -> None:
        """Refuse work until a commit. The engine's own weights become random; shared ones are not
        touched."""
        self.forget()
        if not self.shared:
            init_dummies(self.decoder)

    def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        """Check a version, and stage or open it. A second call for the same version is a no-op;
        another that was prepared is given up first. InputError for one of an older publisher,
        unless it is the last version and `reverts`. All tensor ranks call it."""
        prepared = Prepared(epoch=offer.manifest.epoch, version=offer.version)
        try:
            with self._agreed(f"version {offer.version}"):
                self._receive(offer, prepared, reverts=reverts)
        except Exception:
            if self._held is not None and self.state.prepared == prepared:
                # another rank has not
                self.rollback()
            raise

    def _agreed(self, what: str) -> AbstractContextManager[None]:
        """Let the block fail on all tensor ranks where it fails on one."""
        return nullcontext() if self._held is None else self._held.agreed(what)

    def _receive(self, offer: Offer, prepared: Prepared, *, reverts: bool) -> None:
        self.state.refuse(offer.manifest, reverts=reverts)
        if self.state.prepared == prepared:
            return
        # what waits is freed first: two staged versions would take memory that is not planned
        self.rollback()
        self.swap = receive(
            offer,
            self.tensors,
            shared=self.shared,
            device=self._device,
            open_folder=partial(open_verified, spec=self.decoder.whole_spec),
            parts=self._parts,
            emit=self.emit,
            held=self._held,
        )
        self.state = self.state.after(prepared)

    def commit(self, version: int) -> None:
        """Swap to the prepared version. Shards are gathered now: every rank's engine must be at
        it."""
        with self.swapping(version):
            pass

    @contextmanager
    def swapping(self, version: int) -> Iterator[None]:
        """Swap to the prepared version, whole, and keep it if the block ends well. After any error
        the last version is there as it was, and the prepared one waits for another commit. All
        tensor ranks call it, and come to the block together."""
        swap, last = self.swap, self.state
        assert swap is not None and last.is_prepared(version)
        with self._agreed(f"version {version}"):
            self._refuse_absent(swap, version)
        self.state = begun = last.after(SwapBegan(version=version))
        try:
            with self._agreed(f"version {version}"):
                swap.run()
            swap.verify()
            self.state = begun.after(SwapDone())
            yield
        except BaseException:
            # where even `undo` fails, the numbers are neither version's
            self.state = begun.after(SwapFailed(undone=False))
            swap.undo()
            self.state = begun.after(SwapFailed(undone=True))
            self.emit("weights.commit_failed", version=version, serving=self.version)
            raise
        swap.settle()
        self.swap = None

    def _refuse_absent(self, swap: Swap, version: int) -> None:
        if swap.moves_bytes and not self.present:
            raise InputError(
                f"version {version} cannot be committed: engine.weights is not on the device",
                hint="move engine.weights to the device first",
            )

    def rollback(self) -> None:
        """Forget a prepared version and free what was staged."""
        self.state = self.state.after(RolledBack())
        if self.swap is not None:
            self.swap.settle()
        self.swap = None
