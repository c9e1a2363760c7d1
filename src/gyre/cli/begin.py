"""gyre init. In: a name and an objective. Out: a commented config, sample data and, for objectives
with rewards, a reward file, all in the working folder and ready for `gyre train`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Literal, get_args

from gyre.core.errors import ConfigError, InputError

Objective = Literal["sft", "grpo", "ppo", "dpo", "rm"]
WITH_REWARD, WITH_PAIRS = ("grpo", "ppo"), ("dpo", "rm")
NUM_ROWS, NUM_CHANGES, MOST = 2000, 3, 18
GUESSED_SHARE = 0.5  # of the responses that grpo and ppo begin from
NAMES = ("Anna", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
THINGS = ("apples", "books", "coins", "cards", "marbles", "pens", "stamps", "shells")


def run_init(name: str, objective: str, *, quiet: bool) -> Mapping[str, Any]:
    """Write the files in the working folder. On ConfigError or InputError nothing is written."""
    if objective not in get_args(Objective):
        raise ConfigError(
            f"--from {objective}: accepted are {', '.join(get_args(Objective))}",
            hint="grpo is usual",
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", name):
        raise ConfigError(
            f"gyre init {name!r}: need a name of at most 64 letters, digits, _ and -, beginning "
            "with a letter or _",
            hint="files are written in the working folder: for another one go there first",
        )
    contents = make_files(name, objective)
    if there := [file for file in contents if Path(file).exists() or Path(file).is_symlink()]:
        raise InputError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} here already, and nothing "
            "is overwritten",
            hint="give another name (gyre init NAME), or move what is here",
        )
    _write(contents)
    steps = [f"gyre plan {name}.toml", f"gyre train {name}.toml"]
    if not quiet:
        print(f"wrote {', '.join(contents)}\nnext:")
        print(f"  {steps[0]:<40} # sizes and memory, nothing started")
        print(f"  {steps[1]:<40} # takes minutes on a CPU; then put in your model, data and reward")
    return {"files": list(contents), "next": steps}


def make_files(name: str, objective: str) -> dict[str, str]:
    """Return file contents by name."""
    module = f"{name.replace('-', '_')}_rewards"
    folder = resources.files("gyre.cli") / "templates"
    config = Template((folder / f"{objective}.toml").read_text(encoding="utf-8")).substitute(
        name=name, module=module
    )
    guessed_share = GUESSED_SHARE if objective in WITH_REWARD else 0.0
    rows = sample_pairs() if objective in WITH_PAIRS else sample_problems(guessed_share)
    files = {
        f"{name}.toml": config,
        f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
    if objective in WITH_REWARD:
        files[f"{module}.py"] = (folder / "rewards.py").read_text(encoding="utf-8")
    return files


def sample_problems(guessed_share: float) -> Iterator[dict[str, str]]:
    """Return word problems, the same ones every time. A response works the answer out or, for
    `guessed_share` of them, only states it.

    This leaves something for reinforcement learning to find: only working it out pays.
    """
    draw = random.Random(0)
    for _ in range(NUM_ROWS):
        name, things, totals = draw.choice(NAMES), draw.choice(THINGS), [draw.randint(1, 9)]
        changes = []
        for _ in range(NUM_CHANGES):
            changes.append(
                draw.choice([n for n in range(-9, 10) if n and 0 <= totals[-1] + n <= MOST])
            )
            totals.append(totals[-1] + changes[-1])
        told = [f"gets {n}" if n > 0 else f"gives away {-n}" for n in changes]
        prompt = (
            f"{name} has {totals[0]} {things}, {', '.join(told[:-1])} and {told[-1]}. How "
            f"many {things} are left?"
        )
        guessed = draw.random() < guessed_share
        yield {
            "prompt": prompt,
            "answer": str(totals[-1]),
            "response": _answer(totals[-1]) if guessed else _work(totals[0], changes),
        }


def sample_pairs() -> Iterator[dict[str, str]]:
    """Return the same problems, worked out; the rejected response is off by one to three in its
    last step."""
    draw = random.Random(1)
    for row in sample_problems(0.0):
        right, wrong = int(row["answer"]), int(row["answer"]) + draw.randint(1, 3)
        rejected = (
            row["response"].removesuffix(f"{right}, {_answer(right)}")
            + f"{wrong}, {_answer(wrong)}"
        )
        yield {
            "prompt": row["prompt"],
            "chosen": row["response"],
            "rejected": rejected,
            "answer": row["answer"],
        }


def _work(total: int, changes: Iterable[int]) -> str:
    steps = ""
    for n in changes:
        steps += f"{total} {'+' if n > 0 else '-'} {abs(n)} = {total + n}, "
        total += n
    return steps + _answer(total)


def _answer(result: int) -> str:
    return f"so <answer>{result}</answer>"


def _write(contents: Mapping[str, str]) -> None:
    """Write every file or, on an error, none."""
    made: list[Path] = []
    try:
        for file, text in contents.items():
            with Path(file).open("x", encoding="utf-8") as handle:
                made.append(Path(file))
                handle.write(text)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {file} in {Path.cwd()}: {error.strerror}",
            hint="run it in a folder that takes new files",
        ) from error
