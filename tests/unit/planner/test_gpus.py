"""GPUs by the names that drivers give them, and mixtures of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.cluster.ray_cluster import count_types
from gyre.core.errors import ConfigError
from gyre.distributed.devices import DeviceRecord, find_mixture
from gyre.launch.placement.ray_workers import find_mixed_types
from gyre.launch.plan_command import PlanRequest, plan_shape
from gyre.planner.gpus import GPUS, peak_flops, recognize_gpu
from gyre.planner.model_zoo import SHAPES

DRIVER_NAMES = {  # as torch.cuda.get_device_name tells them
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g",
    "NVIDIA A100-PCIE-40GB": "a100-40g",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10G": "a10g",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "Tesla T4": "t4",
}
OTHERS = [
    "NVIDIA H200 NVL",
    "NVIDIA H100 NVL",
    "NVIDIA H200 MIG 1g.18gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA A800-SXM4-80GB",
    "AMD Instinct MI300X",
    "cpu",
    "",
]


def test_every_gpu_of_the_table_is_recognized() -> None:
    assert {name: gpu.name for name in DRIVER_NAMES if (gpu := recognize_gpu(name))} == DRIVER_NAMES
    assert set(DRIVER_NAMES.values()) == set(GPUS)


@pytest.mark.parametrize("name", OTHERS)
def test_a_part_with_another_data_sheet_is_not_taken_for_one_that_we_know(name) -> None:
    assert recognize_gpu(name) is None and peak_flops(name, "bfloat16") is None


def test_the_base_of_mfu_is_the_data_sheet_of_the_compute_dtype() -> None:
    assert peak_flops("NVIDIA H200", "bfloat16") == peak_flops("NVIDIA H200", "float16") == 989e12
    assert peak_flops("Tesla V100-SXM2-32GB", "float16") == 125e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float32") is None


H200 = DeviceRecord(host="a", name="NVIDIA H200", capability="9.0", memory_bytes=150_000_000_000)


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({"host": "b"}, True),
        ({"memory_bytes": 149_000_000_000}, True),  # what firmware reserves differs
        ({"memory_bytes": 100_000_000_000}, False),
        ({"name": "NVIDIA H200 NVL"}, False),
        ({"capability": "9.1"}, False),
    ],
)
def test_one_kind_is_name_capability_and_memory(change, alike) -> None:
    records = [H200, replace(H200, **change), H200]
    assert (find_mixture(records) == "") is alike
    assert find_mixture([H200]) == find_mixture([]) == ""


def test_who_has_what_is_told_with_memory() -> None:
    told = find_mixture(
        [H200, replace(H200, host="b", memory_bytes=84_000_000_000), replace(H200, host="c")]
    )
    assert told == (
        "ranks 0, 2 (a, c): NVIDIA H200 with 139.7 GiB, compute capability 9.0; "
        "rank 1 (b): NVIDIA H200 with 78.2 GiB, compute capability 9.0"
    )


def test_a_ray_cluster_of_two_types_must_have_enough_of_one() -> None:
    h200 = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H200": 1.0}
    a100 = {"CPU": 64.0, "GPU": 4.0, "accelerator_type:A100": 1.0}
    types = count_types([h200, h200, a100, {"CPU": 8.0}])
    assert types == {"H200": 16, "A100": 4}
    assert find_mixed_types(types, 16) == ""
    assert find_mixed_types(types, 17) == "4 × A100, 16 × H200"
    assert find_mixed_types({"H200": 8}, 9) == "", "too few is another error"
    assert count_types([{"GPU": 2.0}]) == {"unknown": 2}


def test_a_plan_without_a_model_names_the_shapes() -> None:
    with pytest.raises(ConfigError, match="neither a config nor a shape") as caught:
        plan_shape(PlanRequest(gpus=8, gpu="h200"))
    assert all(name in caught.value.hint for name in SHAPES)


# The rows of the tracker's table of speeds and memory, on 8 × H200.
ROWS = [
    ({"shape": "qwen3-8b", "sequence_tokens": 8192}, "qwen3-8b"),
    ({"shape": "qwen3-4b", "sequence_tokens": 65_536}, "qwen3-4b"),
    ({"shape": "qwen3-0.6b", "sequence_tokens": 8192}, "qwen3-0.6b"),
]


@pytest.mark.parametrize(("given", "name"), ROWS)
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_every_row_has_a_plan_whose_parts_sum_up_and_whose_lines_have_reasons(
    given, name, zero
) -> None:
    found = plan_shape(PlanRequest(gpus=8, gpu="h200", zero=zero, **given))
    stage, beyond = found["stages"][name], given["sequence_tokens"] > SHAPES[name].context_tokens
    assert (
        bool(found["notes"]) is beyond
        and ("rotary embedding must be stretched" in found["text"]) is beyond
    )
    best = stage["best"]
    assert best["device_bytes"] <= stage["device_budget_bytes"] and not best["short_device_bytes"]
    assert zero in (None, best["layout"]["zero"])
    moments = best["moments"]
    for moment in moments.values():
        assert moment["allocated_bytes"] == sum(moment["parts"].values())
        assert all(size > 0 for size in moment["parts"].values())
    assert best["device_bytes"] > max(moment["allocated_bytes"] for moment in moments.values())
    states = {
        part: size
        for part, size in moments["optimizer step"]["parts"].items()
        if part.startswith("actor.")
    }
    assert all(size == moments["loss"]["parts"][part] for part, size in states.items())
    for part in ("training", "inference"):
        for line in stage["checklists"][part]:
            assert line["state"] in ("on", "off", "not built") and line["reason"], line
