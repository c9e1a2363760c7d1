"""Cases for engines whose ranks lie beside a trainer's, each pair in one process: functions here run
in rank processes (rank_pool), or in the test's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gyre.cluster.worker.trainer_endpoint import TrainerEndpoint
from gyre.core.errors import InputError, RankError
from gyre.core.offers import Offer
from gyre.core.records import Phase, Request, Sampling
from gyre.distributed.init import RankSpec, join_neighbors
from gyre.distributed.process_group import RankGroup
from gyre.engine.beside_trainer import RankBesideTrainer
from gyre.engine.config import EngineConfig
from gyre.engine.core_worker import CoreWorker
from gyre.engine.engine import NativeEngine
from gyre.engine.tensor_group import enlist, lead
from gyre.launch.factories import Machine, make_machine, make_policy
from gyre.launch.placement.stage_runtime import StageRuntime
from gyre.launch.stages import plan_stages
from gyre.planner.plan import Plan
from gyre.runconfig.run_config import RunConfig
from gyre.text.tokenizer import load_tokenizer
from layout_cases import spec_of
from tensor_cases import answers, decoder_of
from trainer_cases import make_batch
from zero_cases import whole

TURN: tuple[Phase, ...] = ("handover", "rollout", "score", "train")
SOON_S = 60.0
SPEC = replace(
    spec_of("qwen3", hidden_size=16, num_layers=2, vocab_size=53, mlp_size=24),
    context_tokens=96,
    head_dim=8,
)
SETTINGS = {"page_tokens": 4, "max_running": 4, "token_budget": 16, "num_pages": 30}
KV = "engine.kv"
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What each rank of a test's ring is given."""

    config_json: str
    plan_json: str
    folder: str  # with the tokenizer
    port: int = 0  # of the store
    round_id: str = ""
    turns: int = 3
    restarts_engine: bool = False  # at each hand-over, as memory.leave may say


def asked(turn: int) -> list[Request]:
    rng = np.random.default_rng(turn)
    return [
        Request(
            request_id=f"{turn}.{number}",
            tokens=rng.integers(1, 48, 5 + 3 * number).astype(np.int32),
            sampling=Sampling(max_tokens=12, temperature=0.0, ignore_eos=True),
            seed=number,
        )
        for number in range(3)
    ]


def neighbors_of(
    group: RankGroup, size: int, port: int, round_id: str, *, timeout_s: float = 20.0
) -> RankGroup:
    seat = RankSpec(
        rank=group.rank,
        world_size=group.size,
        store_host="127.0.0.1",
        store_port=port,
        round_id=round_id,
        backend="gloo",
        device=group.device,
        timeout_s=timeout_s,
    )
    return join_neighbors(seat, size, name="engine")


def ring(group: RankGroup | None, given: Given) -> dict[str, Any]:
    """Run turns of a ring: hand-over, rollouts, scoring, training, as a driver calls them. Return
    what this rank saw."""
    return asyncio.run(_ring(group, given))


async def _ring(group: RankGroup | None, given: Given) -> dict[str, Any]:
    config, plan = (
        RunConfig.model_validate_json(given.config_json),
        Plan.from_json(given.plan_json),
    )
    machine, tokenizer = make_machine(config), load_tokenizer(Path(given.folder))
    ranks = config.engine.tensor_ranks
    engine_group = None
    if group is not None:
        engine_group = neighbors_of(group, ranks, given.port, given.round_id)
    events: list[tuple[str, dict[str, Any]]] = []
    endpoints: list[TrainerEndpoint] = []
    device = StageRuntime(
        config,
        plan,
        Path(given.folder),
        machine,
        lambda kind, **fields: events.append((kind, fields)),
        group=group,
        tensor_group=engine_group,
        own_offer=lambda version: endpoints[0].offer(version),
    )
    (stage,) = plan_stages(config, "all")
    try:
        await device.begin(stage, make_policy(config, tokenizer, machine), version=0)
        assert device.trainer is not None
        rank = 0 if group is None else group.rank
        endpoints.append(TrainerEndpoint(device.trainer, rank=rank, compute=machine.compute))
        found = await _turns(group, given, device, endpoints[0], machine)
        return {**found, "events": events}
    finally:
        machine.compute.shutdown(wait=False)


def begun(group: RankGroup, given: Given, folders: Sequence[str]) -> str:
    """Begin a trainer with the weights of this rank's own folder. Return why it was refused."""
    config = RunConfig.model_validate_json(given.config_json)
    model = config.model.model_copy(update={"path": folders[group.rank], "shape": None})
    config = config.model_copy(update={"model": model})
    machine, tokenizer = make_machine(config), load_tokenizer(Path(given.folder))
    device = StageRuntime(
        config,
        Plan.from_json(given.plan_json),
        Path(given.folder),
        machine,
        lambda kind, **fields: None,
        group=group,
    )
    (stage,) = plan_stages(config, "all")

    async def begin() -> None:
        policy = make_policy(config, tokenizer, machine)
        await device.begin(stage, policy, version=0, generates=False)
        await device.close()

    try:
        asyncio.run(begin())
    except InputError as error:
        return f"{error.message}\n{error.hint}"
    finally:
        machine.compute.shutdown(wait=False)
    return ""


async def _turns(
    group: RankGroup | None,
    given: Given,
    device: StageRuntime,
    endpoint: TrainerEndpoint,
    machine: Machine,
) -> dict[str, Any]:
    """The driver waits for all ranks between any two calls."""
    told: list[Any] = []
    assert device.trainer is not None
    restarts = given.restarts_engine and device.engine is not None
    for turn in range(given.turns):
        for phase in TURN:
            await device.enter(phase, step=turn)
            await _all_there(group, given, f"{turn} {phase}")
            if phase == "handover":
                if restarts and turn and device.engine is not None:
                    await device.engine.start(dummy=True)
                manifest = await endpoint.register()
                await _all_there(group, given, f"{turn} registered")
                if device.engine is not None:
                    version = manifest.version
                    await device.engine.prepare(endpoint.offer(version))
                    await device.engine.commit(version, policy="drain")
            if phase == "rollout" and device.engine is not None:
                told.append(await answers(device.engine, asked(turn)))
                if restarts:
                    await device.engine.terminate()
            await _all_there(group, given, f"{turn} {phase} done")
            if phase == "train":
                await endpoint.step(make_batch(8, seed=turn, step=turn))
                await _all_there(group, given, f"{turn} trained")
    await device.enter("handover", step=given.turns)
    runner = asyncio.get_running_loop()
    parts = await runner.run_in_executor(machine.compute, whole, device.trainer)
    in_place = await runner.run_in_executor(machine.compute, shares_storage_of, device)
    await _all_there(group, given, "seen")
    await device.close()
    return {"answers": told, "weights": parts, "in_place": in_place}


def worker_of(device: StageRuntime) -> CoreWorker:
    """This rank's part of the engine, whether it leads or follows."""
    if device.engine is not None:
        return device.engine.worker
    assert device._beside is not None
    return device._beside._worker


def shares_storage_of(device: StageRuntime) -> bool:
    """Whether each tensor of the engine is its trainer's."""
    assert device.trainer is not None
    decoder = worker_of(device).decoder
    own = dict(device.trainer.decoder.named_parameters())
    return all(
        parameter.data_ptr() == own[name].data_ptr() and parameter is own[name]
        for name, parameter in decoder.named_parameters()
    )


async def _all_there(group: RankGroup | None, given: Given, at: str) -> None:
    """Wait for all ranks beside their compute threads, which the engine needs."""
    if group is None:
        return
    key = f"{given.round_id}/{at}"
    group.notes.put(f"{key}/{group.rank}", "here")

    def look() -> bool | None:
        return all(group.notes.get(f"{key}/{rank}") for rank in range(group.size)) or None

    there = await asyncio.to_thread(group.look_for, at, look, SOON_S)
    assert there, f"not all ranks came to {at}"


def phases_apart(
    group: RankGroup, how: str, port: int, round_id: str, timeout_s: float
) -> tuple[str, str]:
    """Serve, and change the phase on two ranks, of which one does otherwise than the other. Return
    this rank's error, and of the first one why its engine failed."""
    return asyncio.run(_phases_apart(group, how, port, round_id, timeout_s))


async def _phases_apart(
    group: RankGroup, how: str, port: int, round_id: str, timeout_s: float
) -> tuple[str, str]:
    neighbors = neighbors_of(group, 2, port, round_id, timeout_s=timeout_s)
    compute = ThreadPoolExecutor(1)
    leads = neighbors.rank == 0

    async def on_compute(work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(compute, work)

    limits = {"timeout_s": 20.0}
    told = {**limits, "emit": lambda kind, **fields: None, "have_trainers": True}
    engine = NativeEngine(
        decoder_of(SPEC, neighbors, dtype=torch.float32, scale=8.0),
        EngineConfig.model_validate(SETTINGS),
        compute=compute,
        emit=lambda kind, **fields: None,
        device=neighbors.device,
        dtype=torch.float32,
        shared_weights=True,
        followers=await on_compute(lambda: lead(neighbors, **told)) if leads else None,
    )
    if leads:
        return await _lead_apart(engine, how, on_compute)
    stream = await on_compute(lambda: enlist(neighbors, **limits))
    follower = RankBesideTrainer(
        stream, engine.worker, neighbors, compute=compute, own_offer=_no_offer
    )
    await on_compute(follower.start)
    follower.listen()

    def change() -> None:
        if how != "more":
            follower.move([KV], "host" if how == "elsewhere" else "none")
        follower.entered("train", 0)

    if how == "alike":
        await on_compute(change)
        await on_compute(lambda: follower.move([KV], "device"))
        await on_compute(lambda: follower.entered("rollout", 1))
        await follower.close()
        return "", ""
    try:
        await on_compute(change)
    except RankError as error:
        return f"{error}", ""
    return "", ""


def _no_offer(version: int) -> Offer:
    raise AssertionError(f"version {version} is not asked for")


async def _lead_apart(engine: NativeEngine, how: str, on_compute: Any) -> tuple[str, str]:
    await engine.start(dummy=False)
    before = await answers(engine, asked(0))

    def change() -> None:
        if how != "fewer":
            engine.move([KV], "none")
        engine.worker.entered("train", 0)

    if how == "gone":
        os._exit(1)
    if how == "late":
        await asyncio.sleep(4.0)
        return "", ""
    await on_compute(change)
    if how != "fewer":
        await on_compute(lambda: engine.move([KV], "device"))
    if how == "alike":
        await on_compute(lambda: engine.worker.entered("rollout", 1))
    after = await answers(engine, asked(0))
    assert (after == before) == (how == "alike")
    failure = engine.failure
    await engine.terminate()
    return "", failure
