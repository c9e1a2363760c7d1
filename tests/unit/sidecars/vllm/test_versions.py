"""Two versions of vLLM, and no other."""

from __future__ import annotations

import pytest

from gyre.core.errors import ConfigError
from gyre.sidecars.vllm.versions import BUILDS, build_for, find_build


def test_each_build_is_found_by_its_version_and_device() -> None:
    for build in BUILDS:
        assert build_for(build.device) is build
        assert find_build(f"{build.version}+local", device=build.device) is build


@pytest.mark.parametrize(("version", "device"), [("0.29.0", "cpu"), ("0.30.0", "cuda")])
def test_another_version_is_refused_by_name(version: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} on {device}: Gyre drives 0.25.1"):
        find_build(version, device=device)


def test_what_a_build_cannot_do_is_stated() -> None:
    cpu, cuda = build_for("cpu").abilities(), build_for("cuda").abilities()
    assert not cpu.draws_by_position and not cpu.raw_logprobs and not cpu.prepares_on_device
    assert cpu.commit_policies == ("drain",) and cpu.sleep_levels == () != cuda.sleep_levels
