"""Worker extension: how a version's numbers get into vLLM's workers. In: calls by collective_rpc
with an offer as JSON. Out: JSON, "" or the error; a process's bytes on its
device. vLLM mixes the class into its worker's.

No weight crosses a process by pickle or a socket: each worker opens the publisher's shared memory,
or the folder, by itself. The numbers go in by vLLM's own layerwise reload, which keeps the
addresses that CUDA graphs know. The version that runs is remembered by its offer, to be loaded
again.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from gyre.core.errors import GyreError, InputError, SnapshotError
from gyre.core.offers import Offer
from gyre.models.spec import ModelSpec, spec_from_hub_config
from gyre.sidecars.vllm.host_tensors import decode_offer, hub_rows, open_tensors
from gyre.weights.transports.opened import PartOpener

HEAD = "lm_head.weight"
# warns of layers without numbers at every load: of rotary embeddings, which have none, and of a
# tied head. What is missing is found here, by name
NOISY = "vllm.model_executor.model_loader.reload.layerwise"


class WorkerExtension:
    """Methods of vLLM's worker, one on each of its ranks. Their names must be new to it."""

    def gyre_prepare(self, offer_text: str) -> str:
        """Open a version and verify it."""
        return _tell_error(lambda: _updates(self).prepare(decode_offer(offer_text)))

    def gyre_commit(self, version: int) -> str:
        """Load the prepared version."""
        return _tell_error(lambda: _updates(self).commit(version))

    def gyre_restore(self) -> str:
        """Load the version before again."""
        return _tell_error(_updates(self).restore)

    def gyre_rollback(self) -> str:
        """Forget what was prepared."""
        return _tell_error(_updates(self).rollback)

    def gyre_device_bytes(self) -> int:
        """Return what this process has on its device, context and graphs included."""
        return _device_bytes(self)


class WeightUpdates:
    """The versions of one worker's model."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        logging.getLogger(NOISY).setLevel(logging.ERROR)
        config = worker.vllm_config.model_config.hf_config.to_dict()
        self._spec: ModelSpec = spec_from_hub_config(config)
        # slots stay mapped from version to version, page-locked for a GPU
        self._opener = PartOpener(pin=worker.device.type == "cuda")
        self._prepared: Offer | None = None
        self._current: Offer | None = None  # None: the numbers are dummies
        self._is_torn = False  # they are of no version: a load has begun, and not ended

    def prepare(self, offer: Offer) -> None:
        self._prepared = None
        with open_tensors(offer, self._spec, self._opener) as tensors:
            for name in tensors:
                _ = tensors[name]  # verified as it is read
        self._prepared = offer

    def commit(self, version: int) -> None:
        offer = self._prepared
        if offer is None or offer.version != version:
            raise InputError(f"version {version} is not prepared", hint="prepare it first")
        self._load(offer)
        self._current, self._prepared = offer, None

    def restore(self) -> None:
        """Make the model whole again after a commit that failed."""
        if not self._is_torn:
            return
        if self._current is None:
            raise InputError("there is no version to go back to", hint="commit one")
        self._load(self._current)

    def rollback(self) -> None:
        self._prepared = None

    def _load(self, offer: Offer) -> None:
        """Write a version into the model, whole. After an error the numbers are of no version."""
        with open_tensors(offer, self._spec, self._opener) as tensors:
            self._is_torn = True
            self._reload(tensors)
        self._is_torn = False

    @torch.no_grad()
    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        # vLLM's, which this process has: the module is imported outside of it, too
        set_config = importlib.import_module("vllm.config").set_current_vllm_config
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        worker = self._worker
        model = worker.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        with set_config(worker.vllm_config):
            reload.initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(hub_rows(self._spec, tensors))
            finally:  # after an error too: the layers take part in the next reload
                reload.finalize_layerwise_reload(model, worker.vllm_config.model_config)
            missing = sorted(wanted - set(loaded) - ({HEAD} if self._spec.tied else set()))
            if missing:
                raise SnapshotError(
                    f"vLLM has loaded no numbers for {len(missing)} parameters: "
                    f"{', '.join(missing[:3])}",
                    hint="this build of vLLM lays the model out in another way: report it",
                )
            if self._spec.tied:
                self._pack_head(model)

    def _pack_head(self, model: Any) -> None:
        """Pack a tied head again. On a CPU vLLM multiplies with a packed copy of it, which a reload
        does not renew."""
        head = model.lm_head
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def _device_bytes(worker: Any) -> int:
    """Return the driver's reading for this process. In a container that hides the host's process
    ids it has none: then what vLLM's allocators hold, without the context."""
    device = worker.device
    if device.type != "cuda":
        return 0
    nvml = importlib.import_module("vllm.third_party.pynvml")
    nvml.nvmlInit()
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return process.usedGpuMemory
    finally:
        nvml.nvmlShutdown()
    cumem = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    asleep = sum(data.handle[1] for data in cumem.pointer_to_data.values() if data.is_asleep)
    return torch.cuda.memory_reserved(device) - asleep


def _updates(worker: Any) -> WeightUpdates:
    """Return the worker's updates, made at the first call: vLLM makes the worker."""
    if not hasattr(worker, "gyre_updates"):
        worker.gyre_updates = WeightUpdates(worker)
    return worker.gyre_updates


def _tell_error(work: Any) -> str:
    """Return "" or the error as JSON: vLLM passes on no more than an exception's text."""
    try:
        work()
    except GyreError as error:
        return msgspec.json.encode([type(error).__name__, error.message, error.hint]).decode()
    except Exception as error:  # noqa: BLE001  whatever it was, the engine's owner hears of it
        return msgspec.json.encode(["", f"{type(error).__name__}: {error}", ""]).decode()
    return ""
