"""Ways of a pod's weights that its devices or engines have not are refused by name."""

from __future__ import annotations

import itertools

import pytest

from gyre.core.errors import ConfigError
from gyre.launch.placement.pod_workers import refuse_transport

ENGINES = ("native", "vllm")
REFUSED = {
    ("cuda-ipc", False, True, "native"): "this run is on a CPU",
    ("cuda-ipc", False, False, "native"): "this run is on a CPU",
    ("cuda-ipc", False, True, "vllm"): "this run is on a CPU",
    ("cuda-ipc", False, False, "vllm"): "this run is on a CPU",
    ("cuda-ipc", True, True, "vllm"): "vLLM's workers read shared memory",
    ("cuda-ipc", True, False, "vllm"): "vLLM's workers read shared memory",
    ("nccl", True, True, "native"): "NCCL takes one process of a GPU",
    ("nccl", True, True, "vllm"): "NCCL takes one process of a GPU",
    ("nccl", True, False, "vllm"): "vLLM's workers read shared memory",
    ("nccl", False, True, "vllm"): "vLLM's workers read shared memory",
    ("nccl", False, False, "vllm"): "vLLM's workers read shared memory",
}


@pytest.mark.parametrize("transport", ["shm", "cuda-ipc", "nccl"])
def test_what_cannot_be_is_refused_and_all_else_is_not(transport):
    for on_gpus, colocated, engine in itertools.product((False, True), (False, True), ENGINES):
        given = {"on_gpus": on_gpus, "colocated": colocated, "engine": engine}
        match = REFUSED.get((transport, on_gpus, colocated, engine))
        if match is None:
            refuse_transport(transport, **given)
            continue
        with pytest.raises(ConfigError, match=match) as caught:
            refuse_transport(transport, **given)
        assert "cluster.weight_transport = 'shm'" in caught.value.hint
