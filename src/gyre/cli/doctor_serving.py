"""gyre doctor on serving. In: this machine. Out: findings: where engines would run and how many,
TLS, the port, and how many connections may be open."""

from __future__ import annotations

import importlib.util
import resource
import socket
from contextlib import closing

from gyre.cli.finding import Finding
from gyre.observability.hardware import describe_hardware

HOST, PORT = "127.0.0.1", 8000  # where `gyre serve` listens unless told otherwise
SPARE_FILES = 512  # for weights, sockets of engines and libraries
ENOUGH_FILES = 1024 + SPARE_FILES  # below it a busy server runs out


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
