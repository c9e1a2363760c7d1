"""Rewards config: parts by kind, names, refusals; isolation that a machine refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from gyre.rewards.config import RewardsConfig
from gyre.rewards.sandbox import executors
from rewards_cases import Events


def test_parts_are_chosen_by_kind_and_named_after_it():
    config = RewardsConfig.model_validate(
        {"parts": [{"kind": "answer"}, {"kind": "format", "weight": 0.2, "name": "shape"}]}
    )
    assert [(part.kind, part.name, part.weight) for part in config.parts] == [
        ("answer", "answer", 1.0),
        ("format", "shape", 0.2),
    ]
    assert [part.kind for part in RewardsConfig().parts] == ["answer"] and RewardsConfig().parts[
        0
    ].name == "answer"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"kind": "answer"}, {"kind": "answer"}], 'two parts are named "answer"'),
        ([{"kind": "answr"}], "answr"),
        ([{"kind": "answer", "tolerence": 1.0}], "did you mean 'tolerance'"),
        ([{"kind": "function", "path": "no_colon"}], "module:function"),
        ([{"kind": "length", "soft_tokens": 5, "max_tokens": 5}], "less than max_tokens"),
        ([{"kind": "format", "limit_s": 0}], "greater than 0"),
    ],
)
def test_refusals(parts, said):
    with pytest.raises(ValidationError) as refusal:
        RewardsConfig.model_validate({"parts": parts})
    assert said in str(refusal.value)


# A process in a user namespace that may hold no further ones: the kernel refuses, as on a machine
# that forbids them.
REFUSED = """
import contextlib, json, os, sys
from gyre.core.errors import ConfigError
from gyre.rewards.sandbox.executors import Cell, choose_mode
from gyre.rewards.fork_server import kernel
from gyre.rewards.sandbox.records import Limits, Program

user, group = os.getuid(), os.getgid()
with contextlib.suppress(OSError):
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_one_user(0, user, group)
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
events = []
try:
    mode = choose_mode(sys.argv[1], emit=lambda kind, **fields: events.append([kind, fields]))
    cell = Cell(mode)
    result = cell.run(Program(source="print(6 * 7)"), limits=Limits())
    cell.close()
    print(json.dumps({"mode": mode, "events": events, "stdout": result.stdout, "detail": result.detail}))
except ConfigError as error:
    print(json.dumps({"error": error.as_dict()}))
"""


def _refused(wish: str) -> dict:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PATH": "/nowhere",
    }
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, wish], env=environment, capture_output=True, timeout=60
    )
    return json.loads(done.stdout)


def test_strong_refuses_where_the_machine_does():
    error = _refused("strong")["error"]
    assert error["kind"] == "config" and "refuses the isolation" in error["message"]
    assert "user namespaces" in error["hint"]


def test_auto_falls_back_with_an_event_and_still_runs():
    told = _refused("auto")
    assert told["mode"] == "weak" and told["stdout"] == "42\n"
    ((kind, fields),) = told["events"]
    assert kind == "sandbox.weak" and "strong: " in fields["reason"]
    assert "network, files and user are shared" in fields["isolation"]


def test_weak_by_choice_is_said_too():
    events = Events()
    assert executors.choose_mode("weak", emit=events.emit) == "weak"
    assert events.kinds() == ["sandbox.weak"]
