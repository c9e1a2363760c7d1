"""Hub names: whether the hub is reachable, and the local folder of a repository. In: a name such as
"owner/model". Out: a folder of the hub's cache, or an InputError within two seconds without network
and cached copy. Imports nothing heavy."""

from __future__ import annotations

import difflib
import re
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gyre.core.errors import InputError

REACH_TIMEOUT_S = 1.0  # to open a connection; a name server that does not answer counts too
_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")


def is_hub_name(text: str) -> bool:
    """Return whether it is a valid repository name: NAME or OWNER/NAME."""
    return _NAME.fullmatch(text) is not None and not text.endswith(("-", ".", ".git"))


def is_offline() -> bool:
    """Return whether the hub's own switch, HF_HUB_OFFLINE, is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_reachable(timeout_s: float = REACH_TIMEOUT_S) -> bool:
    """Return whether a connection to the hub, or to its proxy, opens in time. False with
    HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    if is_offline():
        return False
    end = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(end.scheme)
    if proxy and end.hostname and not proxy_bypass(end.hostname):
        end = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = end.hostname or "", end.port or (80 if end.scheme == "http" else 443)
    opened: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except OSError:
            return
        opened.append(True)

    # Looking a name up has no deadline of its own, so the wait for it has.
    thread = threading.Thread(target=connect, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(opened)


def hub_folder(
    name: str, patterns: Sequence[str], *, what: str, revision: str | None = None
) -> Path:
    """Return the folder of a model repository, with the files of `patterns` downloaded, or the
    cached one when the hub is unreachable. `revision` is a branch, tag or commit; None the newest.

    `what` is "model" or "tokenizer". Raises InputError for an unknown repository, or without
    network and copy.
    """
    from huggingface_hub import snapshot_download  # deferred: only hub names need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reachable = is_reachable()
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=not reachable,
            )
        )
    except LocalEntryNotFoundError as fault:
        raise InputError(no_copy(name, what), hint=offline_hint(what)) from fault
    except (HfHubHTTPError, HFValidationError, OSError) as fault:
        raise InputError(
            f"{name} is neither a folder here nor a {what} that the hub gave us: "
            f"{_first_line(fault)}",
            hint="check the name, the network, and HF_TOKEN for gated repositories; or point at a "
            "local folder",
        ) from fault


def has_copy(name: str, *, kind: str = "model") -> bool:
    """Return whether the hub's cache has a snapshot of the repository."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


def refuse_unknown(name: str, what: str) -> None:
    """Raise InputError when a hub name is unavailable: neither network nor cached copy. Downloads
    nothing."""
    if not has_copy(name) and not is_reachable():
        raise InputError(no_copy(name, what), hint=offline_hint(what))


def no_copy(name: str, what: str) -> str:
    """Return the message for a name that is not a folder and cannot be downloaded."""
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the hub cannot be reached"
    return (
        f"{what} {name}: there is no such folder here, {why}, and the hub's cache has no copy "
        "of that name"
    )


def offline_hint(what: str) -> str:
    command = "hf download NAME" + (" --repo-type dataset" if what == "data set" else "")
    return (
        "check the path or the network; where there is none, download it elsewhere first "
        f"(`{command}`)"
    )


def near_folders(path: Path) -> str:
    """Return "; did you mean …" with the neighbors of a missing path."""
    parent = path.parent
    if not parent.is_dir():
        return ""
    names = [entry.name for entry, _ in zip(parent.iterdir(), range(10_000), strict=False)]
    found = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(parent / name) for name in found)}?" if found else ""


def _first_line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
