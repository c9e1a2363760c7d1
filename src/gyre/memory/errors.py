"""Memory errors: the messages for each "does not fit". In: the ledger and the request. Out: always
a MemoryBudgetError.

Each names the components with their bytes, the budget, and the nearest setting that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from gyre.core.errors import MemoryBudgetError
from gyre.core.records import Phase, Tier
from gyre.memory.records import Budgets, Entry, Ledger, Point


def words(size_bytes: int) -> str:
    """Format bytes with three digits: 1536 → "1.50 KiB"."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.2f} {unit}"


def name_sizes(entries: Sequence[Entry]) -> str:
    largest_first = sorted(entries, key=lambda entry: (-entry.size_bytes, entry.name))
    return (
        ", ".join(f"{entry.name} {words(entry.size_bytes)}" for entry in largest_first)
        or "no components"
    )


def holds(budgets: Budgets, device_bytes: int) -> bool:
    """Return whether the device is that large, as far as is known."""
    return budgets.device_total_bytes is None or device_bytes <= budgets.device_total_bytes


def advise_device(budgets: Budgets, needed_bytes: int) -> str:
    """Return the remedy where the device's budget is too small for `needed_bytes`."""
    if holds(budgets, needed_bytes):
        return f"set memory.device_budget_bytes to at least {needed_bytes}"
    return f"ask less of the device, which has {words(budgets.device_total_bytes or 0)} in all"


def refuse_device(
    ledger: Ledger,
    phase: Phase,
    *,
    needed: Sequence[Entry],
    staying: Sequence[Entry],
    short_bytes: int,
) -> NoReturn:
    budget = ledger.budgets.device_bytes
    text = f"phase {phase} does not fit on the device: it needs {name_sizes(needed)}"
    if working := ledger.working.get(phase, 0):
        text += f" and {words(working)} of working memory"
    if staying:
        text += f", beside what stays there: {name_sizes(staying)}"
    text += f"; the budget is {words(budget)}, {words(short_bytes)} too little"
    needed_bytes = budget + short_bytes
    hint = f"{advise_device(ledger.budgets, needed_bytes)}, or lower the sizes that the phase needs"
    if ledger.residency == "resident" and short_bytes <= sum(
        entry.size_bytes for entry in staying if entry.leave
    ):
        larger = (
            f", or memory.device_budget_bytes = {needed_bytes}"
            if holds(ledger.budgets, needed_bytes)
            else ""
        )
        hint = f'set memory.residency = "spill", which fits{larger}'
    raise MemoryBudgetError(text, hint=hint)


def refuse_start(ledger: Ledger, start: Point) -> NoReturn:
    """Raise the error for components that already exceed the budgets."""
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    over = [
        f"{words(getattr(start, f'{tier}_bytes'))} on {tier} "
        f"({name_sizes([entry for entry in ledger.entries if entry.tier == tier])}), "
        f"budget {words(getattr(ledger.budgets, f'{tier}_bytes'))}"
        for tier in tiers
        if getattr(start, f"{tier}_bytes") > getattr(ledger.budgets, f"{tier}_bytes")
    ]
    keys = " and ".join(
        f"memory.{tier}_budget_bytes to at least {getattr(start, f'{tier}_bytes')}"
        for tier in tiers
        if getattr(start, f"{tier}_bytes") > getattr(ledger.budgets, f"{tier}_bytes")
    )
    raise MemoryBudgetError(
        "the components are over the budget as they are: " + "; ".join(over), hint=f"set {keys}"
    )


def refuse_moves(
    ledger: Ledger,
    phase: Phase | None,
    waiting: Sequence[tuple[Entry, str]],
    *,
    nearest: Mapping[str, int],
) -> NoReturn:
    what = f"phase {phase}" if phase else "the moves asked for"
    moves = ", ".join(f"{e.name} ({words(e.size_bytes)}) {e.tier} → {tier}" for e, tier in waiting)
    now, budgets = ledger.usage(), ledger.budgets
    state = ", ".join(
        f"{tier} {words(getattr(now, f'{tier}_bytes'))} of "
        f"{words(getattr(budgets, f'{tier}_bytes'))}"
        for tier in ("device", "host", "disk")
    )
    keys = " and ".join(
        f"memory.{key.removesuffix('_bytes')}_budget_bytes = {size}"
        for key, size in nearest.items()
    )
    raised = f"set {keys}, or " if holds(ledger.budgets, nearest.get("device_bytes", 0)) else ""
    raise MemoryBudgetError(
        f"{what}: no order of these moves stays within the budgets: {moves}; held now: {state}",
        hint=f"{raised}let a component leave another way (memory.leave, memory.disk_folder)",
    )


def misfit(entry: Entry, tier: str, *, got: int, due: int) -> str:
    verb = "still holds" if got > due else "holds only"
    return (
        f"{entry.name} {verb} {got} bytes on {tier}, the ledger says {due} (it is on tier "
        f"{entry.tier})"
    )


def refuse_misfits(texts: Sequence[str]) -> NoReturn:
    raise MemoryBudgetError(
        "memory did not end up where it was moved: " + "; ".join(texts),
        hint="the first owner named keeps a reference that it should have dropped, or reports a "
        "wrong size",
    )


def refuse_unowned(*, unowned: int, fragments: int, outside: int, waited_s: float) -> NoReturn:
    """Raise the error for device memory that was not freed although every component was."""
    parts = {
        "unowned by any component (tensors that someone keeps)": unowned,
        "kept by the allocator in fragments": fragments,
        "outside torch (CUDA context, kernels, NCCL, another process)": outside,
    }
    owner, size = max(parts.items(), key=lambda item: item[1])
    raise MemoryBudgetError(
        f"device memory did not come back within {waited_s:.1f} s: {words(size)} {owner}; "
        + ", ".join(f"{words(size)} {owner}" for owner, size in parts.items()),
        hint="free it before the phase change, or raise memory.unowned_tolerance_bytes / "
        "outside_tolerance_bytes",
    )
