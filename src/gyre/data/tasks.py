"""Tasks: procedural problems from reasoning-gym. In: task name, options, seed. Out: different
problems whose `task` carries {"task", "question", "answer", "metadata"}: all that the task's own
scorer needs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.problems import Problem, by_prompt
from gyre.data.rows import as_json

Check = Callable[[str, dict[str, Any]], float]  # answer, Problem.task → 1.0 when right


def generate_problems(config: DataConfig, *, emit: Emit) -> Iterator[Problem]:
    """Yield `num_problems` problems with distinct prompts, in an order determined by the seed.

    Small tasks are exhausted early: drawing ends after 20 draws per requested problem, with the
    event data.exhausted.
    """
    max_draws = 20 * config.num_problems + 1000
    dataset = _make_dataset(config, size=max_draws)
    seen = set()
    draws = 0
    while len(seen) < config.num_problems and draws < max_draws:
        problem = _to_problem(config.task, draws, dataset[draws])
        draws += 1
        if by_prompt(problem) not in seen:
            seen.add(by_prompt(problem))
            yield problem
    if len(seen) < config.num_problems:
        emit(
            "data.exhausted",
            task=config.task,
            asked=config.num_problems,
            found=len(seen),
            draws=draws,
        )


def answer_checker(config: DataConfig) -> Check:
    """Return the task's own scorer."""
    dataset = _make_dataset(config, size=1)
    return lambda answer, task: float(dataset.score_answer(answer, task))


def _to_problem(task: str, index: int, entry: dict[str, Any]) -> Problem:
    content = {
        "task": task,
        "question": entry["question"],
        "answer": as_json(entry["answer"]),
        "metadata": as_json(entry["metadata"]),
    }
    return Problem(
        where=f"{task}:{index}", prompt=entry["question"].strip(), task=content, fields={}
    )


def _make_dataset(config: DataConfig, *, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.4)
        raise ConfigError(
            f"data.task = {config.task!r} is not a reasoning-gym task",
            hint=f"the nearest are {', '.join(near)}"
            if near
            else "see the gallery of reasoning-gym",
        )
    options = DATASETS[config.task][1].__dataclass_fields__
    for name in config.task_options:
        if name not in options or name in ("seed", "size"):
            raise ConfigError(
                f"data.task_options.{name} is not an option of {config.task}",
                hint=f"it takes {', '.join(o for o in options if o not in ('seed', 'size'))}",
            )
    # Problem i of seed s is problem i + 1 of seed s - 1 in reasoning-gym, so seeds are spread far
    # apart.
    seed = derive_seed("reasoning_gym", config.task, config.seed) % 2**31
    try:
        return reasoning_gym.create_dataset(
            config.task, seed=seed, size=size, **config.task_options
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.task_options = {config.task_options} is refused by {config.task}: {error}",
            hint="options that are not given keep the task's defaults; minima must not pass maxima",
        ) from error
