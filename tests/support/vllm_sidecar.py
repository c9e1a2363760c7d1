"""A vLLM sidecar for tests: one process in vLLM's own environment, shared by the tests of a module, and
the shared memory that its versions are registered in. In: the folder of a checkpoint. Out: a pool with
the sidecar as its only engine, and offers.

The environment is `.venvs/vllm`, which `make vllm` makes. Without it the tests are skipped.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings, Revive
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.process_cluster import ProcessCluster
from gyre.core.contracts import WorkerHandle
from gyre.core.offers import Offer
from gyre.core.records import ProcessLimits, RoleSpec
from gyre.models.hub.checkpoint import Checkpoint
from gyre.sidecars.vllm.environment import find_environment, process_variables, python_of
from gyre.sidecars.vllm.llm import VllmRole, VllmSettings
from gyre.sidecars.vllm.requests import TokenLimits
from gyre.sidecars.vllm.versions import build_for
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from native_cases import CONTEXT, tiny_config
from offers import offer_of

ENVIRONMENT = Path(__file__).parents[2] / ".venvs" / "vllm"
BUILDER = "gyre.launch.placement.vllm_worker:build_vllm_engine"
START_S = 240.0
# vLLM with a process for each worker, as where there are several of them
WITH_WORKERS = {"distributed_executor_backend": "mp"}


def environment() -> Path:
    """The environment's folder. Skips the test where there is none."""
    if find_environment(ENVIRONMENT) is None:
        pytest.skip("no environment of vLLM in .venvs/vllm: run `make vllm`")
    return ENVIRONMENT


def role_spec(
    folder: Path,
    *,
    vocab_size: int,
    name: str = "vllm",
    builder: str = BUILDER,
    limits: ProcessLimits | None = None,
    extra: Mapping[str, str] | None = None,
    **changes: Any,
) -> RoleSpec:
    """The role of a tiny float32 vLLM on a CPU."""
    settings = {
        "folder": str(folder),
        "dtype": "float32",
        "context_tokens": CONTEXT,
        "max_running": 6,
        "token_budget": 64,
        "prefix_cache": True,
        "gpu_memory_utilization": 0.1,
        "kv_bytes": 16 << 20,
        "enforce_eager": True,
        "start_deadline_s": START_S,
        "update_deadline_s": 60.0,
        "extra": {"block_size": 32, **(extra or {})},
    }
    role = VllmRole(
        settings=VllmSettings(**{**settings, **changes}),
        limits=TokenLimits(vocab_size=vocab_size, context_tokens=CONTEXT, most_completions=64),
        drain_deadline_s=30.0,
        during_training="keep",
    )
    return RoleSpec(
        name=name,
        builder=builder,
        arguments={"role_json": msgspec.json.encode(role).decode()},
        environment=process_variables(build_for("cpu"), threads=1, eager=True),
        interpreter=str(python_of(environment())),
        limits=limits or ProcessLimits(),
        deadline_s=START_S,
    )


def save_small(folder: Path, *, seed: int = 0, family: str = "qwen3", num_layers: int = 2) -> Any:
    """A random model in hub layout, of a head dim that vLLM has on a CPU. Returns transformers'."""
    shape = {"head_dim": 32, "tie_word_embeddings": True, "num_hidden_layers": num_layers}
    given = {**tiny_config(family).to_dict(), "layer_types": None, **shape}
    config = type(tiny_config(family))(**given)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


class Sidecar:
    """One started sidecar. Its handle's event loop runs in a thread, so that each test has its
    own."""

    def __init__(self, spec: RoleSpec) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.cluster = ProcessCluster(gpus=0, on_event=self._note)
        self._spec = spec
        self.handle: WorkerHandle = self._wait(self.cluster.start(spec))
        self.num_pools = 0

    @property
    def pid(self) -> int:
        return int(self.handle.place.rpartition(" ")[2])

    async def start_again(self, name: str) -> WorkerHandle:
        """Start another life of it, which starts vLLM by its first hand-over."""
        started = asyncio.run_coroutine_threadsafe(self.cluster.start(self._spec), self._loop)
        self.handle = await asyncio.wrap_future(started)
        return self.handle

    def pool(self, revive: Revive | None = None, **settings: Any) -> EnginePool:
        """A new pool over it, at version 0."""
        self.num_pools += 1
        once = RestartPolicy(max_restarts=1)
        given = {"call_deadline_s": START_S, "hang_s": 60.0, "progress_tokens": 4, "restarts": once}
        return EnginePool(
            self.cluster,
            [self.handle],
            settings=PoolSettings(**{**given, **settings}),
            emit=lambda kind, **fields: None,
            revive=revive,
        )

    def close(self) -> None:
        self._wait(self.cluster.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _note(self, worker: str, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)


@contextmanager
def registered() -> Iterator[SharedMemoryStore]:
    """A store in the host's shared memory, where vLLM's workers look."""
    with closing(
        SharedMemoryStore(run_id=uuid.uuid4().hex[:8], owner=0, emit=lambda kind, **fields: None)
    ) as store:
        yield store


def register(
    store: SharedMemoryStore, tensors: dict[str, torch.Tensor], version: int, epoch: int = 0
) -> Offer:
    """Register a version, as a trainer of one rank does."""
    part = publish_part(offer_of(version, tensors, epoch=epoch), rank=0, num_ranks=1, store=store)
    return join_parts(version, epoch, [part])


def tensors_of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint under our names."""
    with closing(Checkpoint(folder)) as checkpoint:
        found = {name: torch.empty(shape, dtype=dtype) for name, shape in checkpoint.shapes.items()}
        for name, tensor in found.items():
            checkpoint.read(name, 0, tensor.numel(), tensor.view(-1))
    return found
