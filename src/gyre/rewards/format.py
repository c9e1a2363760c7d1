"""Format and length: rules that need no task. In: a completion. Out: a value with a reason. Pure,
linear in the text.

The R1 format is

    <think> … </think> <answer> … </answer>

with each tag exactly once, in this order, and nothing outside but whitespace. A letter or a digit
stands inside <think>, a visible character inside <answer>. `length_value` is the penalty for
completions that are too long.
"""

from __future__ import annotations

import unicodedata

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def check_format(
    text: str, *, opened_by_prompt: bool = False, partial: bool = False
) -> tuple[float, str]:
    """Return 1.0 for the format, else 0.0; with `partial`, 0.2 for each tag that stands once.

    `partial` gives nothing when those tags are not in order, and nothing for the two tags of an
    empty block. opened_by_prompt: the prompt ended with <think>, so the completion begins inside
    it.
    """
    if opened_by_prompt:
        text = "<think>" + text
    fault = _fault(text)
    if fault is None:
        return 1.0, "one <think> block, then one <answer> block"
    return (0.2 * _tags_that_count(text) if partial else 0.0), fault


def _fault(text: str) -> str | None:
    """Return the first fault of the format, or None."""
    for tag in TAGS:
        count = text.count(tag)
        if count != 1:
            return f"{tag} stands {count} times, not once"
    places = [text.index(tag) for tag in TAGS]
    if places != sorted(places):
        return "the tags are not in the order " + " ".join(TAGS)
    outside = {
        "before <think>": text[: places[0]],
        "between </think> and <answer>": text[places[1] + len(TAGS[1]) : places[2]],
        "after </answer>": text[places[3] + len(TAGS[3]) :],
    }
    for where, rest in outside.items():
        if rest.strip():
            return f"text {where}: {rest.strip()[:40]!r}"
    empty = _empty_blocks(text)
    return f"nothing inside {empty[0]}" if empty else None


def _tags_that_count(text: str) -> int:
    """Count the tags that stand once, less those of empty blocks; 0 when they are not in order."""
    once = [tag for tag in TAGS if text.count(tag) == 1]
    places = [text.index(tag) for tag in once]
    return len(once) - 2 * len(_empty_blocks(text)) if places == sorted(places) else 0


def _empty_blocks(text: str) -> list[str]:
    """Return the opening tags of blocks whose two tags stand once, in order, with nothing to read
    between them."""
    empty = []
    for opening, closing, is_content in ((*TAGS[:2], str.isalnum), (*TAGS[2:], _is_visible)):
        if text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(
            closing
        ):
            inside = text[text.index(opening) + len(opening) : text.index(closing)]
            if not any(is_content(letter) for letter in inside):
                empty.append(opening)
    return empty


def _is_visible(letter: str) -> bool:
    return unicodedata.category(letter)[0] not in "CZ"  # control and format characters, separators


def length_value(num_tokens: int, *, soft_tokens: int, max_tokens: int) -> tuple[float, str]:
    """Return DAPO's soft overlong punishment: 0 up to soft_tokens, then evenly down to -1 at
    max_tokens."""
    if num_tokens <= soft_tokens:
        return 0.0, f"{num_tokens} tokens, within {soft_tokens}"
    over = min((num_tokens - soft_tokens) / (max_tokens - soft_tokens), 1.0)
    return -over, f"{num_tokens} tokens, over {soft_tokens} of at most {max_tokens}"
