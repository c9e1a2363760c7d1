"""gyre doctor. In: this machine. Out: one line per optional capability: whether it is available,
why not, and the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gyre.cli.doctor_serving import find_serving
from gyre.cli.finding import Finding
from gyre.observability.hardware import describe_hardware

MARKS = {"ok": "✓", "weaker": "~", "missing": "✗"}
EXTRAS = {
    "tensorboard": ("track", "observe.tensorboard = true"),
    "wandb": ("track", 'observe.wandb = "offline" or "online"'),
    "datasets": ("data", 'data.source = "datasets"'),
    "ray": ("cluster", 'cluster.kind = "ray"'),
    "bitsandbytes": ("moments", 'trainer.moments = "8_bit"'),
    "pyarrow": ("data", 'data.source = "parquet"'),
}


def run_doctor(*, quiet: bool) -> Mapping[str, Any]:
    found = [*_hardware(), *_torch(), *_tiles(), find_c_kernels(), *find_serving()]
    findings = [*found, _sandbox(), *_packages()]
    if not quiet:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{MARKS[finding.verdict]} {finding.what:<{width}}  {finding.detail}")
            if finding.advice:
                print(f"  {'':<{width}}  → {finding.advice}")
    return {"findings": [asdict(finding) for finding in findings]}


def _hardware() -> list[Finding]:
    facts = describe_hardware()
    memory = facts["memory_available_bytes"] or 0
    bf16 = facts["flags"]["bf16"]
    return [
        Finding(what="processor", verdict="ok", detail=f"{facts['cpu']}, {facts['cores']} cores"),
        Finding(
            what="bfloat16 on CPU",
            verdict="ok" if bf16 else "weaker",
            detail="multiplied by the hardware"
            if bf16
            else "not in this processor; runs use float32",
        ),
        Finding(
            what="memory",
            verdict="ok" if memory > 4 << 30 else "weaker",
            detail=f"{memory / 2**30:.1f} GiB available",
            advice="" if memory > 4 << 30 else "the examples under configs/ need about 2 GiB",
        ),
        Finding(
            what="disk",
            verdict="ok",
            detail=f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free here",
        ),
    ]


def _torch() -> list[Finding]:
    import torch

    threads = torch.get_num_threads()
    counted = f"{threads} thread{'s' if threads > 1 else ''}"
    found = [Finding(what="torch", verdict="ok", detail=f"{torch.__version__}, {counted}")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            detail = f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            found.append(Finding(what=f"cuda:{index}", verdict="ok", detail=detail))
        return found
    built = torch.version.cuda
    why = (
        f"torch is built for CUDA {built}, but no driver or device answers"
        if built
        else "this torch is a CPU build"
    )
    return [
        *found,
        Finding(
            what="cuda",
            verdict="missing",
            detail=why,
            advice="runs use the CPU; nothing to do for it",
        ),
    ]


def _tiles() -> list[Finding]:
    from gyre.kernels.cpu.process import LIMIT, tiles_are_hidden

    if not tiles_are_hidden():
        return []
    detail = "announced by this processor, whose hypervisor hides their size"
    advice = f"runs set {LIMIT} and use AVX-512; other programs on torch may end with SIGILL"
    return [Finding(what="AMX tiles", verdict="weaker", detail=detail, advice=advice)]


def find_c_kernels() -> Finding:
    """Build the kernels that a run on this CPU would build, unless cached."""
    from gyre.kernels.cpu import build

    names = set()
    for source in build.LIBRARIES:
        built = build.load(source, bf16=describe_hardware()["flags"]["bf16"])
        if isinstance(built, build.Unavailable):
            advice = (
                "runs on the CPU take torch's kernels, several times slower; gcc 12 or "
                "clang builds ours"
            )
            return Finding(what="C kernels", verdict="weaker", detail=built.reason, advice=advice)
        names.add(built.instructions.name)
    detail = (
        f"built for {' and '.join(names)} by {build.find_compiler()}, kept in "
        f"{build.cache_folder()}"
    )
    return Finding(what="C kernels", verdict="ok", detail=detail)


def _sandbox() -> Finding:
    from gyre.rewards.sandbox.executors import choose_mode

    said: dict[str, Any] = {}
    mode = choose_mode("auto", emit=lambda kind, **fields: said.update(fields))
    weak = mode == "weak"
    advice = (
        f"{said['reason']}; rewards.sandbox = 'strong' refuses to run code like this"
        if weak
        else ""
    )
    return Finding(
        what="code sandbox",
        verdict="weaker" if weak else "ok",
        detail=said["isolation"],
        advice=advice,
    )


def _packages() -> list[Finding]:
    found = []
    for package, (extra, used_by) in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            advice = f"for {used_by}: pip install 'gyre-rl[{extra}]'"
            found.append(
                Finding(what=package, verdict="missing", detail="not installed", advice=advice)
            )
        else:
            found.append(
                Finding(what=package, verdict="ok", detail=importlib.metadata.version(package))
            )
    return found
