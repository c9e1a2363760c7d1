"""gyre eval. In: a run or model folder. Out: accuracy or mean reward on held-out problems."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.launch.names import refuse_missing_data_of
from gyre.launch.run_folder.run_folder import find_model
from gyre.observability.progress.terminal import show_measure


def run_eval(
    target: Path, config: Path | None, overrides: list[str], *, num_problems: int, quiet: bool
) -> Mapping[str, Any]:
    model, settings = find_model(target, config, overrides)
    refuse_missing_data_of(settings)  # before torch is loaded
    with loading():
        from gyre.launch.commands import evaluate

    result = evaluate(model, settings, num_problems=num_problems)
    if not quiet:
        print(headline(result), file=sys.stderr)
        for name, value in result["detail"].items():
            print(f"  {name} {value:.3f}", file=sys.stderr)
        for kind, number in result["counted"].items():
            print(f"  {kind} × {number}", file=sys.stderr)
    return result


def headline(result: Mapping[str, Any]) -> str:
    """Return the measure, its 95 % interval and its meaning."""
    metric, interval = result["metric"], result["interval"]
    around = (
        " to ".join(show_measure(metric, bound) for bound in interval) if interval else "not known"
    )
    return (
        f"{metric} {show_measure(metric, result['value'])} (95 % interval {around}) on "
        f"{result['n']} held-out problems "
        f"of {result['source']}\n  {metric}: {result['meaning']}"
    )
