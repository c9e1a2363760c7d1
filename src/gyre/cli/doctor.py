"""gyre doctor. In: this machine. Out: one line per optional capability: whether it is available,
why not, and the remedy. Of serving: where engines would run and how many, TLS, the port, and how
many connections may be open."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import resource
import shutil
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

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
HOST, PORT = "127.0.0.1", 8000  # where `gyre serve` listens by default
SPARE_FILES = 512  # for weights, sockets of engines and libraries
ENOUGH_FILES = 1024 + SPARE_FILES  # below it a busy server runs out


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the answer."""

    what: str
    verdict: Literal["ok", "weaker", "missing"]
    detail: str
    advice: str = ""


def run_doctor(*, quiet: bool) -> Mapping[str, Any]:
    found = [*_hardware(), *_torch(), *_tiles(), find_c_kernels(), *find_serving()]
    findings = [*found, _sandbox(), *_packages(), find_vllm()]
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


def find_vllm() -> Finding:
    """Return whether the environment of vLLM's sidecar is there. Imports nothing of it."""
    from gyre.launch.sidecar import find_device
    from gyre.sidecars.vllm.environment import default_folder, find_environment
    from gyre.sidecars.vllm.versions import build_for

    build = build_for(find_device())
    folder = default_folder(build)
    found = find_environment(folder)
    if found is None:
        half = " (half-made)" if folder.exists() else ""
        return Finding(
            what="vLLM sidecar",
            verdict="missing",
            detail=f"no environment in {folder}{half}",
            advice="for engine.kind = 'vllm': gyre sidecar install vllm",
        )
    detail = f"vLLM {found.version} on {build.device}, torch {found.torch}, in {folder}"
    return Finding(what="vLLM sidecar", verdict="ok", detail=detail)


def find_serving() -> list[Finding]:
    """Return what serving can do here."""
    return [_replicas(), _tls(), find_port(HOST, PORT), judge_files(_file_limit())]


def _replicas() -> Finding:
    import torch

    from gyre.planner.hardware import usable_cores

    facts = describe_hardware()
    cores = usable_cores(facts["cores"], facts["cores_quota"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return judge_replicas(gpus=gpus, cores=cores)


def judge_replicas(*, gpus: int, cores: int) -> Finding:
    """Return where engines run, and the largest --replicas that makes sense. Pure."""
    if gpus:
        most = f"--replicas up to {gpus}, each on a GPU of its own"
        detail = f"on {gpus} GPU{'s' if gpus > 1 else ''}: {most}"
        return Finding(what="serving", verdict="ok", detail=detail)
    shared = f"--replicas up to {cores}, which share {cores} core{'s' if cores > 1 else ''}"
    return Finding(
        what="serving",
        verdict="ok",
        detail=f"on the CPU: {shared}",
        advice="`gyre serve MODEL --dry-run` says what a model takes and how much fits",
    )


def _tls() -> Finding:
    if importlib.util.find_spec("_ssl") is None:
        return Finding(
            what="TLS",
            verdict="missing",
            detail="this Python was built without OpenSSL",
            advice="hub names cannot be fetched; take a Python with the ssl module",
        )
    import ssl

    newest = "TLS 1.3" if ssl.HAS_TLSv1_3 else "TLS 1.2"
    return Finding(
        what="TLS",
        verdict="ok" if ssl.HAS_TLSv1_3 else "weaker",
        detail=f"{ssl.OPENSSL_VERSION}, up to {newest}",
        advice="" if ssl.HAS_TLSv1_3 else "a newer OpenSSL has TLS 1.3",
    )


def find_port(host: str, port: int) -> Finding:
    """Return whether `gyre serve` could listen there now. The port is free again afterwards."""
    what = f"port {port}"
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            listener.bind((host, port))
        except OSError as error:
            return Finding(
                what=what,
                verdict="weaker",
                detail=f"{host}:{port} cannot be had: {error.strerror or error}",
                advice="give gyre serve another --port, or 0 for a free one",
            )
    return Finding(what=what, verdict="ok", detail=f"free on {host}, where gyre serve listens")


def _file_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def judge_files(limit: int | None) -> Finding:
    """Return how many connections a server can have open; None is no limit. Pure."""
    if limit is None:
        return Finding(what="connections", verdict="ok", detail="no limit of open files")
    most = max(0, limit - SPARE_FILES)
    detail = f"about {most:,} at the same time: {limit:,} files may be open"
    if limit >= ENOUGH_FILES:
        return Finding(what="connections", verdict="ok", detail=detail)
    advice = "raise the limit before gyre serve: ulimit -n 65536"
    return Finding(what="connections", verdict="weaker", detail=detail, advice=advice)
