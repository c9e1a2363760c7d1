"""Hand-over of weights, on several GPUs: trainer ranks that hold shards to as many engines, one
process per GPU. In: a shape, layouts. Out: seconds per hand-over, GB/s, share of what the link does
in the same run, extra memory. Run: python bench/handover.py --gpus 4 --shape 8b --record

It is what each worker of a cluster does, without the calls between processes: `register`,
`EngineWeights.prepare`, `commit`. With zero 3 the
commit gathers all shards into the engine's storage; with zero 1 engine and trainer share weights,
and no byte moves. Afterwards every number is compared.

The link: NCCL's all-gather of the same bytes, in chunks of 256 MiB, and NVLink 4's 450 GB/s per
direction by its data sheet. Bytes are those that a GPU receives, (n - 1)/n of the weights.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gyre.core.offers import SharedStorage
from gyre.distributed.process_group import RankGroup
from gyre.engine.weights import EngineWeights
from gyre.models.decoder import Decoder
from gyre.weights.gather import ShardSource
from gyre.weights.swap import shares_storage
from ranks import Ranks, RanksFailed, Tell, print_line, timed
from record import circumstances, parser, say
from train_ranks import SHAPES, Row, blank_decoder, make_trainer

DATA_SHEET_BYTES_PER_S = 450e9
NEMO = {"name": "NeMo-RL, shard to shard, 4B, 0.21 to 0.34 s as published", "value": 0.21}
WARM_UP, RUNS, TRIES = 2, 5, 3
CHUNK_BYTES = 256 << 20
BUCKETS_MIB = (64, 128, 256, 512)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="left out, all there are"
    )
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--zero", type=int, nargs="+", default=[3, 1])
    options.add_argument("--row-s", type=float, default=90.0, help="longest that a layout may take")
    options.add_argument("--wall-s", type=float, default=240.0, help="longest that all may take")
    args = options.parse_args()
    if args.record:
        circumstances(args.commit)
    given = {
        "shape": args.shape,
        "layers": args.layers,
        "checkpointing": "none",
        "matmul": "same",
        "tokens": 16,
    }
    with Ranks(args.gpus, device=args.device, wall_s=args.wall_s) as ranks:
        for zero in args.zero:
            try:
                found = ranks.call(measure, Row(**given, zero=zero), deadline_s=args.row_s)[0]
            except RanksFailed as error:
                print_line(
                    {
                        "zero": zero,
                        "failed": {str(rank): dict(told) for rank, told in error.by_rank.items()},
                    }
                )
                continue
            report(args, zero, found)


def report(args: argparse.Namespace, zero: int, found: dict[str, Any]) -> None:
    say(
        args,
        name=f"handover_{args.gpus}x_{args.shape.replace('.', '_')}_zero{zero}",
        unit="s per hand-over",
        ours=found.pop("seconds"),
        peer=NEMO if args.shape == "8b" and not args.layers else None,
        limit=found["received_bytes"] / DATA_SHEET_BYTES_PER_S,
        settings={
            "gpus": args.gpus,
            "shape": args.shape,
            "layers": args.layers or SHAPES[args.shape].num_layers,
            "zero": zero,
            "dtype": "bfloat16",
            "device": args.device,
        },
        detail=found,
    )


def measure(group: RankGroup, tell: Tell, row: Row) -> dict[str, Any]:
    """On every rank."""
    began_s, device = time.monotonic(), group.device
    decoder = blank_decoder(row)
    trainer = make_trainer(group, row, [], decoder)
    shared = not trainer.models.actor.split.shards_weights
    engine = decoder if shared else Decoder(row.spec, device=device, dtype=torch.bfloat16)
    weights = EngineWeights(
        engine, shared=shared, version=0, device=device, emit=lambda kind, **fields: None
    )
    if not shared:
        for tensor in weights.tensors.values():
            tensor.fill_(float("nan"))
    tell({"zero": row.zero, "made_s": round(time.monotonic() - began_s, 1)})
    size_bytes = 0 if shared else sum(tensor.nbytes for tensor in weights.tensors.values())
    received = size_bytes * (group.size - 1) // group.size

    def hand_over() -> None:
        offer = trainer.register_now()
        weights.prepare(offer)
        weights.commit(offer.version)

    before = reset_peak(device)
    times_s = [timed(group, hand_over) for _ in range(WARM_UP + RUNS)][WARM_UP:]
    seconds = sorted(times_s)[RUNS // 2]
    found: dict[str, Any] = {
        "seconds": seconds,
        "runs_ms": [round(run_s * 1e3, 2) for run_s in times_s],
        "size_bytes": size_bytes,
        "received_bytes": received,
        "extra_bytes": peak(device) - before,
        "register_ms": round(timed(group, trainer.register_now) * 1e3, 2),
    }
    tell({"zero": row.zero, **found})
    if shared:
        offered = trainer.register_now().source
        assert isinstance(offered, SharedStorage)
        assert shares_storage(offered.tensors, weights.tensors)
        return found
    source = trainer.shards()
    compare(group, source, weights)
    # The two parts of a commit, alone: the gather, and what it overwrites kept beside it.
    parts = {
        "gather_ms": lambda: source.gather_into(weights.tensors),
        "kept_ms": lambda: copy_whole(weights.tensors),
    }
    for name, part in parts.items():
        runs_s = sorted(timed(group, part) for _ in range(WARM_UP + TRIES))
        found[name] = round(runs_s[TRIES // 2] * 1e3, 2)
    tell({"zero": row.zero, **found})
    link_s = sorted(
        timed(group, lambda: gather_plainly(group, size_bytes)) for _ in range(WARM_UP + TRIES)
    )[TRIES // 2]
    found |= {
        "gb_per_s": round(received / seconds / 1e9, 1),
        "link_gb_per_s": round(received / link_s / 1e9, 1),
        "share_of_link": round(link_s / seconds, 4),
        "share_of_data_sheet": round(received / seconds / DATA_SHEET_BYTES_PER_S, 4),
    }
    tell({"zero": row.zero, **found})
    by_bucket = {}
    for mib in BUCKETS_MIB:
        gather = functools.partial(source.gather_into, weights.tensors, bucket_bytes=mib << 20)
        by_bucket[str(mib)] = round(min(timed(group, gather) for _ in range(TRIES)) * 1e3, 2)
    return found | {"gather_ms_by_bucket_mib": by_bucket}


@torch.no_grad()
def copy_whole(tensors: Mapping[str, Tensor]) -> None:
    """Copy every tensor to memory that is taken for it."""
    kept = [torch.empty_like(tensor) for tensor in tensors.values()]
    torch._foreach_copy_(kept, list(tensors.values()))


def gather_plainly(group: RankGroup, size_bytes: int) -> None:
    """As many bytes as the weights have, with nothing written anywhere."""
    own = torch.empty(CHUNK_BYTES // group.size, dtype=torch.uint8, device=group.device)
    chunks = [
        torch.empty(len(own) * group.size, dtype=torch.uint8, device=group.device) for _ in range(2)
    ]
    left, works = size_bytes, []
    while left > 0:
        count = min(len(own), -(-left // group.size))
        chunk = chunks[len(works) % 2][: count * group.size]
        works.append(
            dist.all_gather_into_tensor(
                chunk, own[:count], group=group.process_group, async_op=True
            )
        )
        left -= count * group.size
    for work in works:
        work.wait()


def compare(group: RankGroup, source: ShardSource, weights: EngineWeights) -> None:
    """This rank's own numbers lie where they belong, and every rank has the same sum of bits of
    each rank's run."""
    sums = []
    for name, tensor in weights.tensors.items():
        flat_N = tensor.view(-1)
        own = source.layout.ranks[group.rank][name]
        assert torch.equal(flat_N[own.start : own.stop], source[name].view(-1).to(flat_N.dtype)), (
            name
        )
        bits_N = flat_N.view(torch.int16)
        for places in source.layout.ranks:
            run_N = bits_N[places[name].start : places[name].stop]
            sums.append(run_N.sum(dtype=torch.int64))
    told = group.share(torch.stack(sums).tolist())
    assert all(one == told[0] for one in told), "ranks hold different weights"


def reset_peak(device: torch.device) -> int:
    """Returns what is allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
