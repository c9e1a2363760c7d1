"""Startup events: a trainer's kernels and reduced precisions. In: a decoder, trained models. Out:
events."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gyre.core.events import Emit
from gyre.kernels import flash
from gyre.kernels.dispatch import CUDA_DTYPES, c_instructions, why_torch
from gyre.kernels.float8 import MULTIPLE
from gyre.models.decoder import Decoder
from gyre.trainer.adamw.blocks import BLOCK
from gyre.trainer.parallelize.float8_gather import projection_shapes
from gyre.trainer.roles.trained_model import TrainedModel


def kernels(emit: Emit, decoder: Decoder, device: torch.device) -> None:
    """Report the kernels of a pass and why they were chosen."""
    dtype, spec = decoder.dtype, decoder.spec
    if (reason := why_torch(device, dtype)) is not None:
        emit("trainer.torch_kernels", reason=reason)
    if (instructions := c_instructions(device, dtype)) is not None:
        emit("trainer.c_kernels", instructions=instructions)
    if device.type == "cuda" and dtype in CUDA_DTYPES:
        shared_by = spec.num_heads // spec.num_kv_heads
        emit("trainer.attention_kernel", **flash.choice(device, dtype, shared_by, spec.head_dim))


def float8(emit: Emit, learners: Sequence[TrainedModel]) -> None:
    """Report the matrices multiplied in 8 bits, and those configured for it but ineligible."""
    for learner in learners:
        shapes = projection_shapes(learner.decoder)
        wide = {name: f"{shape}: {MULTIPLE} does not divide both" for name, shape in shapes.items()}
        wide = {name: reason for name, reason in wide.items() if name not in learner.float8}
        gathered = sorted(name for name in learner.float8 if learner.gathers_in_float8(name))
        told = {"learner": learner.name, "layers": sorted(learner.float8), "gathered": gathered}
        emit("trainer.float8", **told, left_wide=wide, counted=bool(wide))


def moments(emit: Emit, learners: Sequence[TrainedModel]) -> None:
    """Report how many moments are coded, and the configured matrices that are ineligible."""
    for learner in learners:
        optimizer = learner.optimizer
        numbers = {name: math.prod(shape) for name, shape in optimizer.shapes.items()}
        wide = [
            name
            for name, decays in optimizer.decays.items()
            if decays and name not in optimizer.coded
        ]
        emit(
            "trainer.moments",
            learner=learner.name,
            coded_numbers=sum(numbers[name] for name in optimizer.coded),
            numbers=sum(numbers.values()),
            left_wide={
                name: f"{optimizer.shapes[name]}: {BLOCK} does not divide its rows" for name in wide
            },
            counted=bool(wide),
        )
