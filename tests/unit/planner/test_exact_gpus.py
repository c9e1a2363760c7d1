"""What the planner knows of GPUs and of published models, against their data sheets and hub
configs; and of this host."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gyre.core.errors import ConfigError
from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.chunks import load_chunks
from gyre.memory.probe import read_device, read_host
from gyre.observability.hardware import describe_hardware
from gyre.planner import hardware
from gyre.planner.gpus import (
    DISK_BYTES_PER_S,
    GPUS,
    NETWORK_BYTES_PER_S,
    find_gpu,
    peak_flops,
    recognize_gpu,
)
from gyre.planner.hardware import read_hardware, saving_on_cpu, saving_on_cuda, usable_cores
from gyre.planner.model_zoo import SHAPES, find_shape, model_numbers
from planner_cases import CPU

# Data sheets: dense 16-bit and 8-bit TFLOP/s, memory GB/s, GB/s to other GPUs both ways together
# (NVLink or PCIe).
SHEETS = {
    "h200": (989, 1979, 4800, 900),
    "h100": (989, 1979, 3350, 900),
    "h100-pcie": (756, 1513, 2000, 128),
    "b200": (2250, 4500, 8000, 1800),
    "a100-80g": (312, 0, 2039, 600),
    "a100-40g": (312, 0, 1555, 600),
    "l40s": (362, 733, 864, 64),
    "l4": (121, 242, 300, 64),
    "a10g": (70, 0, 600, 64),
    "rtx-4090": (165, 330, 1008, 64),
    "v100-32g": (125, 0, 900, 300),
    "t4": (65, 0, 320, 32),
}
# GiB that torch can see; GB/s of a pinned copy over PCIe 5, 4 and 3; GiB of host memory per GPU.
MEMORY = {
    "h200": (139.8, 55, 256),
    "h100": (79.1, 55, 256),
    "h100-pcie": (79.1, 55, 128),
    "b200": (178.0, 55, 256),
    "a100-80g": (79.1, 25, 256),
    "a100-40g": (39.4, 25, 128),
    "l40s": (44.4, 25, 128),
    "l4": (22.0, 25, 64),
    "a10g": (22.0, 25, 64),
    "rtx-4090": (23.5, 25, 64),
    "v100-32g": (31.7, 12, 96),
    "t4": (14.6, 12, 48),
}
# of the data sheet, in published training steps
REACHED = {"h200": 0.507, "h100": 0.343, "h100-pcie": 0.343}
NO_BFLOAT16 = ("v100-32g", "t4")


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_rates_are_those_of_the_data_sheet(name: str) -> None:
    gpu, (half, fp8, hbm, links) = GPUS[name], SHEETS[name]
    assert gpu.fp16_flops == half * 1e12 and gpu.fp8_flops == fp8 * 1e12
    assert gpu.bf16_flops == (0 if name in NO_BFLOAT16 else half * 1e12) and gpu.bf16 == (
        name not in NO_BFLOAT16
    )
    assert gpu.hbm_bytes_per_s == pytest.approx(hbm * 1e9, rel=0.005)
    assert gpu.link_bytes_per_s == links / 2 * 1e9
    assert gpu.collective_bytes_per_s == pytest.approx(links / 2 * 1e9 * 0.76, rel=1e-9), (
        "342 of 450 were measured"
    )
    visible, host_link, host = MEMORY[name]
    assert (gpu.device_bytes, gpu.host_bytes) == (int(visible * 2**30), host * 2**30)
    assert gpu.host_link_bytes_per_s == host_link * 1e9
    assert gpu.training_share == REACHED.get(name, 0.45)
    assert gpu.matmul_share == (794 / 989 if name == "h200" else 0.8)
    assert gpu.name == name and gpu.gpus_per_host == 8


def test_rates_that_hosts_share() -> None:
    assert set(GPUS) == set(SHEETS)
    assert NETWORK_BYTES_PER_S == 400e9 / 8 and DISK_BYTES_PER_S == 2 * 6e9
    assert GPUS["h200"].host_copy_bytes_per_s(8) == pytest.approx(27.9e9)
    assert GPUS["h200"].host_copy_bytes_per_s(1) == 55e9
    assert GPUS["h200"].host_copy_bytes_per_s(4) == pytest.approx(55e9 - 3 / 7 * 27.1e9)
    assert (GPUS["h200"].hbm_bytes_per_s, GPUS["h100"].hbm_bytes_per_s) == (4.8e12, 3.35e12)


def test_names_of_gpus() -> None:
    assert find_gpu("RTX_4090").name == find_gpu("rtx 4090").name == "rtx-4090"
    with pytest.raises(
        ConfigError, match="no GPU of that name is known; did you mean h200"
    ) as caught:
        find_gpu("h201")
    assert caught.value.hint.startswith("known: h200, h100, ")
    with pytest.raises(ConfigError, match=r"is known$"):
        find_gpu("zzzzzz")
    told = ["NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe", "NVIDIA H100", "NVIDIA L4", "NVIDIA L4 X"]
    found = [recognize_gpu(name) for name in told]
    assert [gpu.name if gpu else None for gpu in found] == [
        "a100-80g",
        "h100-pcie",
        "h100",
        "l4",
        None,
    ]
    alone = recognize_gpu("L4")
    assert alone is not None and alone.name == "l4"
    assert peak_flops("Tesla T4", "float16") == 65e12 and peak_flops("Tesla T4", "bfloat16") is None
    assert (
        peak_flops("NVIDIA H100", "bfloat16") == 989e12 and peak_flops("abacus", "float16") is None
    )


# The hub's config.json: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
# head_dim, intermediate_size, vocab_size, max_position_embeddings, rope_theta, tie_word_embeddings.
HUB = {
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151_936, 40_960, 1_000_000, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151_936, 40_960, 1_000_000, True),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151_936, 40_960, 1_000_000, True),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12_288, 151_936, 40_960, 1_000_000, False),
    "qwen3-14b": (5120, 40, 40, 8, 128, 17_408, 151_936, 40_960, 1_000_000, False),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25_600, 151_936, 40_960, 1_000_000, False),
    "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, 151_936, 32_768, 1_000_000, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 128, 18_944, 152_064, 131_072, 1_000_000, False),
    "llama-3.2-1b": (2048, 16, 32, 8, 64, 8192, 128_256, 131_072, 500_000, True),
    "llama-3-8b": (4096, 32, 32, 8, 128, 14_336, 128_256, 131_072, 500_000, False),
    "llama-3-70b": (8192, 80, 64, 8, 128, 28_672, 128_256, 131_072, 500_000, False),
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_are_those_of_the_hub(name: str) -> None:
    spec = find_shape(name.upper())
    sizes = (
        spec.hidden_size,
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.mlp_size,
        spec.vocab_size,
        spec.context_tokens,
        spec.rope_theta,
        spec.tied,
    )
    assert sizes == HUB[name]
    family = name.partition("-")[0]
    assert spec.family == {"qwen3": "qwen3", "qwen2.5": "qwen2", "llama": "llama"}[family]
    assert spec.norm_eps == (1e-5 if family == "llama" else 1e-6)
    assert (spec.qkv_bias, spec.qk_norm) == (family == "qwen2.5", family == "qwen3")
    numbers = model_numbers(spec)
    assert (numbers.num_parameters, numbers.mlp_size) == (spec.num_parameters, spec.mlp_size)


def test_names_of_shapes() -> None:
    with pytest.raises(ConfigError, match="did you mean qwen3-14b") as caught:
        find_shape("qwen3-14")
    assert caught.value.hint.startswith("known: qwen3-0.6b, ")
    with pytest.raises(ConfigError, match=r"is known$"):
        find_shape("zzzz")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a host without a GPU")
def test_what_this_host_offers(tmp_path: Path) -> None:
    facts, found = describe_hardware(), read_hardware()
    assert (found.device, found.disk_free_bytes) == ("cpu", 0) and found.device_name == (
        facts["cpu"] or "CPU"
    )
    assert 1 <= found.cores <= facts["cores"]
    assert found.bf16 == facts["flags"]["bf16"]
    assert (found.device_total_bytes, found.host_total_bytes) == (
        read_device(CPU).total_bytes,
        read_host().total_bytes,
    )
    by_c = not isinstance(load_chunks(torch.float32), Unavailable)
    assert found.saving == saving_on_cpu() == ("c_cpu" if by_c else "torch_cpu")
    assert read_hardware(tmp_path / "a" / "b").disk_free_bytes > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a host without a GPU")
@pytest.mark.parametrize("bf16", [True, False])
def test_bfloat16_is_what_the_cpu_says(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    facts = describe_hardware()
    facts["flags"] = {**facts["flags"], "bf16": bf16}
    monkeypatch.setattr(hardware, "describe_hardware", lambda: facts)
    assert read_hardware().bf16 is bf16


def test_cores_that_a_quota_leaves() -> None:
    assert [usable_cores(4, quota) for quota in (None, 0.5, 1.0, 2.7, 9.0)] == [4, 1, 1, 2, 4]


def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's where it is installed; one that is too old for them keeps what a CPU by torch
    does."""
    by_triton = "triton" if importlib.util.find_spec("triton") else "torch_cuda"
    for reason, saving in (("compute capability 6.1", "torch_cpu"), (None, by_triton)):
        monkeypatch.setattr(hardware, "why_too_old", lambda _, reason=reason: reason)
        assert saving_on_cuda(torch.device("cuda")) == saving
