"""gyre bench: the commands that measure. In: argv. Out: calls of their bodies, as in `main.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyre.cli.answer import answer

bench_app = typer.Typer(
    name="bench", no_args_is_help=True, rich_markup_mode=None, help="Measure a server."
)


@bench_app.callback()
def bench() -> None:
    """Measure a server under load."""


@bench_app.command(name="serve")
def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="As in http://127.0.0.1:8000.")],
    load: Annotated[str, typer.Option(help="random, sharegpt or prefix.")] = "random",
    input_tokens: Annotated[
        int, typer.Option(min=1, help="Of a prompt; with prefixes, of what follows them.")
    ] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 1024,
    spread: Annotated[
        float, typer.Option(min=0.0, help="Lengths are uniform within this share of those.")
    ] = 0.0,
    file: Annotated[Path | None, typer.Option(help="Conversations of the ShareGPT load.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Model folder: ShareGPT answers get the recorded ones' lengths."),
    ] = None,
    prefixes: Annotated[int, typer.Option(min=1, help="Shared beginnings.")] = 16,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Of each of them.")] = 1024,
    zipf: Annotated[float, typer.Option(min=0.0, help="Exponent; 0 draws them alike.")] = 1.0,
    concurrency: Annotated[
        str, typer.Option(help="Closed loop: requests at a time; left out, 1,8,32.")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Open loop: Poisson arrivals per second, such as 2,4,8.")
    ] = "",
    requests: Annotated[
        int, typer.Option(min=0, help="Per level; left out with --seconds too: 128.")
    ] = 0,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Per level, instead of a number of requests.")
    ] = 0.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before each level.")] = 8,
    stream: Annotated[bool, typer.Option("--stream/--no-stream")] = True,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: Annotated[str, typer.Option(help="Left out: the first that the server lists.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="Holds the key.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Answers have all their tokens; left out: yes, if the load gives lengths.",
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="For a request, from when it is due.")
    ] = 600.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Of an open loop.")] = 1024,
    client_rate: Annotated[
        bool, typer.Option("--client-rate/--no-client-rate", help="Measure the client first.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Decides prompts and arrivals.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the JSON there too.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")
    ] = False,
) -> None:
    """Play loads against any server of OpenAI's API, and print what its clients see.

    Ctrl-C prints what was measured until then."""
    from gyre.cli.bench.serve import BenchServeArgs, run_bench_serve

    args = BenchServeArgs(
        url=url,
        load=load,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        spread=spread,
        file=file,
        tokenizer=tokenizer,
        prefixes=prefixes,
        prefix_tokens=prefix_tokens,
        zipf=zipf,
        concurrency=concurrency,
        rate=rate,
        requests=requests,
        seconds=seconds,
        warm_up=warm_up,
        stream=stream,
        endpoint=endpoint,
        model=model,
        api_key_file=api_key_file,
        temperature=temperature,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
        max_connections=max_connections,
        client_rate=client_rate,
        seed=seed,
        output=output,
    )
    answer(lambda: run_bench_serve(args, quiet=json), as_json=json)
