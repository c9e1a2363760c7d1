"""Ways of a pod's weights that its devices or engines have not are refused by name; which rank has
which device, and more ranks than devices."""

from __future__ import annotations

import itertools

import pytest
import torch

from gyre.core.errors import ConfigError
from gyre.launch.placement.pod_workers import PodWorkers, refuse_transport
from gyre.runconfig.run_config import parse_run_config

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


def pod_of(cluster: dict, tensor_ranks: int) -> PodWorkers:
    tree = {
        "model": {"path": "somewhere"},
        "run": {"device": "cuda"},
        "cluster": {"kind": "pod", **cluster},
        "engine": {"tensor_ranks": tensor_ranks},
    }
    return PodWorkers(parse_run_config(tree, where="run.toml"))


@pytest.mark.parametrize(
    ("cluster", "engines"),
    [
        ({"num_workers": 4}, [(0, 1), (2, 3)]),
        ({}, [(0, 1), (2, 3)]),
        ({"num_workers": 4, "engine_workers": 1}, [(0, 1)]),
        ({"num_workers": 1, "engine_workers": 2}, [(0, 1), (2, 3)]),
        ({"num_workers": 2, "engine_workers": 1, "colocated": False}, [(2, 3)]),
    ],
)
def test_a_rank_of_an_engine_shares_the_device_of_the_trainers_rank_of_its_number(
    monkeypatch, cluster, engines
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    pod = pod_of(cluster, 2)
    assert pod.engine_workers == len(engines)
    assert pod.share == pod.num_workers + 2 * len(engines)
    for rank in range(pod.num_workers):
        assert pod.devices_of(rank, 0).devices == (rank,)
    for number, devices in enumerate(engines):
        found = [pod.devices_of(None, number, rank).devices for rank in (0, 1)]
        assert found == [(device,) for device in devices]


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"num_workers": 2, "engine_workers": 3}, "3 engines of 2 ranks need 6 GPUs, this host"),
        ({"num_workers": 3, "engine_workers": 1, "colocated": False}, "need 5 GPUs, this host ha"),
        ({"num_workers": 5, "engine_workers": 1}, "need 5 GPUs, this host has 4"),
    ],
)
def test_ranks_that_find_no_device_are_refused_by_number(monkeypatch, cluster, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match=words):
        pod_of(cluster, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="do not fill the devices of 3 trainer ranks"):
        pod_of({}, 2)
