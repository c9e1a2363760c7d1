"""Where a pod meets: what the config takes, and what it refuses by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from gyre.distributed.config import RendezvousConfig

ETCD = {"kind": "etcd", "endpoints": ["http://10.0.0.1:2379", "https://[::1]:2379"]}


def test_an_etcd_of_several_endpoints() -> None:
    config = RendezvousConfig.model_validate(ETCD)
    assert config.endpoints == ("http://10.0.0.1:2379", "https://[::1]:2379")
    assert RendezvousConfig().kind == "store"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"endpoints": []}, "kind = 'etcd' needs endpoints"),
        ({"kind": "store"}, "endpoints and files are for kind = 'etcd'"),
        ({"cert_file": "a.pem"}, "cert_file and key_file come together"),
        ({"endpoints": ["etcd://h:2379"]}, "'etcd://h:2379': need http://HOST:PORT"),
        ({"endpoints": ["http://h"]}, "'http://h': need http://HOST:PORT"),
        ({"endpoints": ["h:2379"]}, "need http://HOST:PORT"),
        ({"endpoints": ["http://h:port"]}, "'http://h:port': Port could not be cast"),
        ({"endpoints": ["http://h:2379/v3"]}, "nothing after them"),
        ({"endpoints": ["http://h:2379?a=b"]}, "nothing after them"),
        ({"endpoints": ["https://me:hidden@h:2379"]}, "'h:2379': a user and a password are not"),
        ({"lease_s": 0.5}, "greater than or equal to 1"),
    ],
)
def test_what_is_refused_is_named_and_no_password_is_shown(
    changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        RendezvousConfig.model_validate({**ETCD, **changed})
    (error,) = refused.value.errors()
    assert reason in error["msg"] and "hidden" not in error["msg"]


def test_a_process_needs_no_torch_for_a_rendezvous() -> None:
    """Unless it is the one over a TCPStore: a sidecar's environment may have another torch."""
    modules = "config", "rendezvous.local", "rendezvous.etcd", "rendezvous.metadata_store"
    code = f"import sys, {', '.join(f'gyre.distributed.{name}' for name in modules)}; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
