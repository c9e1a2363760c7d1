"""Spans, numbers of a step, the overlap account and the description of the machine."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.observability.hardware import (
    count_gpus,
    describe_hardware,
    parse_cpu_max,
    parse_cpuinfo,
    parse_meminfo,
)
from gyre.observability.overlap import overlap_account
from gyre.observability.spans import Spans
from gyre.trainer.passes.backward import largest


class Recorder:
    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.now = 0.0

    def emit(self, kind: str, **fields: object) -> None:
        self.rows.append({"kind": kind, **fields})


def test_nested_phases_are_named_by_path_and_add_up() -> None:
    record = Recorder()
    spans = Spans(record.emit, clock=lambda: record.now)
    for _ in range(2):
        with spans.phase("score", step=4):
            record.now += 1.0
            with spans.phase("reference", step=4):
                record.now += 0.5
    assert spans.seconds() == {"score": 3.0}
    assert spans.seconds(nested=True) == {"score": 3.0, "score/reference": 1.0}
    assert [row["phase"] for row in record.rows if row["kind"] == "phase.ended"] == [
        "score/reference",
        "score",
    ] * 2
    assert record.rows[2] == {
        "kind": "phase.ended",
        "phase": "score/reference",
        "depth": 1,
        "seconds": 0.5,
        "step": 4,
    }


def test_a_phase_that_raises_ends_with_the_error() -> None:
    record = Recorder()
    spans = Spans(record.emit, clock=lambda: record.now)
    with pytest.raises(KeyError), spans.phase("train"):
        raise KeyError("x")
    assert record.rows[-1]["error"] == "KeyError"
    with spans.phase("rollout"):
        pass
    assert record.rows[-1]["phase"] == "rollout"


def test_concurrent_tasks_do_not_nest_in_each_other() -> None:
    record = Recorder()
    spans = Spans(record.emit, clock=lambda: record.now)

    async def work(name: str) -> None:
        with spans.phase(name):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(both())
    assert {row["phase"] for row in record.rows} == {"a", "b"}


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(rules=INTERVALS, rollout=INTERVALS, reference=INTERVALS)
def test_overlap_equals_counting_seconds_one_by_one(
    rules: list, rollout: list, reference: list
) -> None:
    def covered(intervals: list) -> set[int]:
        return {second for start, end in intervals for second in range(start, end)}

    busy, during_rollout, during_reference = covered(rules), covered(rollout), covered(reference)
    account = overlap_account(rules, rollout=rollout, reference=reference)
    assert account["rule_s"] == len(busy)
    assert account["rollout_s"] == len(busy & during_rollout)
    assert account["reference_s"] == len((busy & during_reference) - during_rollout)
    assert account["hidden_s"] == account["rollout_s"] + account["reference_s"] <= account["rule_s"]


CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9B45
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx512_bf16

processor\t: 1
model name\t: AMD EPYC 9B45
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx512_bf16
"""


def test_facts_are_read_from_what_the_kernel_writes() -> None:
    cpu = parse_cpuinfo(CPUINFO)
    assert (cpu["model"], cpu["cores_physical"]) == ("AMD EPYC 9B45", 1)
    assert [name for name, there in cpu["flags"].items() if there] == [
        "avx2",
        "avx512",
        "avx512_bf16",
        "bf16",
    ]
    assert parse_meminfo("MemTotal:  16 kB\nHugePages_Total:   0\n") == {"MemTotal": 16 * 1024}
    assert [parse_cpu_max(text) for text in ("150000 100000\n", "max 100000\n", "")] == [
        1.5,
        None,
        None,
    ]


def test_a_machine_that_tells_nothing_is_described_all_the_same(tmp_path: Path) -> None:
    facts = describe_hardware(proc=tmp_path, cgroup=tmp_path)
    assert (facts["cpu"], facts["memory_bytes"], facts["gpus"]) == (None, None, [])
    assert facts["cores"] >= 1


def test_gpus_are_named_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "driver" / "nvidia" / "gpus" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert describe_hardware(proc=tmp_path)["gpus"] == ["NVIDIA H200"]


def test_the_driver_counts_the_gpus_that_torch_counts() -> None:
    assert count_gpus() == torch.cuda.device_count()


@pytest.mark.parametrize(
    "values", [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0), (1.0, 2.0, math.nan)]
)
def test_a_number_that_is_none_shows_wherever_it_stands(values: tuple[float, ...]) -> None:
    found = largest(values)
    assert found is not None and math.isnan(found)


def test_the_largest_of_none_is_none() -> None:
    assert largest(()) is None
    assert largest([-2.0, -1.0]) == -1.0
