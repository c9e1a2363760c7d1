"""The reward of this run. Try it without a model: gyre score RUN.toml COMPLETIONS.jsonl, a file
with rows like {"completion": "3 + 4 = 7, so <answer>7</answer>", "answer": "7"}.
"""

import re


def score(task: dict, completion: str) -> tuple[float, str]:
    """Return a number, or a number and its reason. `task` holds the data row's answer and its
    further fields. Three further parameters are given where they are named. `prompt` is the
    prompt's text, and `finish` how the completion ended ("stop" or "length"). `num_tokens` counts
    its tokens, the end token included."""
    found = re.findall(r"<answer>(.*?)</answer>", completion)
    if len(found) != 1:
        return 0.0, f"{len(found)} answers instead of one"
    if found[0].strip() == task["answer"]:
        return 1.0, "right"
    return 0.1, "an answer, but the wrong one"
