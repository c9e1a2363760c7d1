"""What a plan decides where the user left it open: shares of the machine, chunks, pages, residency;
and its reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.memory.errors import words
from gyre.planner.decide import make_plan
from gyre.planner.plan import Hardware, Plan
from unit.planner.memory_model.test_exact_bytes import TOY, P, make_inputs
from unit.planner.test_exact_plan import HOST

GPU = replace(
    HOST,
    device="cuda",
    device_name="a GPU",
    bf16=True,
    saving="triton",
    device_free_bytes=10**9 - 1,
)

PAGE = 2 * 3 * 2 * 8 * 16 * 4  # bytes of a page of 16 tokens, in float32
ROOMY = replace(
    HOST, device_free_bytes=10**12, host_available_bytes=10**12, host_total_bytes=10**12
)
LARGE = replace(TOY, num_parameters=10**6)


def planned(hardware: Hardware = HOST, **changes: Any) -> Plan:
    return make_plan(make_inputs(**changes), hardware)


def test_shares_of_a_machine() -> None:
    """60 % of a CPU's memory for the device and 20 % beside it; 90 % of a GPU and 60 % of the host;
    half of a disk."""
    cpu, gpu = planned(disk_tier=True), planned(GPU)
    assert (cpu.device_budget_bytes, cpu.host_budget_bytes, cpu.disk_budget_bytes) == (
        6 * 10**8,
        2 * 10**8,
        5 * 10**7,
    )
    assert (gpu.device_budget_bytes, gpu.host_budget_bytes, gpu.disk_budget_bytes) == (
        899_999_999,
        6 * 10**8,
        0,
    )
    assert cpu.reasons["disk_budget_bytes"].startswith("50% of") and cpu.reasons[
        "disk_budget_bytes"
    ].endswith("disk")
    assert gpu.reasons["disk_budget_bytes"] == "no memory.disk_folder"
    assert gpu.reasons["device_budget_bytes"].endswith("free on the GPU")
    given = planned(
        device_budget_bytes=10**8, host_budget_bytes=0, disk_budget_bytes=7, disk_tier=True
    )
    assert (given.device_budget_bytes, given.host_budget_bytes, given.disk_budget_bytes) == (
        10**8,
        0,
        7,
    )
    assert given.reasons["host_budget_bytes"] == given.reasons["disk_budget_bytes"] == "given"


def test_what_is_settled_before_sizes_are_tried() -> None:
    cpu, gpu = planned(), planned(GPU)
    assert (cpu.device, cpu.dtype, cpu.threads, cpu.page_tokens, cpu.max_running) == (
        "cpu",
        "float32",
        2,
        16,
        8,
    )
    assert (gpu.device, gpu.dtype, gpu.page_tokens) == ("cuda", "bfloat16", 64)
    best = "the best on this cpu: it has no bfloat16 products"
    assert (cpu.reasons["dtype"], cpu.reasons["device"]) == (best, "the best here: a CPU")
    assert gpu.reasons["dtype"].endswith("cuda: it multiplies bfloat16")
    assert (
        cpu.reasons["threads"] == "cores that this process may use"
        and cpu.reasons["page_tokens"] == "default"
    )
    assert cpu.reasons["max_running"] == "a step's 8 sequences, at most 256"
    given = planned(
        GPU,
        device="cpu",
        dtype="float16",
        threads=1,
        page_tokens=8,
        max_running=5,
        not_given={"dtype": "x"},
    )
    assert (given.device, given.dtype, given.threads, given.page_tokens, given.max_running) == (
        "cpu",
        "float16",
        1,
        8,
        5,
    )
    named = ("device", "threads", "page_tokens", "max_running")
    assert [given.reasons[name] for name in named] == ["given"] * 4
    assert given.reasons["dtype"].startswith("the best on"), "nobody set it"
    assert planned(dtype="float16").reasons["dtype"] == "given"
    assert planned(GPU, device="cpu").dtype == "float32", (
        "the GPU has bfloat16, the CPU beside it not"
    )
    assert planned(not_given={"objective": "by default"}).reasons["objective"] == "by default"
    many: dict[str, Any] = {"prompts_per_step": 200, "completions_per_prompt": 3}
    assert (
        planned(ROOMY, **many).max_running,
        planned(replace(GPU, device_free_bytes=10**12), **many).max_running,
    ) == (256, 512)
    offline = planned(online=False)
    assert (offline.max_running, offline.kv_pages) == (0, 0)
    assert [offline.reasons[name] for name in ("kv_pages", "max_running", "page_tokens")] == [
        "nothing is generated"
    ] * 3
    with pytest.raises(ConfigError, match="no CUDA device"):
        planned(device="cuda")


def test_memory_kernels_are_those_of_the_device() -> None:
    """A CPU beside a GPU runs torch's, which keep more of a layer."""
    beside = planned(replace(GPU, host_available_bytes=10**9), device="cpu", tokens_per_chunk=40)
    assert beside.working["train"] == planned(tokens_per_chunk=40).working["train"]
    fused = planned(replace(HOST, saving="c_cpu"), tokens_per_chunk=40)
    assert fused.working["train"] != beside.working["train"]


def test_chunks_that_nobody_set() -> None:
    """What an update has, 8,192 tokens on a CPU and 16,384 on a GPU at most, one sequence at
    least."""
    assert planned().sizes.tokens_per_chunk == 8 * 40 and planned().sizes.sequences_per_update == 8
    assert planned(sequences_per_update=3).sizes.tokens_per_chunk == 120
    assert planned(ROOMY, prompts_per_step=500).sizes.tokens_per_chunk == 8192
    vast = replace(ROOMY, device="cuda", saving="triton")
    assert planned(vast, prompts_per_step=500).sizes.tokens_per_chunk == 16_384
    long = replace(TOY, context_tokens=10_000)
    assert planned(ROOMY, model=long, max_prompt_tokens=9000).sizes.tokens_per_chunk == 9030
    assert planned(tokens_per_chunk=77).sizes.tokens_per_chunk == 77
    reasons = planned(
        sequences_per_update=8, tokens_per_chunk=77, not_given={"tokens_per_chunk": "y"}
    ).reasons
    assert (reasons["sequences_per_update"], reasons["tokens_per_chunk"]) == ("given", "y")
    assert planned().reasons["sequences_per_update"] == "all sequences of a step"
    assert planned().reasons["tokens_per_chunk"].endswith("of activations, at least 40")


OFFLINE: dict[str, Any] = {"online": False, "model": LARGE, "host_budget_bytes": 10**9}


def peak_at(tokens: int, **changes: Any) -> int:
    plan = planned(ROOMY, **OFFLINE, tokens_per_chunk=tokens, residency="resident", **changes)
    return max(phase.peak_device_bytes for phase in plan.phases)


def test_a_smaller_chunk_before_components_move() -> None:
    """But for chunks of less than a quarter."""

    def chosen(budget: int, **changes: Any) -> tuple[str, int]:
        plan = planned(**{**OFFLINE, "reference": True, "device_budget_bytes": budget, **changes})
        return plan.residency, plan.sizes.tokens_per_chunk

    peaks = {tokens: peak_at(tokens, reference=True) for tokens in (320, 160, 80, 40)}
    assert chosen(peaks[320]) == ("resident", 320)
    assert chosen(peaks[320] - 1) == chosen(peaks[160]) == ("resident", 160)
    assert chosen(peaks[160] - 1) == chosen(peaks[80]) == ("resident", 80)
    assert chosen(peaks[80] - 1)[0] == "spill", "the reference makes room"
    assert (
        chosen(peaks[80] - 1, residency="resident")
        == chosen(peaks[40], residency="resident")
        == ("resident", 40)
    )
    with pytest.raises(MemoryBudgetError):
        chosen(peaks[40] - 1, residency="resident")
    plan = planned(**OFFLINE, reference=True, device_budget_bytes=peaks[80] - 1)
    assert plan.reasons["residency"].startswith("not everything fits")
    assert planned(**OFFLINE).reasons["residency"] == "everything fits on the device at once"
    assert planned(**OFFLINE, residency="spill").reasons["residency"] == "given"


def test_a_stage_needs_room_to_begin() -> None:
    """The reference is there for the first score when the actor is made; activations are less than
    that."""
    asked: dict[str, Any] = {
        **OFFLINE,
        "reference": True,
        "tokens_per_chunk": 40,
        "residency": "spill",
    }
    peak = planned(**asked, device_budget_bytes=21 * 10**6).start.peak_device_bytes
    assert peak == (4 + 4 + 4 + 8) * 10**6
    assert planned(**asked, device_budget_bytes=peak).start.peak_device_bytes == peak
    with pytest.raises(MemoryBudgetError, match="a stage cannot begin") as caught:
        planned(**asked, device_budget_bytes=peak - 1)
    assert f"memory.device_budget_bytes to at least {peak}, or set" in caught.value.hint
    small = replace(HOST, host_total_bytes=peak - 1, device_total_bytes=peak - 1)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(small, **asked, device_budget_bytes=peak - 1)
    assert "ask less of the device" in caught.value.hint


def test_pages_that_fit() -> None:
    """Three for a sequence of 40 tokens, so 24 for eight; fewer where the device has no room, with
    one to spare."""
    one: dict[str, Any] = {"tokens_per_chunk": 40, "engine_tokens_per_step": 2048}
    plan = planned(**one)
    assert plan.kv_pages == 24 and plan.reasons["kv_pages"] == "8 running × 3 pages of 16 tokens"
    assert (
        planned(**one, kv_pages=5).kv_pages == 5
        and planned(**one, kv_pages=5).reasons["kv_pages"] == "given"
    )
    sized = planned(**one, kv_bytes=8 * PAGE - 1)
    assert sized.kv_pages == 7
    assert sized.reasons["kv_pages"] == f"engine.kv_bytes = {8 * PAGE - 1}"
    with pytest.raises(ConfigError, match="2 pages, and one sequence of 40 tokens takes 3") as few:
        planned(**one, kv_bytes=3 * PAGE - 1)
    assert f"give {3 * PAGE} or more" in few.value.hint
    assert planned(**one, kv_pages=5, kv_bytes=8 * PAGE).kv_pages == 5
    generate = plan.working["rollout"]
    assert generate > plan.working["train"]

    def pages(room: int, **changes: Any) -> int:
        """With so much room beside a step and what stays: the actor, or its weights alone where
        phases take turns."""
        stays = {"resident": 16, "phase": 4, "spill": 4}[changes["residency"]] * P
        return planned(**one, device_budget_bytes=generate + stays + room, **changes).kv_pages

    for residency in ("resident", "phase", "spill"):
        found = [
            pages(room, residency=residency)
            for room in (11 * PAGE, 11 * PAGE - 1, 25 * PAGE, 99 * PAGE, 4 * PAGE)
        ]
        assert found == [10, 9, 24, 24, 3]
    assert pages(11 * PAGE + 4 * P, residency="resident", reference=True) == 10
    assert pages(11 * PAGE, residency="phase", reference=True) == 10, "it is elsewhere"
    short = planned(**one, device_budget_bytes=generate + 16 * P + 11 * PAGE, residency="resident")
    assert short.notes == (
        "KV pages for 3 of 8 running completions at full length: longer ones will be preempted",
    )
    left = "what the device budget leaves; 8 running × 3 pages of 16 tokens = 24 would all fit in"
    assert short.reasons["kv_pages"] == left
    with pytest.raises(MemoryBudgetError):
        pages(4 * PAGE - 1, residency="resident")
    open_ = planned(**one, device_budget_bytes=generate + 16 * P + 25 * PAGE)
    assert (open_.residency, open_.kv_pages) == ("resident", 24)
    tight = planned(**one, device_budget_bytes=generate + 16 * P + 25 * PAGE - 1)
    assert (tight.residency, tight.kv_pages) == ("spill", 24), "all pages before everything at once"


def test_notes_of_a_plan() -> None:
    assert planned(threads=2).notes == ()
    assert planned(threads=3).notes == ("3 threads on 2 cores get in each other's way",)
    slow = ("this CPU has no bfloat16 products: float32 is faster here",)
    assert planned(dtype="bfloat16").notes == slow
    assert (
        planned(replace(HOST, bf16=True), dtype="bfloat16").notes
        == planned(GPU, dtype="bfloat16").notes
        == ()
    )
    assert planned(remarks=("first",), threads=3).notes[0] == "first"
    turns = planned(**OFFLINE, tokens_per_chunk=40, reference=True, residency="phase")
    moved = sum(phase.moved_bytes for phase in turns.phases)
    assert moved > 0 and turns.notes == (f"each iteration copies {words(moved)} between tiers",)
    assert [phase.phase for phase in turns.phases] == ["score", "train", "evaluate"]


def test_host_pages_stay_on_a_gpu_alone() -> None:
    """What is parked again needs no page pinned anew, where the host has room for all of it and 64
    MiB of staging."""

    def held(hardware: Hardware, **changes: Any) -> set[str]:
        asked = {
            **OFFLINE,
            "tokens_per_chunk": 40,
            "reference": True,
            "residency": "phase",
            "dtype": "float32",
        }
        plan = planned(hardware, **{**asked, **changes})
        (score,) = [phase for phase in plan.phases if phase.phase == "score"]
        return set(score.host) & set(score.device)

    assert held(HOST) == set() and held(GPU) == {"reference"}
    parked = (4 + 8 + 4) * 10**6 + (64 << 20)  # weights, moments, the reference
    assert held(GPU, host_budget_bytes=parked) == {"reference"}
    assert held(GPU, host_budget_bytes=parked - 1) == set()


def test_a_cpu_moves_to_disk_without_host_memory() -> None:
    turns = planned(
        **{**OFFLINE, "host_budget_bytes": 0},
        disk_tier=True,
        tokens_per_chunk=40,
        reference=True,
        residency="phase",
    )
    assert [phase.peak_host_bytes for phase in turns.phases] == [0, 0, 0]
    assert any("reference" in phase.disk for phase in turns.phases)


def test_a_chunk_of_less_than_a_quarter_of_an_uneven_one() -> None:
    """7 sequences of 41 tokens are halved to 143 and 71; four times 71 are 284 of 287."""
    asked: dict[str, Any] = {
        **OFFLINE,
        "reference": True,
        "max_completion_tokens": 31,
        "sequences_per_update": 7,
    }
    at_71 = planned(ROOMY, **asked, tokens_per_chunk=71, residency="resident")
    budget = max(phase.peak_device_bytes for phase in at_71.phases)
    assert planned(**asked, device_budget_bytes=budget).residency == "spill"


def test_a_cpu_beside_a_gpu_has_the_hosts_memory() -> None:
    small = replace(GPU, device_total_bytes=1, host_total_bytes=10**5)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(small, device="cpu", device_budget_bytes=1000, residency="resident")
    assert "which has 97.66 KiB in all" in caught.value.hint


def test_background_snapshots_take_host_memory() -> None:
    """Masters and moments of each model that is trained, and the reference in the compute dtype."""

    def left(hardware: Hardware = HOST, **changes: Any) -> int:
        asked = {
            "snapshot_background": True,
            "host_budget_bytes": 10**8,
            "reference": True,
            **changes,
        }
        return 10**8 - planned(hardware, **asked).host_budget_bytes

    assert (
        left() == (12 + 4) * P and left(GPU) == (12 + 2) * P and left(critic=True) == (24 + 4) * P
    )
    assert left(reference=False) == 12 * P and left(dtype="bfloat16") == 14 * P
    # a dtype that is left open is the best that the device multiplies
    assert left(replace(HOST, bf16=True)) == 14 * P
    exact = planned(snapshot_background=True, host_budget_bytes=12 * P)
    assert (
        exact.host_budget_bytes == 0
        and "less " + words(12 * P) in exact.reasons["host_budget_bytes"]
    )
    with pytest.raises(
        MemoryBudgetError, match=f"{words(12 * P)} of host memory, 1 B more than the host budget"
    ):
        planned(snapshot_background=True, host_budget_bytes=12 * P - 1)


def test_a_refusal_of_a_plan() -> None:
    """The ways that fit, then what the ledger says; where none fits, that alone."""
    asked: dict[str, Any] = {**OFFLINE, "tokens_per_chunk": 320, "residency": "resident"}
    with pytest.raises(MemoryBudgetError) as caught:
        planned(**asked, device_budget_bytes=peak_at(320) - 1)
    ways = (
        'what fits: trainer.checkpointing = "selective"; or trainer.tokens_per_chunk = 160; '
        "else set memory."
    )
    assert caught.value.hint.startswith(ways)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(**asked, device_budget_bytes=1000)
    assert "what fits" not in caught.value.hint and "; else " not in caught.value.hint
