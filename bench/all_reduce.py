"""Sums of few rows over the GPUs of one host, in a graph: by peers' memory against NCCL. In: two or
more CUDA devices. Out: microseconds per call by rows, of the sum that is added to the residual
stream, and of that with the norm behind it. Run: python bench/all_reduce.py [--record].
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from gyre.distributed.process_group import RankGroup
from gyre.engine.runners.gpu_work import PEER_ROWS
from gyre.engine.runners.peer_memory import meet_peers
from gyre.kernels.gpu.peer_sums import add_peer_sum, add_peer_sum_rms_norm
from gyre.kernels.gpu.pointwise import add_rms_norm
from ranks import Ranks, Tell
from record import parser, say

CALLS, REPLAYS, ROUNDS = 128, 20, 5  # in a graph; timed together; the median counts
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WALL_S = 150.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--width", type=int, default=5120)
    args = options.parse_args()
    with Ranks(args.ranks, device="cuda", wall_s=WALL_S) as ranks:
        found = ranks.call(measure, args, deadline_s=WALL_S)[0]
    eight = found["rows"][8]
    say(
        args,
        name=f"all_reduce_{args.ranks}x",
        unit="us per sum of 8 rows, added to the residual stream",
        ours=eight["peers_us"],
        peer={"name": f"NCCL {found['nccl']}, same graph", "value": eight["nccl_us"]},
        limit=None,
        settings={"width": args.width, "dtype": "bfloat16", "calls_per_graph": CALLS},
        detail=found,
    )


@torch.inference_mode()
def measure(group: RankGroup, tell: Tell, args: argparse.Namespace) -> dict[str, Any]:
    def emit(kind: str, **fields: Any) -> None:
        tell({"event": kind, **fields})

    peers = meet_peers(group, width=args.width, dtype=torch.bfloat16, emit=emit)
    assert peers is not None, "these GPUs are no peers"
    rows: dict[int, dict[str, float]] = {}
    for count in (count for count in ROWS if count <= PEER_ROWS):
        given: dict[str, Any] = {"device": group.device, "dtype": torch.bfloat16}
        x_TE, part_TE, out_TE = (torch.zeros(count, args.width, **given) for _ in range(3))
        weight_E = torch.ones(args.width, **given)

        def nccl(x_TE=x_TE, part_TE=part_TE) -> None:
            group.all_reduce(part_TE)
            x_TE.add_(part_TE)

        def nccl_norm(x_TE=x_TE, part_TE=part_TE, out_TE=out_TE, weight_E=weight_E) -> None:
            group.all_reduce(part_TE)
            add_rms_norm(x_TE, part_TE, weight_E, 1e-6, out_TE)

        def ours(x_TE=x_TE, part_TE=part_TE) -> None:
            add_peer_sum(peers, x_TE, part_TE)

        def ours_norm(x_TE=x_TE, part_TE=part_TE, out_TE=out_TE, weight_E=weight_E) -> None:
            add_peer_sum_rms_norm(peers, x_TE, part_TE, weight_E, 1e-6, out_TE)

        def bare(part_TE=part_TE) -> None:
            group.all_reduce(part_TE)

        rows[count] = {
            "peers_us": timed(group, ours),
            "nccl_us": timed(group, nccl),
            "nccl_alone_us": timed(group, bare),
            "peers_norm_us": timed(group, ours_norm),
            "nccl_norm_us": timed(group, nccl_norm),
        }
        tell({"rows": count, **rows[count]})
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return {"rows": rows, "nccl": version, "device": torch.cuda.get_device_name(group.device)}


def timed(group: RankGroup, call: Callable[[], None]) -> float:
    """Return microseconds of one call, of many in a graph."""
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        group.capturing(),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        for _ in range(CALLS):
            call()
    graph.replay()
    rounds = []
    for _ in range(ROUNDS):
        group.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(1e3 * begin.elapsed_time(end) / (REPLAYS * CALLS))
    return round(statistics.median(rounds), 2)


if __name__ == "__main__":
    main()
