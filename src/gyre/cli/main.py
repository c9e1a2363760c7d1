"""gyre: the command. In: argv. Out: an exit code; with --json, one JSON object as the last line of
stdout, logs on stderr. Heavy imports wait until a command runs, so that --help answers at once.
"""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from gyre.cli import keys, sidecar
from gyre.cli.answer import AsJson, answer, say_stopped
from gyre.cli.bench.command import bench_app
from gyre.core.errors import RunStopped


class Commands(typer.core.TyperGroup):
    """All commands. Reports Ctrl-C during an import in the same words as the commands do."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say_stopped(RunStopped(signal.SIGINT), as_json="--json" in sys.argv)
            raise SystemExit(130) from None


app = typer.Typer(
    name="gyre",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(keys.app, name="keys")
app.add_typer(sidecar.app, name="sidecar")
app.add_typer(bench_app)

Target = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|MODEL", help="A run folder, a model folder in hub layout, or a hub name."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as in --set trainer.steps=10."),
]


def print_version(asked: bool) -> None:
    if asked:
        print(f"gyre {importlib.metadata.version('gyre-rl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", is_eager=True, callback=print_version
        ),
    ] = False,
) -> None:
    """Train a language model by reinforcement learning, and use what comes out."""


@app.command(name="init")
def begin(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Of the run and its files.")
    ] = "my_run",
    objective: Annotated[
        str, typer.Option("--from", metavar="OBJECTIVE", help="sft, grpo, ppo, dpo or rm.")
    ] = "grpo",
    json: AsJson = False,
) -> None:
    """Write a config, sample data and a reward to start from.

    They land in the working folder and train as they are; no file is overwritten."""
    from gyre.cli.begin import run_init

    answer(lambda: run_init(name, objective, quiet=json), as_json=json)


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="The run's config; gyre init writes one."),
    ] = None,
    set_: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a stopped run, exactly.")
    ] = None,
    stage: Annotated[
        str, typer.Option(help="Which stages to run: all, cold_start or main.")
    ] = "all",
    check_goal: Annotated[
        bool, typer.Option("--check-goal", help="Fail when the run misses its [goal].")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line per step instead of the live panel.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run the stages of a config: cold start, then its objective."""
    from gyre.cli.train import run_train

    answer(
        lambda: run_train(
            config,
            set_ or [],
            resume=resume,
            stage=stage,
            check_goal=check_goal,
            plain=plain or json,
            quiet=json,
        ),
        as_json=json,
    )


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="The run's config; gyre init writes one."),
    ] = None,
    set_: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to plan for; with --gpu.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Their kind, such as h200; they need not be here.")
    ] = None,
    host_bytes: Annotated[
        int | None, typer.Option(min=0, help="Memory of one host; left out: the usual one.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A published shape, such as qwen3-8b, as the model.")
    ] = None,
    sequence_tokens: Annotated[
        int | None, typer.Option(min=1, help="Without RUN.toml: tokens per sequence.")
    ] = None,
    update_tokens: Annotated[
        int | None, typer.Option(min=1, help="Without RUN.toml: tokens per update.")
    ] = None,
    zero: Annotated[
        int | None, typer.Option(min=0, max=3, help="ZeRO stage; left out: the best.")
    ] = None,
    shard_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that split the states; left out: best.")
    ] = None,
    tensor_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share each layer; left out: best.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Print sizes and memory of a config, here or on named GPUs.

    Nothing is started."""
    from gyre.cli.plan import run_plan

    given = {
        "gpus": gpus,
        "gpu": gpu,
        "host_bytes": host_bytes,
        "shape": shape,
        "sequence_tokens": sequence_tokens,
        "update_tokens": update_tokens,
        "zero": zero,
        "shard_ranks": shard_ranks,
        "tensor_ranks": tensor_ranks,
    }
    options = {name: value for name, value in given.items() if value is not None}
    answer(lambda: run_plan(config, set_ or [], options=options, quiet=json), as_json=json)


@app.command(name="eval")
def evaluate(
    target: Target,
    config: Annotated[
        Path | None, typer.Option(help="Config with data and rewards, for a model folder.")
    ] = None,
    set_: Overrides = None,
    problems: Annotated[
        int, typer.Option(min=0, help="Held-out problems; 0 takes the config's number.")
    ] = 0,
    json: AsJson = False,
) -> None:
    """Measure accuracy, or the mean reward, on held-out problems."""
    from gyre.cli.evaluate import run_eval

    answer(
        lambda: run_eval(target, config, set_ or [], num_problems=problems, quiet=json),
        as_json=json,
    )


@app.command()
def chat(
    target: Target,
    prompt: Annotated[
        str | None, typer.Option(help="Ask this once and leave, instead of a conversation.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens per answer at most; 0 is all the context.")
    ] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides every draw.")] = 0,
    json: AsJson = False,
) -> None:
    """Talk to a model; its words appear as they are chosen."""
    from gyre.cli.chat import run_chat

    answer(
        lambda: run_chat(
            target, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, quiet=json
        ),
        as_json=json,
    )


@app.command()
def serve(
    target: Target,
    config: Annotated[
        Path | None, typer.Option(help="Config with engine settings, for a model folder.")
    ] = None,
    set_: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str, typer.Option(help="Model name that clients ask for; left out: the folder's.")
    ] = "",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub name.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engine processes, each on a GPU of its own.")
    ] = 1,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without keys.")
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="KEYS", help="File of API keys; gyre keys create makes it."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Certificate chain, for https.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Private key of the certificate.")
    ] = None,
    receive_s: Annotated[
        int, typer.Option(min=1, help="Seconds that a request may take to arrive.")
    ] = 30,
    drain_s: Annotated[
        int, typer.Option(min=0, help="Seconds for answers under way, after a signal to stop.")
    ] = 30,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each HTTP request, without its content.")
    ] = False,
    otlp_endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Collector that gets a trace of each request.")
    ] = "",
    trace_ratio: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of traces recorded, of those that no client began."
        ),
    ] = 1.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print memory and limits; start nothing.")
    ] = False,
    load_format: Annotated[
        str, typer.Option(help="Weights: auto reads the folder's; dummy draws them, for benches.")
    ] = "auto",
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How tool calls are written: auto, hermes, llama3_json, qwen3_coder or none."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="How reasoning is written: auto, think or none.")
    ] = "auto",
    follow: Annotated[
        bool, typer.Option("--follow", help="Take each new export of the run, or of the folder.")
    ] = False,
    poll_s: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two looks, with --follow.")
    ] = 2.0,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key for POST /admin/weights, of mode 600.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Serve a model by OpenAI's API, until Ctrl-C."""
    from gyre.cli.serve import run_serve

    options = {
        "host": host,
        "port": port,
        "name": name,
        "revision": revision,
        "replicas": replicas,
        "insecure": insecure,
        "keys": keys,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "receive_s": receive_s,
        "drain_s": drain_s,
        "access_log": access_log,
        "otlp_endpoint": otlp_endpoint,
        "trace_ratio": trace_ratio,
        "dry_run": dry_run,
        "load_format": load_format,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "admin_key_file": admin_key_file,
        "follow": target if follow else None,
        "poll_s": poll_s,
    }
    answer(
        lambda: run_serve(target, config, set_ or [], as_json=json, **options),
        as_json=json and dry_run,
    )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    json: AsJson = False,
) -> None:
    """Write RUN/report.html: curves, phases, memory, rollouts, counts. Of a run in a pod also print
    what its processes did in a step."""
    from gyre.cli.report import run_report

    answer(lambda: run_report(run, quiet=json), as_json=json)


@app.command()
def score(
    target: Annotated[
        Path, typer.Argument(metavar="RUN.toml|RUN", help="A config, or a run folder.")
    ],
    completions: Annotated[
        Path,
        typer.Argument(
            metavar="COMPLETIONS.jsonl", help='Rows of {"completion": …, "answer": …, …}.'
        ),
    ],
    set_: Overrides = None,
    json: AsJson = False,
) -> None:
    """Run a config's rewards on given completions.

    Prints value, time and reason of each part. No model is loaded."""
    from gyre.cli.score import run_score

    answer(lambda: run_score(target, completions, set_ or [], quiet=json), as_json=json)


@app.command()
def doctor(json: AsJson = False) -> None:
    """Say what this machine can run, and why not."""
    from gyre.cli.doctor import run_doctor

    answer(lambda: run_doctor(quiet=json), as_json=json)


def main() -> None:
    """Entry point of the `gyre` command."""
    app()
