"""What the C kernels are built for, what is said when they cannot be, and what lands in the
cache."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gyre.cli import doctor
from gyre.engine.config import EngineConfig
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.runners.cpu_runner import CpuRunner
from gyre.engine.runners.select import choose_runner
from gyre.engine.runners.torch_runner import Runner
from gyre.engine.scheduler.step import StepRunner
from gyre.kernels.cpu import build
from gyre.kernels.cpu.build import (
    INSTRUCTION_SETS,
    InstructionSet,
    Unavailable,
    choose_instructions,
)
from gyre.kernels.cpu.library import CModel, DecoderLibrary, load_decoder
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec
from gyre.planner.memory_model.engine import engine_bytes
from gyre.planner.plan import Dtype, ModelNumbers

CPU = torch.device("cpu")
SPEC = ModelSpec(
    family="qwen3",
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=70,
    tied=True,
    context_tokens=256,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    eos_ids=(1,),
)
AVX512, AVX2 = (
    frozenset({"__AVX512F__", "__AVX512BW__", "__AVX2__", "__FMA__"}),
    frozenset({"__AVX2__", "__FMA__"}),
)


def run_on(decoder: Decoder) -> tuple[StepRunner, list[tuple[str, dict]]]:
    pool = KvPool(
        num_layers=2,
        num_pages=1,
        num_kv_heads=2,
        page_tokens=4,
        head_dim=16,
        device=CPU,
        dtype=decoder.dtype,
    )
    events: list[tuple[str, dict]] = []
    config = EngineConfig(page_tokens=16)
    runner = choose_runner(
        decoder, pool, config, emit=lambda kind, **fields: events.append((kind, fields))
    )
    return runner, events


@pytest.mark.parametrize(
    ("macros", "name"),
    [(AVX512 | {"__AVX512BF16__"}, "avx512_bf16"), (AVX512, "avx512"), (AVX2, "avx2")],
)
def test_the_best_set_of_the_processor_is_taken(macros: frozenset[str], name: str) -> None:
    chosen = choose_instructions(macros)
    assert isinstance(chosen, InstructionSet) and chosen.name == name


@pytest.mark.parametrize(
    ("macros", "missing"),
    [
        (frozenset(), "lacks avx2 and fma"),
        (frozenset({"__AVX2__"}), "lacks fma"),
        (frozenset({"__AVX512F__", "__FMA__"}), "lacks avx2"),
    ],
)
def test_a_processor_without_wide_vectors_is_told_what_it_lacks(
    macros: frozenset[str], missing: str
) -> None:
    chosen = choose_instructions(macros)
    assert isinstance(chosen, Unavailable) and chosen.reason.endswith(missing)


def test_a_set_that_the_processor_lacks_is_not_built(monkeypatch) -> None:
    monkeypatch.setattr(build, "_macros", lambda compiler: AVX2)
    found = build.load("decoder.c", bf16=False, instructions=INSTRUCTION_SETS[0])
    assert isinstance(found, Unavailable) and found.reason.startswith("avx512_bf16: ")
    assert "avx512f and avx512bw and avx512bf16" in found.reason


def test_each_set_and_dtype_has_a_library_of_its_own(instructions: InstructionSet) -> None:
    """AVX2's lanes are 8 floats, those of AVX-512 are 16: the work area of one token tells."""
    sizes = {}
    for one in INSTRUCTION_SETS:
        library = load_decoder(torch.float32, one)
        if isinstance(library, Unavailable):
            continue
        assert library.instructions is one
        model = CModel(layers=1, hidden=64, mlp=64, heads=2, kv_heads=2, head_dim=32, vocab=32)
        sizes[one.name] = library.scratch_bytes(ctypes.byref(model), 1, 1, 1, 1)
    assert instructions.name in sizes
    if "avx512" in sizes:
        assert sizes["avx2"] < sizes["avx512"]
    built = {path.name for path in build.cache_folder().glob(f"decoder-{instructions.name}-*.so")}
    assert built, "the name in the cache holds the set"


def test_the_choice_is_an_event_and_the_doctors(instructions: InstructionSet) -> None:
    runner, events = run_on(Decoder(SPEC, device=CPU, dtype=torch.float32))
    assert isinstance(runner, CpuRunner)
    assert events == [("engine.c_kernels", {"instructions": instructions.name})]
    best = load_decoder(torch.float32)
    assert isinstance(best, DecoderLibrary)
    finding = doctor.find_c_kernels()
    assert finding.verdict == "ok" and f"for {best.instructions.name} by" in finding.detail


def test_without_a_compiler_the_reason_is_an_event(monkeypatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    runner, events = run_on(Decoder(SPEC, device=CPU, dtype=torch.float32))
    assert isinstance(runner, Runner)
    assert events[0][0] == "engine.torch_kernels" and "compiler" in events[0][1]["reason"]


def test_a_compiler_that_fails_is_told_and_leaves_nothing(monkeypatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in\n--version) exit 0;;\n'
        "*-dM*) echo '#define __AVX2__ 1'; echo '#define __FMA__ 1'; exit 0;;\nesac\n"
        "echo 'no room for frobs' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = load_decoder(torch.float32)
    assert isinstance(found, Unavailable) and "no room for frobs" in found.reason
    assert list((tmp_path / "cache" / "gyre" / "kernels").iterdir()) == []


@pytest.mark.slow
def test_processes_may_race_for_an_empty_cache(tmp_path: Path) -> None:
    code = (
        "import torch; from gyre.kernels.cpu.library import *; assert "
        "isinstance(load_decoder(torch.float32), DecoderLibrary)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    racing = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(timeout=240) for process in racing] == [0, 0]
    assert [path.suffix for path in (tmp_path / "gyre" / "kernels").iterdir()] == [".so"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "running"), [(2048, 256), (256, 256), (2048, 8), (256, 8)])
@pytest.mark.parametrize("threads", [1, 16])
def test_the_work_area_is_within_what_is_planned_for_a_rollout(
    dtype: Dtype, tokens: int, running: int, threads: int
) -> None:
    library = load_decoder(getattr(torch, dtype))
    assert isinstance(library, DecoderLibrary)
    for hidden, mlp, heads, vocab in (
        (64, 96, 4, 200),
        (256, 768, 4, 512),
        (768, 2048, 12, 151_936),
    ):
        model = CModel(
            layers=4, hidden=hidden, mlp=mlp, heads=heads, kv_heads=2, head_dim=64, vocab=vocab
        )
        needed = (
            library.scratch_bytes(ctypes.byref(model), tokens, running, running, threads)
            + running * vocab * 4
        )
        numbers = ModelNumbers(
            num_parameters=0,
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=4,
            num_heads=heads,
            num_kv_heads=2,
            head_dim=64,
            mlp_size=mlp,
            context_tokens=1024,
            tied=True,
            qkv_bias=False,
            qk_norm=True,
        )
        assert needed <= engine_bytes(numbers, dtype, tokens=tokens, running=running, longest=512)
