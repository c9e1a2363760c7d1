"""gyre bench serve. In: a server's URL, a load, levels. Out: a table on stdout, progress on stderr,
and a mapping with every number, which --json prints and --output writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from gyre.benchmark.connection import parse_url
from gyre.benchmark.loads import (
    Lengths,
    PrefixLoad,
    RandomLoad,
    TextLoad,
    Workload,
    sharegpt_requests,
    sharegpt_turns,
)
from gyre.benchmark.records import Endpoint, Level
from gyre.benchmark.summary import ITL_DEFINITION
from gyre.benchmark.sweep import SweepResult, SweepSettings, run_sweep
from gyre.cli.bench.display import print_levels, showing_progress
from gyre.core.errors import ConfigError, InputError
from gyre.core.files import write_text

LoadKind = Literal["random", "sharegpt", "prefix"]
DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = "1,8,32", 128
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeArgs:
    """What the command line said; `gyre bench serve --help` explains each."""

    url: str
    load: str
    input_tokens: int
    output_tokens: int
    spread: float
    file: Path | None
    tokenizer: Path | None
    prefixes: int
    prefix_tokens: int
    zipf: float
    concurrency: str
    rate: str
    requests: int
    seconds: float
    warm_up: int
    stream: bool
    endpoint: str
    model: str
    api_key_file: Path | None
    temperature: float
    ignore_eos: bool | None
    timeout_s: float
    max_connections: int
    client_rate: bool
    seed: int
    output: Path | None


def run_bench_serve(args: BenchServeArgs, *, quiet: bool) -> Mapping[str, Any]:
    """Measure, and return all numbers. A sweep that Ctrl-C cut short has `interrupted`."""
    settings = make_settings(args)
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: its folder is not there", hint="make it first")
    with showing_progress() as on_progress:
        result = asyncio.run(run_sweep(settings, on_progress))
    told = as_mapping(args, settings, result)
    if not quiet:
        print_levels(result)
    if args.output is not None:
        try:
            write_text(args.output, json.dumps(told, indent=2) + "\n", durable=False)
        except OSError as error:
            raise InputError(f"--output {args.output}: {error.strerror}") from error
    return told


def make_settings(args: BenchServeArgs) -> SweepSettings:
    """Return what to measure. ConfigError or InputError for what cannot be."""
    kind = _one_of("--load", args.load, get_args(LoadKind))
    endpoint = cast(Endpoint, _one_of("--endpoint", args.endpoint, get_args(Endpoint)))
    levels = make_levels(args)
    has_lengths = kind != "sharegpt" or args.tokenizer is not None
    return SweepSettings(
        target=parse_url(args.url),
        load=make_load(args, cast(LoadKind, kind), levels),
        levels=levels,
        endpoint=endpoint,
        stream=args.stream,
        model=args.model,
        api_key=read_key(args.api_key_file),
        temperature=args.temperature,
        ignore_eos=has_lengths if args.ignore_eos is None else args.ignore_eos,
        timeout_s=args.timeout_s,
        most_connections=args.max_connections,
        seed=args.seed,
        measures_client=args.client_rate,
    )


def make_levels(args: BenchServeArgs) -> list[Level]:
    """Return closed loops, then open ones."""
    if args.requests and args.seconds:
        raise ConfigError("--requests and --seconds: both end a level", hint="give one of the two")
    requests = 0 if args.seconds else args.requests or DEFAULT_REQUESTS
    closed = args.concurrency or ("" if args.rate else DEFAULT_CONCURRENCY)
    ends = {"requests": requests, "seconds": args.seconds, "warm_up": args.warm_up}
    return [
        *(Level(concurrency=one, **ends) for one in _numbers("--concurrency", closed, int)),
        *(Level(rate_per_s=one, **ends) for one in _numbers("--rate", args.rate, float)),
    ]


def make_load(args: BenchServeArgs, kind: LoadKind, levels: Sequence[Level]) -> Workload:
    """Return the source of requests."""
    lengths = Lengths(
        input_tokens=args.input_tokens, output_tokens=args.output_tokens, spread=args.spread
    )
    if kind == "random":
        return RandomLoad(lengths=lengths, seed=args.seed)
    if kind == "prefix":
        return PrefixLoad(
            lengths=lengths,
            prefixes=args.prefixes,
            prefix_tokens=args.prefix_tokens,
            zipf=args.zipf,
            seed=args.seed,
        )
    if args.file is None:
        raise ConfigError(
            "--load sharegpt needs the conversations", hint="give --file CONVERSATIONS.json"
        )
    try:
        rows = json.loads(args.file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--file {args.file}: {error}", hint="need a JSON file") from error
    turns = sharegpt_turns(rows, source=str(args.file))
    count_tokens = None
    if args.tokenizer is not None:
        from gyre.text.tokenizer import load_tokenizer  # slow to import

        known = load_tokenizer(args.tokenizer)
        count_tokens = lambda text: len(known.encode(text))  # noqa: E731
    drawn = sharegpt_requests(turns, max_tokens=args.output_tokens, count_tokens=count_tokens)
    per_level = levels[0].requests or len(drawn) // len(levels)
    return TextLoad(drawn=drawn, seed=args.seed, per_level=per_level)


def read_key(path: Path | None) -> str:
    """Return the key in a file, or none."""
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise InputError(f"--api-key-file {path}: {error.strerror}") from error
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise InputError(
            f"--api-key-file {path}: need one key of printable ASCII characters",
            hint="write the key alone into the file",
        )
    return key


def as_mapping(
    args: BenchServeArgs, settings: SweepSettings, result: SweepResult
) -> dict[str, Any]:
    """Return all that the JSON says."""
    return {
        "url": args.url,
        "model": result.model,
        "endpoint": settings.endpoint,
        "stream": settings.stream,
        "load": _describe_load(args),
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "seed": settings.seed,
        "client_max_chunks_per_s": result.client_max_chunks_per_s,
        "itl_definition": ITL_DEFINITION,
        "interrupted": result.is_interrupted,
        "all_failed": bool(result.levels) and not any(level.ok for level in result.levels),
        "levels": [asdict(level) for level in result.levels],
    }


def _describe_load(args: BenchServeArgs) -> dict[str, Any]:
    fields = {
        "random": ("input_tokens", "output_tokens", "spread"),
        "prefix": (
            "input_tokens",
            "output_tokens",
            "spread",
            "prefixes",
            "prefix_tokens",
            "zipf",
        ),
        "sharegpt": ("file", "tokenizer", "output_tokens"),
    }[args.load]
    values = {name: getattr(args, name) for name in fields}
    return {
        "kind": args.load,
        **{name: str(one) if isinstance(one, Path) else one for name, one in values.items()},
    }


def _one_of(option: str, given: str, accepted: tuple[str, ...]) -> str:
    if given not in accepted:
        raise ConfigError(f"{option} {given}: accepted are {', '.join(accepted)}")
    return given


def _numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Return the numbers of a list with commas."""
    try:
        found = [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [kind(0)]
    if any(not 0 < number < 1_000_000 for number in found):
        raise ConfigError(
            f"{option} {text}: need numbers above 0, with commas", hint=f"as in {option} 1,8,32"
        )
    return found
