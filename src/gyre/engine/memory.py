"""Engine memory: components that move between tiers. These are `engine.kv`, `engine.weights` unless
they are shared, and `engine.kv_host`, the slots for swapped KV in host memory. One stays on its
device: `engine.peers`, which other ranks of the engine write.

In: config, decoder. Out: the KV pool, and the MemoryTenant's three answers. The KV pool's tensor is
made once; leaving the device frees its bytes and keeps its identity. On a CUDA device both are in
virtual memory, so addresses stay as well. Graphs captured over them are valid again once they
return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

from gyre.core.errors import InputError
from gyre.core.records import Component, Tier, Usage
from gyre.core.rounding import round_up
from gyre.engine.config import EngineConfig, plan_num_pages, plan_num_slots
from gyre.engine.kv_cache.host_pool import HostKv
from gyre.engine.kv_cache.pool import KvPool
from gyre.memory.pools.cuda_vmm import VirtualUsage, find_driver, virtual_zeros
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.models.decoder import Decoder
from gyre.models.layers.tensor_parallel import ReplicatedRows

KV, WEIGHTS, KV_HOST = "engine.kv", "engine.weights", "engine.kv_host"
PEERS = "engine.peers"
PLAIN_GRANULE = 2 << 20  # in which the driver gives device memory that is not virtual
HOST_TIERS: tuple[Tier, ...] = ("host", "none")


def free_device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


class EngineMemory:
    """Sizes and places of what the engine holds."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        shared_weights: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._device = device
        self._dtype = dtype
        self._folder = Path(config.disk_folder) if config.disk_folder else None
        spec = decoder.spec
        self.page_bytes = spec.kv_bytes_per_token(dtype) * config.page_tokens
        self.num_pages = plan_num_pages(
            config,
            page_bytes=self.page_bytes,
            context_tokens=spec.context_tokens,
            free_bytes=free_device_bytes(device),
        )
        self.num_slots = plan_num_slots(config.kv_host_bytes, page_bytes=self.page_bytes)
        self.host: HostKv | None = None
        self._kv_bytes = self.page_bytes * (self.num_pages + 1)
        tensor = decoder.tensor
        peers = tensor.peers if isinstance(tensor, ReplicatedRows) else None
        self._peer_bytes = 0 if peers is None else peers.size_bytes
        self._pool: KvPool | None = None
        self.tenant = PoolTenant([])
        self._capture: torch.cuda.Stream | None = None
        self._driver = find_driver(device)
        if not shared_weights:
            weights = dict(decoder.named_parameters())
            self.tenant.add(
                StoragePool(
                    WEIGHTS, weights, folder=self._folder, device=device, driver=self._driver
                )
            )

    def provide_kv(self) -> KvPool:
        """Return the KV pool with its bytes on the device, made on the first call."""
        if self._pool is None:
            spec, driver = self._decoder.spec, self._driver
            self._pool = KvPool(
                num_layers=spec.num_layers,
                num_pages=self.num_pages,
                num_kv_heads=spec.num_kv_heads,
                page_tokens=self._config.page_tokens,
                head_dim=spec.head_dim,
                device=self._device,
                dtype=self._dtype,
                zeros=torch.zeros
                if driver is None
                else partial(virtual_zeros, driver=driver, owner=f"component {KV}"),
            )
            pages = {"kv": self._pool.tensor}
            self.tenant.add(
                StoragePool(KV, pages, folder=self._folder, device=self._device, driver=driver)
            )
        self.tenant.move([KV], "device")
        return self._pool

    def provide_host(self) -> HostKv | None:
        """Return the host pool, made when it is not there. None when the config has none."""
        if self.host is None and self.num_slots:
            self.host = HostKv(self.provide_kv(), self.num_slots, name=KV_HOST)
        return self.host

    def provide_capture(self) -> torch.cuda.Stream | None:
        """Return the stream on which graphs are captured; None without a GPU. One for all graphs
        and all starts: torch keeps freed blocks by stream, and on another one they would be taken
        from the device anew."""
        if self._capture is None and self._device.type == "cuda":
            self._capture = torch.cuda.Stream(self._device)
        return self._capture

    def tier(self, name: str) -> Tier:
        return next(component.tier for component in self.components() if component.name == name)

    def refuse_unknown(self, names: Sequence[str]) -> None:
        known = [component.name for component in self.components()]
        for name in names:
            if name not in known:
                raise InputError(
                    f"the engine has no component '{name}' (accepted: {', '.join(known)})"
                )

    def components(self) -> Sequence[Component]:
        made = list(self.tenant.components())
        if self._pool is None:
            tiers: tuple[Tier, ...] = (
                ("device", "host", "disk", "none") if self._folder else ("device", "host", "none")
            )
            made.append(Component(name=KV, size_bytes=self._kv_bytes, tier="none", tiers=tiers))
        if self.num_slots:
            size_bytes, tier = (
                self.num_slots * self.page_bytes,
                "none" if self.host is None else "host",
            )
            made.append(Component(name=KV_HOST, size_bytes=size_bytes, tier=tier, tiers=HOST_TIERS))
        if size_bytes := self._peer_bytes:
            made.append(
                Component(name=PEERS, size_bytes=size_bytes, tier="device", tiers=("device",))
            )
        return made

    def move(self, name: str, tier: Tier) -> None:
        if name == KV_HOST:
            self._move_host(tier)
            return
        if name == PEERS:
            if tier != "device":
                raise InputError(
                    f"component {PEERS} stays on the device: graphs and other ranks have its "
                    "addresses (accepted: device)"
                )
            return
        if name == KV and self._pool is None:
            if tier == "device":
                self.provide_kv()
                return
            if tier == "none":
                return
        self.tenant.move([name], tier)

    def measure(self) -> Mapping[str, Usage]:
        measured = {KV: Usage(device_bytes=0, host_bytes=0, disk_bytes=0), **self.tenant.measure()}
        if self.num_slots:
            host_bytes = 0 if self.host is None else self.host.size_bytes
            measured[KV_HOST] = Usage(device_bytes=0, host_bytes=host_bytes, disk_bytes=0)
        if size_bytes := self._peer_bytes:  # of the driver, until the process ends
            measured[PEERS] = VirtualUsage(
                device_bytes=size_bytes,
                host_bytes=0,
                disk_bytes=0,
                mapped_bytes=round_up(size_bytes, PLAIN_GRANULE),
            )
        return measured

    def _move_host(self, tier: Tier) -> None:
        if tier not in HOST_TIERS:
            raise InputError(
                f"component {KV_HOST} may not live on tier '{tier}' (accepted: "
                f"{', '.join(HOST_TIERS)})"
            )
        if tier == "none":
            if self.host is not None:
                self.host.wait()
            self.host = None
        else:
            self.provide_host()
