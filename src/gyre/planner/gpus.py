"""GPUs by name, so that a plan needs none of them here. In: a name such as "h200". Out: its Gpu, or
a ConfigError that lists the names. Pure.

Rates without a note are the vendor's data sheets (dense, without sparsity). Those of the H200 that
say "measured" come from bench/records and from the survey of trainers; the other GPUs take the
H200's measured share of their data sheet.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gyre.core.errors import ConfigError

GIB = 1 << 30
MEASURED_LINK_SHARE = 342 / 450  # all-gather among eight H200s: 342 of 450 GB/s each way
# What tensor ranks exchange for a layer, two H200s. A trainer's, 367 times 32 MiB beside
# products: 77.8 ms in train_2x_8b_8192_none_same_sft_zero0_tensor2.json. To start one takes what
# NCCL takes for one row out of a graph (`nccl_alone_us` in all_reduce_2x.json). The rest is
# bandwidth: 32 MiB in 187 µs.
EXCHANGE_S = 25e-6
EXCHANGE_LINK_SHARE = 179 / 450
# An engine's sums of few rows (all_reduce_2x.json, 1 and 256 rows of 10 KiB): by peers' memory 4.3
# and 15.0 µs, by NCCL in a graph 12.3 and 33.8 µs.
PEER_SUM_S, PEER_LINK_SHARE = 4.3e-6, 244 / 450
GRAPH_SUM_S, GRAPH_LINK_SHARE = 12.3e-6, 121 / 450
PEER_SUM_ROWS = 256  # as in kernels.gpu.peer_sums
PEER_LINK_BYTES_PER_S = 100e9  # NVLink; slower links are not taken for peers' memory
# Of the memory's data sheet, what a step with one row reaches, launches and sampling included: 8B
# on an H200, 15.4 GB in 5.06 ms (one stream in engine_8b_streams.json).
DECODE_SHARE = 0.632
# a pinned copy when all eight GPUs of a host copy at once, against one alone
SHARED_HOST_LINK = 27.9 / 55.0
# of a host's local NVMe disks together, read or written; an estimate: two drives
DISK_BYTES_PER_S = 12e9
# per GPU between hosts: one 400 Gb/s port each, as in the vendor's eight-GPU hosts
NETWORK_BYTES_PER_S = 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU, as a training cluster has it. Rates are per GPU."""

    name: str
    device_bytes: int  # what torch can see, a little less than what is sold
    bf16_flops: float  # data sheet, dense; 0 where bfloat16 has no units
    fp8_flops: float  # data sheet, dense; 0 where there are no units
    fp16_flops: float
    matmul_share: float  # of the data sheet that large products reach
    # of the data sheet that whole training steps reach, causal attention counted at half
    training_share: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # to the other GPUs of the host, one way, data sheet
    host_link_bytes_per_s: float  # pinned copies, one way, this GPU alone
    host_bytes: int  # host memory per GPU in the vendor's usual host
    gpus_per_host: int = 8

    @property
    def bf16(self) -> bool:
        return self.bf16_flops > 0

    @property
    def collective_bytes_per_s(self) -> float:
        return self.link_bytes_per_s * MEASURED_LINK_SHARE

    @property
    def exchange_bytes_per_s(self) -> float:
        """Return the rate of what a trainer's tensor ranks exchange beside their products."""
        return self.link_bytes_per_s * EXCHANGE_LINK_SHARE

    def sum_seconds(
        self, size_bytes: float, ranks: int, *, rows: float, by_peers: bool = True
    ) -> float:
        """Return the time of an engine's sum of `rows` rows, of `size_bytes` together, over tensor
        ranks: few rows by peers' memory, where every rank writes to every other; others by
        NCCL."""
        peers = by_peers and self.link_bytes_per_s >= PEER_LINK_BYTES_PER_S
        if peers and rows <= PEER_SUM_ROWS:
            sent = (ranks - 1) * size_bytes
            return PEER_SUM_S + sent / (self.link_bytes_per_s * PEER_LINK_SHARE)
        sent = 2 * (ranks - 1) / ranks * size_bytes
        return GRAPH_SUM_S + sent / (self.link_bytes_per_s * GRAPH_LINK_SHARE)

    def host_copy_bytes_per_s(self, gpus: int) -> float:
        """Return the rate of each of `gpus` GPUs of a host that copy at the same time. What they
        share is shared evenly."""
        busy = min(gpus, self.gpus_per_host)
        floor = self.host_link_bytes_per_s * SHARED_HOST_LINK
        return max(
            floor, self.host_link_bytes_per_s * (1 - (busy - 1) * (1 - SHARED_HOST_LINK) / 7)
        )


def _gpu(
    name: str,
    gib: float,
    bf16_tflops: float,
    fp8_tflops: float,
    hbm_tb_per_s: float,
    link_gb_per_s: float,
    host_link_gb_per_s: float,
    host_gib: int,
    *,
    fp16_tflops: float = 0.0,
    matmul_share: float = 0.80,
    training_share: float = 0.45,
) -> Gpu:
    return Gpu(
        name=name,
        device_bytes=int(gib * GIB),
        bf16_flops=bf16_tflops * 1e12,
        fp8_flops=fp8_tflops * 1e12,
        fp16_flops=(fp16_tflops or bf16_tflops) * 1e12,
        matmul_share=matmul_share,
        training_share=training_share,
        hbm_bytes_per_s=hbm_tb_per_s * 1e12,
        link_bytes_per_s=link_gb_per_s * 1e9,
        host_link_bytes_per_s=host_link_gb_per_s * 1e9,
        host_bytes=host_gib * GIB,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            # measured: 794 of 989 TFLOP/s, copies 55 GB/s; 50.7 % in torchtitan's best 8B step on
            # eight of them
            _gpu(
                "h200",
                139.8,
                989,
                1979,
                4.8,
                450,
                55,
                256,
                matmul_share=794 / 989,
                training_share=0.507,
            ),
            # 39.0 % with attention in full, 34.3 % at half, in torchtitan's published 8B step
            _gpu("h100", 79.1, 989, 1979, 3.35, 450, 55, 256, training_share=0.343),
            _gpu("h100-pcie", 79.1, 756, 1513, 2.0, 64, 55, 128, training_share=0.343),
            _gpu("b200", 178.0, 2250, 4500, 8.0, 900, 55, 256),
            _gpu("a100-80g", 79.1, 312, 0, 2.04, 300, 25, 256),
            _gpu("a100-40g", 39.4, 312, 0, 1.56, 300, 25, 128),
            _gpu("l40s", 44.4, 362, 733, 0.864, 32, 25, 128),
            _gpu("l4", 22.0, 121, 242, 0.3, 32, 25, 64),
            _gpu("a10g", 22.0, 70, 0, 0.6, 32, 25, 64),
            _gpu("rtx-4090", 23.5, 165, 330, 1.008, 32, 25, 64),
            _gpu("v100-32g", 31.7, 0, 0, 0.9, 150, 12, 96, fp16_tflops=125),
            _gpu("t4", 14.6, 0, 0, 0.32, 16, 12, 48, fp16_tflops=65),
        )
    }
)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, whatever its case."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in GPUS:
        return GPUS[key]
    near = difflib.get_close_matches(key, GPUS, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--gpu {name}: no GPU of that name is known{meant}", hint=f"known: {', '.join(GPUS)}"
    )


# Words of a driver's name that say nothing of the speed. What is not among them (NVL, Laptop, MIG,
# D) is another part.
PLAIN_WORDS = re.compile(r"nvidia|tesla|geforce|sxm\d?|pcie?|hbm\d\w?|\d+gb?")


def recognize_gpu(device_name: str) -> Gpu | None:
    """Return the GPU that a driver calls so, such as "NVIDIA A100-SXM4-80GB". None for what the
    table does not have."""
    words = re.split(r"[\s\-]+", device_name.lower())
    told = {re.sub(r"^(\d+)gb$", r"\1g", word) for word in words}
    fitting = [
        gpu
        for gpu in GPUS.values()
        if (named := set(gpu.name.split("-"))) <= told
        and all(PLAIN_WORDS.fullmatch(word) for word in told - named)
    ]
    return max(fitting, key=lambda gpu: gpu.name.count("-"), default=None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Data-sheet FLOPs per second of a device in a torch dtype ("bfloat16"), dense: the base of
    MFU, with FP8 layers too. None where none is known, as for float32 and for CPUs."""
    gpu = recognize_gpu(device_name)
    rates = {} if gpu is None else {"bfloat16": gpu.bf16_flops, "float16": gpu.fp16_flops}
    return rates.get(dtype) or None
