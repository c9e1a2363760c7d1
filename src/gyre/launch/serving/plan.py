"""Serve plan: what `gyre serve` would take and bear, without starting it. In: a model folder, its
config. Out: text, and a JSON-able mapping. No weight is read.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gyre.core.files import read_json
from gyre.distributed.process_group import RankGroup
from gyre.engine.config import engine_part, plan_engine
from gyre.engine.memory import free_device_bytes
from gyre.engine.runners.select import find_torch_reason
from gyre.launch.factories import dtype_name, make_machine
from gyre.launch.serving.server import count_gpus
from gyre.models.decoder import Decoder
from gyre.models.hub.folders import CONFIG_FILE, refuse_reward_model
from gyre.models.layers.tensor_parallel import ReplicatedRows
from gyre.models.spec import spec_from_hub_config
from gyre.planner.model_zoo import model_numbers
from gyre.planner.report.serving import describe_ranks, describe_serving
from gyre.planner.serving import RankPlan, fewest_ranks, plan_over_ranks, plan_serving
from gyre.runconfig.run_config import RunConfig


def plan_serve(
    folder: Path, config: RunConfig, *, name: str, replicas: int, columns: int
) -> dict[str, Any]:
    """Return the plan, by the rules that an engine starts by, and refuse what it would refuse."""
    refuse_reward_model(folder)
    count_gpus(config, replicas)
    machine = make_machine(config)
    machine.compute.shutdown()
    on_gpu = machine.device.type == "cuda"
    settings = plan_engine(config.engine, device_type=machine.device.type)
    spec = spec_from_hub_config(read_json(folder / CONFIG_FILE))
    part, ranks = engine_part(settings, spec), settings.tensor_ranks
    # of a group that never meets
    group = RankGroup(name="planned", rank=0, size=ranks, device=machine.device)
    decoder = Decoder(
        spec,
        device=torch.device("meta"),
        dtype=machine.dtype,
        tensor=ReplicatedRows(group) if ranks > 1 else None,
    )
    reason = find_torch_reason(
        decoder, settings, device=machine.device, page_tokens=settings.page_tokens
    )
    plan = plan_serving(
        # each rank has the logits of the whole vocabulary
        replace(model_numbers(part), vocab_size=spec.vocab_size),
        settings,
        device="cuda" if on_gpu else "cpu",
        dtype=dtype_name(machine),
        weights_bytes=sum(each.numel() * each.element_size() for each in decoder.parameters()),
        free_bytes=free_device_bytes(machine.device),
        replicas=replicas,
        own_kernels=reason is None,
    )
    over: tuple[RankPlan, ...] = ()
    if on_gpu and not plan.fits:
        over = plan_over_ranks(
            spec,
            settings,
            dtype=plan.dtype,
            free_bytes=plan.free_bytes,
            own_kernels=reason is None,
            device_name=torch.cuda.get_device_name(machine.device),
        )
    ours = "the fused kernels" if on_gpu else "the C kernels"
    num_gpus = torch.cuda.device_count()
    kernels = ours if reason is None else f"torch's kernels ({reason})"
    return {
        "text": f"{name}: {spec.family}, {spec.num_parameters:,} parameters\n\n"
        + describe_serving(plan, kernels, columns)
        + (f"\n{describe_ranks(over, num_gpus=num_gpus, columns=columns)}" if over else ""),
        "model": {"name": name, "family": spec.family, "num_parameters": spec.num_parameters},
        "kernels": kernels,
        **asdict(plan),
        "kv_tokens": plan.kv_tokens,
        "full_sequences": plan.full_sequences,
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "fewest_tensor_ranks": fewest_ranks(over),
    }
