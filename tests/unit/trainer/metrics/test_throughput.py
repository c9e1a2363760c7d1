"""What a trainer says of its speed, alone; test_trainer_ranks has the same over ranks. Traces on
request."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from pathlib import Path

import pytest
import torch

from gyre.distributed.comm_stats import Sent
from gyre.distributed.process_group import alone
from gyre.models.flops import forward_flops
from gyre.trainer.config import TrainerConfig
from gyre.trainer.metrics.profiler import Tracer, Work, check_whole, summarize, write_trace
from gyre.trainer.metrics.throughput import ThroughputMeter, join
from gyre.trainer.passes.backward import StepStats, UpdateStats
from trainer_cases import SPEC, make_batch, make_trainer


def test_flops_are_three_passes_of_what_trains_and_one_of_what_is_asked(monkeypatch) -> None:
    """PPO: actor and critic train; policy and critic were asked before. Padding and packing count
    nothing."""
    trainer, batch = (
        make_trainer("ppo", peak_flops=1.0, tokens_per_chunk=41, epochs_per_batch=2),
        make_batch(6, step=1),
    )
    told: list[float] = []
    take = ThroughputMeter.take

    def note(meter: ThroughputMeter, *, step_s: float) -> dict:
        own = take(meter, step_s=step_s)
        told.append(own["flops"])
        return own

    monkeypatch.setattr(ThroughputMeter, "take", note)
    lengths = [len(sequence.tokens) for sequence in batch.sequences]
    targets = sum(int(sequence.columns["loss_mask"].sum()) for sequence in batch.sequences)
    actor = forward_flops(SPEC, lengths, num_outputs=targets)
    critic = forward_flops(SPEC, lengths, num_outputs=targets, output_rows=1)
    trainer.evaluate_now(batch, "policy")
    trainer.evaluate_now(batch, "critic")
    old_logprobs = actor  # two epochs: the step asks the policy itself first
    trainer.step_now(batch)
    trainer.step_now(batch)
    step = 2 * 3 * (actor + critic) + old_logprobs
    assert told == pytest.approx([actor + critic + step, step], rel=1e-12)


def test_a_device_without_a_data_sheet_has_no_mfu_and_one_rank_sends_nothing() -> None:
    with_peak = make_trainer("sft", peak_flops=1e12).step_now(make_batch(4, step=1))
    without = make_trainer("sft").step_now(make_batch(4, step=1))
    assert set(with_peak.measured) == {"train_tokens_per_second_per_device", "mfu"}
    assert set(without.measured) == {"train_tokens_per_second_per_device"}
    assert with_peak.measured["mfu"] > 0.0
    assert with_peak == without, "what a clock decides is no part of what a step did"


RANKS = [
    {
        "flops": 6e12,
        "s": 2.0,
        "step_s": 1.5,
        "wait_s": 0.5,
        "sent": {"all_gather": 10, "all_reduce": 4},
    },
    {"flops": 2e12, "s": 4.0, "step_s": 1.0, "wait_s": 0.75, "sent": {"all_gather": 12}},
]


def test_ranks_are_joined_by_sums_of_work_and_the_slowest_clock() -> None:
    assert join(RANKS, num_tokens=600, peak_flops=1e13) == {
        "train_tokens_per_second_per_device": 600 / 1.5 / 2,
        "mfu": 8e12 / (4.0 * 2 * 1e13),
        "sent_bytes/all_gather": 22.0,
        "sent_bytes/all_reduce": 4.0,
        "communication_wait_seconds": 0.75,
    }


def test_without_a_data_sheet_mfu_is_left_out() -> None:
    assert "mfu" not in join(RANKS, num_tokens=1, peak_flops=None)


def test_what_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `take` waits for the last collective, which never ends when its rank is lost."""
    group, asked = alone(), []
    monkeypatch.setattr(
        group.traffic, "take", lambda: asked.append(None) or Sent(bytes_by_kind={"all_reduce": 3})
    )
    meter = ThroughputMeter(group)
    with pytest.raises(ValueError, match="lost"), meter.working():
        raise ValueError("a rank was lost")
    assert len(asked) == 1
    own = meter.take(step_s=0.0)
    assert not own["sent"] and own["s"] > 0.0
    with meter.working():
        pass
    assert len(asked) == 3 and meter.take(step_s=0.0)["sent"] == {"all_reduce": 3}


@pytest.mark.parametrize("gaps", [(math.nan, 0.5), (0.5, math.nan), (0.25, 0.5, math.nan, 0.1)])
def test_a_gap_that_is_no_number_is_not_hidden_behind_one_that_is(gaps) -> None:
    totals = StepStats()
    for gap in gaps:
        totals.add(UpdateStats(max_gap=torch.tensor(gap)), {"actor": 1.0})
    assert math.isnan(totals.finish([totals.own()])["logprob_gap_max"])


# Traces
# ------------------------------------------------------------------------------------------------------------------


def test_the_steps_that_were_asked_for_are_traced(tmp_path: Path) -> None:
    events: list = []
    trainer = make_trainer("sft", trace_steps=(2,), trace_folder=tmp_path / "traces", events=events)
    reports = [trainer.step_now(make_batch(4, step=step)) for step in (1, 2, 3)]
    assert [bool(report.measured) for report in reports] == [True, False, True], (
        "a traced step's clock says nothing"
    )
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step-2.trace.json.gz"]
    with gzip.open(tmp_path / "traces" / "step-2.trace.json.gz") as file:
        trace = json.load(file)
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::copy_"} & names
    ((kind, told),) = events
    assert (
        kind == "trace.written"
        and told["step"] == 2
        and told["file"] == "traces/step-2.trace.json.gz"
    )
    assert told["size_bytes"] == (tmp_path / "traces" / "step-2.trace.json.gz").stat().st_size
    assert 0.0 < told["compute_s"] <= told["seconds"] and told["communication_s"] == 0.0
    assert told["top"] and all(row["seconds"] > 0 and row["calls"] > 0 for row in told["top"])


def test_a_step_that_ends_badly_leaves_its_trace(tmp_path: Path) -> None:
    events: list = []
    signs: list[int] = []
    tracer = Tracer(
        tmp_path,
        [1],
        device=torch.device("cpu"),
        emit=lambda kind, **fields: events.append(kind),
        progress=lambda: signs.append(1),
    )
    with pytest.raises(KeyboardInterrupt), tracer.around(1):
        torch.ones(3).add(1)
        raise KeyboardInterrupt
    assert events == ["trace.written"] and (tmp_path / "step-1.trace.json.gz").is_file()
    assert len(signs) >= 3, "what a trace takes after its step is no hang"


def test_a_trace_is_written_when_no_other_rank_waits_for_this_one(
    tmp_path: Path, monkeypatch
) -> None:
    """The export holds Python's lock, so that a rank inside an operation would take this one for
    dead."""
    events: list = []
    trainer = make_trainer("sft", trace_steps=(1,), trace_folder=tmp_path, events=events)
    guard = trainer.mesh.all_ranks.guard

    @contextlib.contextmanager
    def noted(what: str):
        with guard(what):
            yield
        events.append((f"end of {what}", {}))

    monkeypatch.setattr(trainer.mesh.all_ranks, "guard", noted)
    trainer.step_now(make_batch(4, step=1))
    assert [name for name, _ in events] == ["end of step 1", "trace.written"]


def test_a_full_disk_costs_the_trace_and_not_the_step(tmp_path: Path) -> None:
    folder, events = tmp_path / "traces", []
    folder.mkdir()
    (folder / "step-1.trace.json.gz.partial").symlink_to("/dev/full")
    trainer = make_trainer("sft", trace_steps=(1,), trace_folder=folder, events=events)
    assert trainer.step_now(make_batch(4, step=1)).num_updates == 1
    ((kind, told),) = events
    assert kind == "trace.failed" and "No space left" in told["error"]
    assert not list(folder.iterdir()), "no part of a trace is left"


def test_a_trace_that_the_exporter_cut_short_is_not_kept(tmp_path: Path) -> None:
    """The exporter says nothing when the disk is full."""

    def export(path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"name": "aten::mm"')

    with pytest.raises(ValueError, match="room on the disk"):
        write_trace(export, tmp_path / "step-1.trace.json.gz")
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="ends in the middle"):
        check_whole(tmp_path / "empty")


def test_steps_that_a_stage_does_not_have_cannot_be_traced() -> None:
    for steps in ([0], [11], [3, 12]):
        with pytest.raises(ValueError, match="from 1 to 10"):
            TrainerConfig(steps=10, trace_steps=tuple(steps))
    assert TrainerConfig(steps=10, trace_steps=(1, 10)).trace_steps == (1, 10)


def test_time_is_split_by_what_covers_it() -> None:
    """Kernels of two streams: communication from 1 to 4 s, of which compute hides the seconds from
    2 to 3."""
    works = [
        Work(name="ampere_gemm", start_s=0.0, end_s=1.0),
        Work(name="ncclDevKernel_AllGather_RING_LL(x)", start_s=1.0, end_s=3.0),
        Work(name="flash_fwd", start_s=2.0, end_s=3.0),
        Work(name="ncclDevKernel_ReduceScatter_Sum_f32", start_s=2.5, end_s=4.0),
        Work(name="flash_bwd", start_s=6.0, end_s=7.0),
    ]
    told = summarize(works, wall_s=8.0)
    assert told == {
        "seconds": 8.0,
        "compute_s": 3.0,
        "communication_s": 3.0,
        "exposed_s": 2.0,
        "idle_s": 3.0,
    }
    assert summarize([], wall_s=1.0)["idle_s"] == 1.0
