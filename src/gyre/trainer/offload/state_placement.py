"""StatePlacement: location of a model's optimizer state and float32 gradient between updates. In:
the trainer's config, the size of the state. Out: flat buffers there, the stream that brings them to
the device, memory components.

On the device nothing is streamed. "host" is pinned memory beside a GPU and plain memory on a CPU,
where it saves nothing; "disk" is a file.
"""

# N numbers of a flat buffer, S slots, X bytes of all slots

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.memory.pools.fixed import FixedPool
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.trainer.adamw.blocks import BLOCK
from gyre.trainer.config import TrainerConfig
from gyre.trainer.offload.host_gradients import HostGradients
from gyre.trainer.offload.slices import FLOAT_BYTES, GRADIENT_BUFFERS, SLOTS, numbers_per_cut
from gyre.trainer.offload.state_fields import StateField, gradient_field, state_fields
from gyre.trainer.offload.state_file import StateFile
from gyre.trainer.offload.state_stream import FileCarrier, HostCarrier, OffloadTraffic, Slot, Stream


class StatePlacement:
    """Placement of one model's state. `make` is called once."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        config: TrainerConfig = TrainerConfig(),
        *,
        folder: Path | None = None,
        emit: Emit = lambda kind, **fields: None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Choose where state, gradients and weights are stored. `progress` is called during an
        update, which may take minutes. Raises ConfigError for a disk without a folder."""
        self.name = name
        self.device = device
        self.state = config.offload_optimizer
        self.gradients = config.offload_gradients
        self.weights = name in config.offload_parameters
        if self.state == "disk" and folder is None:
            raise ConfigError(
                'trainer.offload_optimizer = "disk" has no folder for its file',
                hint="set memory.disk_folder",
            )
        self._config = config
        self._folder = folder
        self._emit = emit
        self.progress = progress
        self._host: dict[str, list[HostBuffer]] = {}  # by component
        self._file: StateFile | None = None
        self._carrier: HostCarrier | FileCarrier | None = None
        self.buffers: dict[str, Tensor] = {}
        self.fields: tuple[StateField, ...] = ()
        self.staging_X: Tensor | None = None
        self.stream: Stream | None = None
        self.sums: HostGradients | None = None

    def make(
        self, size: int, *, gradient_size: int, keeps_master: bool, num_coded: int | None = None
    ) -> dict[str, Tensor]:
        """Allocate zeroed buffers: one per `state_fields` entry, by name, and "grad". `size`:
        numbers of the state."""
        self.fields = state_fields(size, num_coded=num_coded, keeps_master=keeps_master)
        if self.state == "none":
            self.buffers = {
                field.name: self._on_device(field.size, field.dtype) for field in self.fields
            }
        elif self.state == "host":
            self.buffers = {
                field.name: self._on_host(_owner(field), field.size, field.dtype)
                for field in self.fields
            }
        else:
            assert self._folder is not None
            kinds = {field.name: (field.size, field.dtype) for field in self.fields}
            self._file = StateFile(self._folder, f"{self.name}.optimizer", kinds, self._emit)
            self.buffers = dict(self._file.buffers)
        away = self.fields if self.state != "none" else ()
        grad_N = self._on_host("grads", gradient_size) if self.gradients else None
        self.buffers["grad"] = self._on_device(gradient_size) if grad_N is None else grad_N
        if grad_N is not None:
            self._make_sums(grad_N)
        if away or self.gradients:
            self._make_stream(size, away)
            self._tell(away)
        return self.buffers

    def weights_buffer(self, size_bytes: int) -> Tensor:
        """Allocate zeroed uint8 host memory for the compute weights. Called once."""
        assert self.weights and "params" not in self._host
        return self._on_host("params", size_bytes, torch.uint8)

    def check(self) -> None:
        """Check the state before its buffers are accessed directly. Raises SnapshotError if an
        update was interrupted or the file is truncated. Waits for the disk."""
        if self.stream is not None:
            self.stream.check()
        if self._carrier is not None:
            self._carrier.settle()
        if self._file is not None:
            self._file.check()

    def flush(self) -> None:
        """Write back the state after its buffers were modified directly."""
        if self._file is not None:
            self._file.flush()

    def take_traffic(self) -> OffloadTraffic:
        """Return and reset the bytes moved and the time waited."""
        taken = OffloadTraffic() if self.stream is None else self.stream.take_traffic()
        if self.sums is not None:
            taken.out_bytes += self.sums.out_bytes
            taken.waited_s += self.sums.waited_s
            self.sums.out_bytes, self.sums.waited_s = 0, 0.0
        return taken

    def fixed_pools(self) -> list[FixedPool]:
        """Return the components that never move to the device."""
        pools = []
        for part, buffers in self._host.items():
            pages = [buffer.watch() for buffer in buffers]
            pools.append(
                FixedPool(
                    f"{self.name}.{part}",
                    "host",
                    size_bytes=sum(buffer.size_bytes for buffer in buffers),
                    held_bytes=lambda pages=pages: sum(
                        len(page) for ref in pages if (page := ref()) is not None
                    ),
                )
            )
        if self._file is not None:
            file = self._file
            for part in ("optimizer", "master"):
                size_bytes = sum(
                    file.bytes_of(field.name) for field in self.fields if _owner(field) == part
                )
                if size_bytes:

                    def held(size_bytes: int = size_bytes) -> int:
                        return size_bytes if file.is_whole() else 0

                    pools.append(
                        FixedPool(
                            f"{self.name}.{part}", "disk", size_bytes=size_bytes, held_bytes=held
                        )
                    )
        return pools

    def close(self) -> None:
        """Stop the threads and remove the file. The buffers must not be used afterwards."""
        if self.sums is not None:
            self.sums.close()
        if isinstance(self._carrier, FileCarrier):
            self._carrier.close()
        if self._file is not None:
            self._file.close()
        self.buffers, self._file, self._host = {}, None, {}

    def _on_device(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate zeroed items. An empty buffer has a storage too, which a component can move."""
        return torch.zeros(max(1, size), dtype=dtype, device=self.device)[:size]

    def _on_host(self, part: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a component's zeroed items on the host."""
        size_bytes = max(1, size) * dtype.itemsize
        buffer = HostBuffer(
            size_bytes, pin=self.device.type == "cuda", owner=f"component {self.name}.{part}"
        )
        self._host.setdefault(part, []).append(buffer)
        return buffer.bytes.view(dtype)[:size]

    def _make_sums(self, grad_N: Tensor) -> None:
        size_bytes = min(self._config.offload_cut_bytes, FLOAT_BYTES * len(grad_N))
        buffers = [
            self._on_host("staging_host", size_bytes, torch.uint8) for _ in range(GRADIENT_BUFFERS)
        ]
        deadline_s = self._config.offload_deadline_s
        self.sums = HostGradients(grad_N, buffers, self.device, deadline_s)

    def _make_stream(self, size: int, away: Sequence[StateField]) -> None:
        fields = [*away, *([gradient_field(size)] if self.gradients else [])]
        block_bytes = sum(BLOCK // field.block * field.dtype.itemsize for field in fields)
        deadline_s = self._config.offload_deadline_s
        numbers = numbers_per_cut(
            self._config.offload_cut_bytes, block_bytes=block_bytes, size=size
        )
        # small items last, so that the others start at whole lines
        fields.sort(key=lambda field: field.block)
        spaces = [SLOTS * numbers // field.block * field.dtype.itemsize for field in fields]
        self.staging_X = torch.zeros(sum(spaces), dtype=torch.uint8, device=self.device)
        parts = zip(fields, self.staging_X.split(spaces), strict=True)
        places = {field.name: part_X.view(field.dtype).view(SLOTS, -1) for field, part_X in parts}
        slots = [
            Slot(device={name: place_S[at] for name, place_S in places.items()}, host={})
            for at in range(SLOTS)
        ]
        if self._file is not None:
            for slot in slots:
                slot.host = {field.name: self._beside(slot.device[field.name]) for field in away}
            self._carrier = FileCarrier(self._file, away, self.device, deadline_s, self.progress)
        elif away:
            self._carrier = HostCarrier(self.buffers, away, self.device, deadline_s)
        self.stream = Stream(
            slots=slots,
            carrier=self._carrier,
            fields=fields,
            numbers=numbers,
            device=self.device,
            deadline_s=deadline_s,
            where=str(self._file.path) if self._file is not None else "host memory",
            progress=self.progress,
        )

    def _beside(self, slot_N: Tensor) -> Tensor:
        """Return host memory that a file is read into for a slot; on a CPU the slot itself."""
        if self.device.type == "cpu":
            return slot_N
        return self._on_host("staging_host", len(slot_N), slot_N.dtype)

    def _tell(self, away: Sequence[StateField]) -> None:
        assert self.staging_X is not None
        self._emit(
            "trainer.offload",
            learner=self.name,
            optimizer=self.state,
            gradients=self.gradients,
            size_bytes=sum(field.size * field.dtype.itemsize for field in away),
            staging_bytes=self.staging_X.numel(),
            path="" if self._file is None else str(self._file.path),
        )


def _owner(field: StateField) -> str:
    """Return the component that owns the field."""
    return "master" if field.name == "master" else "optimizer"
