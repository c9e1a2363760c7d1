"""Decide: turns what the user left open into numbers that fit this machine. Pure.

In: PlanInputs, Hardware. Out: Plan, with the reason of each number, or a ConfigError /
MemoryBudgetError that says what would fit. The phases are worked out by the same ledger that a run
obeys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.core.records import Phase
from gyre.core.rounding import ceil_div
from gyre.engine.config import PAGE_TOKENS
from gyre.memory.config import Residency
from gyre.memory.errors import advise_device, words
from gyre.memory.records import STAGING_BYTES, Budgets
from gyre.planner.batch_sizes import check_lengths, derive, longest_sequence
from gyre.planner.lighter import lighter
from gyre.planner.memory_model.components import predict_components, snapshot_bytes
from gyre.planner.memory_model.engine import make_engine
from gyre.planner.memory_model.job import TrainingJob, layout_of, make_job
from gyre.planner.memory_model.peaks import is_held, phase_order, start_moment, working_bytes
from gyre.planner.memory_model.phases import walk_ring, walk_start
from gyre.planner.plan import (
    ComponentPlan,
    DeviceKind,
    Dtype,
    Hardware,
    PhasePlan,
    Plan,
    PlanInputs,
    Saving,
    Sizes,
    best_dtype,
)
from gyre.planner.ways import join_ways, ways_out

MOST_RUNNING = {"cpu": 256, "cuda": 512}
# tokens; larger ones gain little speed and cost memory
PREFERRED_CHUNK = {"cpu": 8192, "cuda": 16384}
DEVICE_SHARE = {"cpu": 0.6, "cuda": 0.9}  # of what is free now
# of what is available now; on a CPU it comes on top of the device share
HOST_SHARE = {"cpu": 0.2, "cuda": 0.6}
DISK_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What is settled before sizes are tried."""

    device: DeviceKind
    dtype: Dtype
    threads: int
    budgets: Budgets
    page_tokens: int
    max_running: int
    saving: Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One way to run that fits."""

    residency: Residency
    tokens_per_chunk: int
    kv_pages: int
    components: tuple[ComponentPlan, ...]
    working: dict[Phase, int]
    start: PhasePlan
    phases: tuple[PhasePlan, ...]


def make_plan(inputs: PlanInputs, hardware: Hardware) -> Plan:
    """Everything that was open is decided; the same inputs and hardware give the same plan."""
    check_lengths(inputs)
    base, reasons = _settle_base(inputs, hardware)
    per_update = (
        inputs.sequences_per_update or inputs.prompts_per_step * inputs.completions_per_prompt
    )
    given = inputs.sequences_per_update is not None
    reasons["sequences_per_update"] = (
        _source(inputs, "sequences_per_update") if given else "all sequences of a step"
    )
    trial = _fit_or_refuse(inputs, base, per_update)
    reasons |= _explain_trial(inputs, base, trial)
    sizes = Sizes(
        prompts_per_step=inputs.prompts_per_step,
        completions_per_prompt=inputs.completions_per_prompt,
        sequences_per_update=per_update,
        tokens_per_chunk=trial.tokens_per_chunk,
    )
    derived = derive(sizes, inputs, max_running=base.max_running)
    return Plan(
        objective=inputs.objective,
        device=base.device,
        dtype=base.dtype,
        threads=base.threads,
        page_tokens=base.page_tokens,
        kv_pages=trial.kv_pages,
        max_running=base.max_running,
        residency=trial.residency,
        device_budget_bytes=base.budgets.device_bytes,
        host_budget_bytes=base.budgets.host_bytes,
        disk_budget_bytes=base.budgets.disk_bytes,
        sizes=sizes,
        derived=derived,
        components=trial.components,
        working=trial.working,
        start=trial.start,
        phases=trial.phases,
        reasons=reasons,
        notes=(*inputs.remarks, *derived.notes, *_notes(inputs, base, hardware, trial)),
        hardware=hardware,
    )


def _source(inputs: PlanInputs, name: str) -> str:
    """Return where a number that was not decided here comes from."""
    return inputs.not_given.get(name, "given")


def _settle_base(inputs: PlanInputs, hardware: Hardware) -> tuple[_Base, dict[str, str]]:
    reasons = {
        name: _source(inputs, name)
        for name in ("objective", "prompts_per_step", "completions_per_prompt")
    }
    if inputs.device == "cuda" and hardware.device != "cuda":
        raise ConfigError(
            "device = cuda, but no CUDA device is usable here", hint="run `gyre doctor`, or use cpu"
        )
    device = inputs.device or hardware.device
    reasons["device"] = "given" if inputs.device else f"the best here: {hardware.device_name}"
    bf16 = hardware.bf16 and device == hardware.device
    dtype = inputs.dtype or best_dtype(device, bf16=bf16)
    what = "it multiplies bfloat16" if bf16 else "it has no bfloat16 products"
    settled = inputs.dtype is not None and "dtype" not in inputs.not_given
    reasons["dtype"] = "given" if settled else f"the best on this {device}: {what}"
    threads = inputs.threads or hardware.cores
    reasons["threads"] = "given" if inputs.threads else "cores that this process may use"
    budgets = _budgets(inputs, hardware, device, dtype, reasons)
    sequences = inputs.prompts_per_step * inputs.completions_per_prompt
    max_running = inputs.max_running or min(sequences, MOST_RUNNING[device])
    reasons["max_running"] = (
        _source(inputs, "max_running")
        if inputs.max_running
        else f"a step's {sequences} sequences, at most " + str(MOST_RUNNING[device])
    )
    reasons["page_tokens"] = "given" if inputs.page_tokens else "default"
    base = _Base(
        device=device,
        dtype=dtype,
        threads=threads,
        budgets=budgets,
        page_tokens=inputs.page_tokens or PAGE_TOKENS[device],
        max_running=max_running if inputs.online else 0,
        saving=hardware.saving if device == hardware.device else "torch_cpu",
    )
    return base, reasons


def _budgets(
    inputs: PlanInputs,
    hardware: Hardware,
    device: DeviceKind,
    dtype: Dtype,
    reasons: dict[str, str],
) -> Budgets:
    free = hardware.device_free_bytes if device == "cuda" else hardware.host_available_bytes
    shares = {
        "device": (
            inputs.device_budget_bytes,
            DEVICE_SHARE[device],
            free,
            "free on the GPU" if device == "cuda" else "available memory",
        ),
        "host": (
            inputs.host_budget_bytes,
            HOST_SHARE[device],
            hardware.host_available_bytes,
            "available host memory",
        ),
        "disk": (inputs.disk_budget_bytes, DISK_SHARE, hardware.disk_free_bytes, "free disk"),
    }
    sizes: dict[str, int] = {}
    for tier, (asked, share, there, what) in shares.items():
        key = f"{tier}_budget_bytes"
        if tier == "disk" and not inputs.disk_tier:
            sizes[tier], reasons[key] = 0, "no memory.disk_folder"
        elif asked is not None:
            sizes[tier], reasons[key] = asked, "given"
        else:
            sizes[tier], reasons[key] = int(share * there), f"{share:.0%} of {words(there)} {what}"
    if inputs.snapshot_background:
        job = make_job(inputs, dtype=dtype, saving=hardware.saving, engine=None)
        sizes["host"] -= (snapshots := snapshot_bytes(job, layout_of(inputs, 0)))
        reasons["host_budget_bytes"] += f", less {words(snapshots)} that snapshots are staged in"
        if sizes["host"] < 0:
            raise MemoryBudgetError(
                f"background snapshots need {words(snapshots)} of host memory, "
                f"{words(-sizes['host'])} more than the "
                "host budget",
                hint="set snapshot.background = false, or raise memory.host_budget_bytes",
            )
    staging = STAGING_BYTES if device == "cuda" else 0
    return Budgets(
        device_bytes=sizes["device"],
        host_bytes=sizes["host"],
        disk_bytes=sizes["disk"],
        staging_bytes=staging,
        device_total_bytes=hardware.device_total_bytes
        if device == hardware.device
        else hardware.host_total_bytes,
    )


def _job(inputs: PlanInputs, base: _Base) -> TrainingJob:
    engine = make_engine(
        inputs,
        dtype=base.dtype,
        saving=base.saving,
        page_tokens=base.page_tokens,
        max_running=base.max_running,
        running=base.max_running,
    )
    return make_job(inputs, dtype=base.dtype, saving=base.saving, engine=engine)


def _fit_or_refuse(inputs: PlanInputs, base: _Base, per_update: int) -> _Trial:
    """MemoryBudgetError with the changes of settings, each alone, under which it would fit."""

    def judge(changed: PlanInputs) -> _Trial | None:
        try:
            return _first_that_fits(changed, base, per_update)
        except MemoryBudgetError:
            return None

    try:
        return _first_that_fits(inputs, base, per_update)
    except MemoryBudgetError as error:
        ways = list(ways_out(lighter(inputs), judge))
        if not ways:
            raise
        raise MemoryBudgetError(
            error.message, hint=f"{join_ways(ways)}; else {error.hint}"
        ) from error


def _first_that_fits(inputs: PlanInputs, base: _Base, per_update: int) -> _Trial:
    """Everything resident with a chunk of good size, else moving what must make room, else ever
    smaller chunks."""
    chunks = _chunk_candidates(inputs, base.device, per_update)
    choices: Sequence[Residency] = (
        (inputs.residency,) if inputs.residency else ("resident", "spill")
    )
    refusal: MemoryBudgetError | None = None
    for residency in choices:
        for tokens in chunks:
            if len(choices) > 1 and residency == "resident" and 4 * tokens < chunks[0]:
                continue  # a much smaller chunk costs more than moving components does
            try:
                return _try(
                    inputs,
                    base,
                    residency,
                    tokens,
                    whole_kv=len(choices) > 1 and residency == "resident",
                )
            except MemoryBudgetError as error:
                refusal = error
    assert refusal is not None
    raise refusal


def _chunk_candidates(inputs: PlanInputs, device: DeviceKind, per_update: int) -> list[int]:
    if inputs.tokens_per_chunk is not None:
        return [inputs.tokens_per_chunk]
    longest = longest_sequence(inputs)
    tokens = max(longest, min(PREFERRED_CHUNK[device], per_update * longest))
    candidates = []
    while tokens > longest:
        candidates.append(tokens)
        tokens //= 2
    return [*candidates, longest]


def _try(
    inputs: PlanInputs, base: _Base, residency: Residency, tokens: int, *, whole_kv: bool
) -> _Trial:
    """Return the phases under these sizes. MemoryBudgetError if they don't fit."""
    job, layout = _job(inputs, base), layout_of(inputs, tokens)
    working = working_bytes(job, layout)
    predict = partial(
        predict_components, job, layout, device=base.device, disk_tier=inputs.disk_tier
    )
    bare = predict(kv_pages=0)
    pages = _kv_pages(inputs, base, job, residency, working["rollout"], bare, whole=whole_kv)
    components = predict(kv_pages=pages)
    cuda = base.device == "cuda"
    phases = walk_ring(
        components, working, base.budgets, residency, phase_order(job), keeps_pages=cuda
    )
    start = start_moment(job, layout, components, phases[0].device)
    _check_start(start.allocated_bytes, base.budgets)
    return _Trial(
        residency=residency,
        tokens_per_chunk=tokens,
        kv_pages=pages,
        components=components,
        working=working,
        start=walk_start(components, phases[0], start.allocated_bytes),
        phases=phases,
    )


def _check_start(peak_bytes: int, budgets: Budgets) -> None:
    if peak_bytes > budgets.device_bytes:
        raise MemoryBudgetError(
            f"a stage cannot begin in {words(budgets.device_bytes)} of the device: its models need "
            f"{words(peak_bytes)} while they are made, one after the other",
            hint=f"{advise_device(budgets, peak_bytes)}, or set memory.residency = 'phase'",
        )


def _pages_wanted(inputs: PlanInputs, base: _Base) -> tuple[int, int]:
    """Pages for one sequence of full length, and for all that run at the same time."""
    each = ceil_div(longest_sequence(inputs), base.page_tokens)
    return each, each * base.max_running


def _kv_pages(
    inputs: PlanInputs,
    base: _Base,
    job: TrainingJob,
    residency: Residency,
    working: int,
    bare: Sequence[ComponentPlan],
    *,
    whole: bool,
) -> int:
    """Return as many as can be used; fewer where the device does not hold them beside the `bare`
    components, which have none, but enough for one sequence."""
    if job.engine is None:
        return 0
    if inputs.kv_pages is not None:
        return inputs.kv_pages
    each, wanted = _pages_wanted(inputs, base)
    if inputs.kv_bytes is not None:
        if (pages := inputs.kv_bytes // job.engine.page_bytes) < each:
            raise ConfigError(
                f"engine.kv_bytes = {inputs.kv_bytes} are {pages} pages, and one sequence of "
                f"{longest_sequence(inputs)} tokens takes {each}",
                hint=f"give {each * job.engine.page_bytes} or more, or lower rollout.max_tokens",
            )
        return pages
    if whole:
        return wanted
    beside = sum(
        component.size_bytes
        for component in bare
        if component.name != "engine.kv" and is_held(component, "rollout", residency)
    )
    room = (base.budgets.device_bytes - working - beside) // job.engine.page_bytes - 1
    return max(each, min(wanted, room))


def _explain_trial(inputs: PlanInputs, base: _Base, trial: _Trial) -> dict[str, str]:
    longest = longest_sequence(inputs)
    reasons = {
        name: _source(inputs, name) for name in ("tokens_per_chunk", "kv_pages", "residency")
    }
    if inputs.tokens_per_chunk is None:
        train = words(trial.working["train"])
        reasons["tokens_per_chunk"] = (
            f"largest that fits with {train} of activations, at least {longest}"
        )
    if not inputs.online:
        reasons["kv_pages"] = reasons["max_running"] = reasons["page_tokens"] = (
            "nothing is generated"
        )
    elif inputs.kv_pages is None and inputs.kv_bytes is not None:
        reasons["kv_pages"] = f"engine.kv_bytes = {inputs.kv_bytes}"
    elif inputs.kv_pages is None:
        each, wanted = _pages_wanted(inputs, base)
        all_run = f"{base.max_running} running × {each} pages of {base.page_tokens} tokens"
        full = trial.kv_pages == wanted
        reasons["kv_pages"] = (
            all_run
            if full
            else f"what the device budget leaves; {all_run} = {wanted} would all fit in"
        )
    if inputs.residency is None:
        reasons["residency"] = {
            "resident": "everything fits on the device at once",
            "spill": "not everything fits at once: the least needed moves out",
            "phase": "given",
        }[trial.residency]
    return reasons


def _notes(inputs: PlanInputs, base: _Base, hardware: Hardware, trial: _Trial) -> list[str]:
    notes = []
    if base.threads > hardware.cores:
        notes.append(f"{base.threads} threads on {hardware.cores} cores get in each other's way")
    if base.dtype == "bfloat16" and not hardware.bf16 and base.device == "cpu":
        notes.append("this CPU has no bfloat16 products: float32 is faster here")
    each, wanted = _pages_wanted(inputs, base)
    if inputs.online and trial.kv_pages < wanted:
        notes.append(
            f"KV pages for {trial.kv_pages // each} of {base.max_running} running completions at "
            "full length: "
            "longer ones will be preempted"
        )
    moved = sum(phase.moved_bytes for phase in trial.phases)
    if moved:
        notes.append(f"each iteration copies {words(moved)} between tiers")
    return notes
