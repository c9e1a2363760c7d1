"""Rows: JSONL, parquet and `datasets` rows to problems. In: a path and field names. Out:
`Problem`s, or an InputError that names file and line, the row's fields and the required ones.

Every field of a row that is not the prompt, the answer or a response is stored in `Problem.task`
(tests, level, …).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre.core.errors import ConfigError, InputError
from gyre.core.hub import has_copy, is_hub_name, is_reachable, near_folders, no_copy, offline_hint
from gyre.data.config import DataConfig
from gyre.data.problems import Problem
from gyre.data.turns import need, short, take_prompt

Row = tuple[str, dict[str, Any]]  # where, fields

MAX_DEPTH = 64  # lists and tables in each other; as_json, the codec and Python's json recurse


def read_rows(config: DataConfig, *, held_out: bool = False) -> Iterator[Row]:
    """Yield (where, row) in file order. `held_out` reads held_out_path or held_out_split
    instead."""
    if config.source == "datasets":
        return _dataset_rows(config, config.held_out_split if held_out else config.split)
    key = "held_out_path" if held_out else "path"
    path = _data_file(getattr(config, key), key)
    return _jsonl_rows(path) if config.source == "jsonl" else _parquet_rows(path)


def to_problems(
    rows: Iterable[Row], config: DataConfig, *, with_answers: bool
) -> Iterator[Problem]:
    """Extract the prompt, and with `with_answers` the answer, from each row."""
    try:
        pattern = re.compile(config.answer_pattern) if config.answer_pattern else None
    except re.error as error:
        raise ConfigError(
            f"data.answer_pattern = {config.answer_pattern!r} is not a regular expression: {error}",
            hint=r"for GSM8K use '#### (.+)'",
        ) from error
    named = (config.prompt_field, config.answer_field, config.response_field)
    taken = {*named, config.chosen_field, config.rejected_field}
    for where, row in rows:
        check_values(row, where)
        task = {name: as_json(value) for name, value in row.items() if name not in taken}
        if with_answers and config.answer_field:
            answer = need(
                row, config.answer_field, where, "answer_field", '; "" if no reward needs an answer'
            )
            task["answer"] = _extract(answer, pattern, where, config)
        yield Problem(where=where, prompt=take_prompt(row, where, config), task=task, fields=row)


def check_values(row: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a row nested deeper than MAX_DEPTH: later code traverses rows by
    recursion."""
    level: list[Any] = [row]
    for _ in range(MAX_DEPTH):
        level = [inside for value in level for inside in _inside(value)]
        if not level:
            return
    raise InputError(
        f"{where}: the row is nested deeper than {MAX_DEPTH} levels",
        hint="flatten it, or put the nested value into a text",
    )


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return (item for item in value.values() if isinstance(item, (Mapping, list, tuple)))
    return (
        (item for item in value if isinstance(item, (Mapping, list, tuple)))
        if isinstance(value, list | tuple)
        else ()
    )


def as_json(value: Any) -> Any:
    """Convert a value to the JSON types of records. Tuples become lists, numpy numbers plain ones,
    integers past 64 bits their digits, anything else its text."""
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    tolist = getattr(value, "tolist", None)  # numpy scalars and arrays
    return as_json(tolist()) if callable(tolist) else str(value)


def _extract(answer: Any, pattern: re.Pattern[str] | None, where: str, config: DataConfig) -> Any:
    if pattern is None:
        return as_json(answer)
    group = 1 if pattern.groups else 0
    found = [
        match.group(group)
        for match in pattern.finditer(str(answer))
        if match.group(group) is not None
    ]
    if not found:
        raise InputError(
            f"{where}: data.answer_pattern {config.answer_pattern!r} is not found in field "
            f"'{config.answer_field}', "
            f"which holds {short(answer)}",
            hint=r"correct the pattern ('#### (.+)' for GSM8K) or the row",
        )
    return found[-1].strip()


def _jsonl_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse_line(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: unreadable after line {number}: {error}",
            hint="the file is cut, damaged or not yours to read",
        ) from error


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    # ValueError: of UTF-8, of JSON, of an integer with too many digits
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: not a JSON object in UTF-8: {error}; the line begins {line[:60]!r}",
            hint="JSONL has one JSON object a line; a JSON array or a pretty-printed file must be "
            "converted",
        ) from error
    if b"\\ud" in line.lower():  # half of a surrogate pair is valid JSON and no text
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: the row holds half a surrogate pair, which is no character",
                hint="an emoji was cut in its JSON escapes; write the file again as UTF-8",
            ) from error
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: need a JSON object with named fields, got {short(row)}",
            hint="JSONL has one object a line",
        )
    return row


@contextmanager
def _without_retries(datasets: Any, *, local: bool) -> Iterator[None]:
    """Disable the library's retries where the hub is unreachable, so that it uses its cache at
    once."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or (not local and not is_reachable())
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "parquet files need pyarrow", hint='pip install "gyre-rl[data]"'
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not readable as parquet after row {number}: {error}",
            hint="the file is cut or of another format",
        ) from error


def refuse_missing_data(config: DataConfig) -> None:
    """Raise InputError for a missing file, folder or data set. Reads and downloads nothing."""
    if config.source != "datasets":
        for key in ("path", "held_out_path"):
            if value := getattr(config, key):
                _data_file(value, key)
        return
    _refuse_what_is_no_set(config.path)


def _data_file(value: str, key: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_file():
        raise InputError(
            f"data file {path} "
            f"{'is not a file' if path.exists() else 'does not exist'}{near_folders(path)}",
            hint=f"check data.{key}; it is relative to where gyre was started",
        )
    return path


def _refuse_what_is_no_set(name: str) -> None:
    """Raise InputError for a file, a name unknown to the hub, or one that is not available
    anywhere."""
    path = Path(name).expanduser()
    if path.is_dir():
        return
    if path.exists():
        raise InputError(
            f'data.path {name} is a file; data.source = "datasets" needs a folder or a hub name',
            hint='read a file with data.source = "jsonl" or "parquet"',
        )
    if not is_hub_name(name):
        raise InputError(
            f"data set {name} does not exist{near_folders(path)}",
            hint="check data.path: a folder written by save_to_disk, or a hub name such as "
            "openai/gsm8k",
        )
    if not _has_built_copy(name) and not is_reachable():
        raise InputError(no_copy(name, "data set"), hint=offline_hint("data set"))


def _has_built_copy(name: str) -> bool:
    """Return whether the cache of `datasets` has the data set, or the hub's cache its files."""
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(_hf_home()) / "datasets").expanduser()
    return has_copy(name, kind="dataset") or (cache / name.replace("/", "___")).is_dir()


def _hf_home() -> str:
    from huggingface_hub import constants

    return constants.HF_HOME


def _dataset_rows(config: DataConfig, split: str) -> Iterator[Row]:
    path = Path(config.path).expanduser()
    _refuse_what_is_no_set(config.path)  # before the library is loaded, and tries for half a minute
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise InputError(
            'data.source = "datasets" needs the library', hint='pip install "gyre-rl[data]"'
        ) from error
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            found = datasets.load_from_disk(str(path))
        else:
            with _without_retries(datasets, local=path.exists()):
                found = datasets.load_dataset(config.path, config.name or None)
    except (OSError, ValueError, RecursionError, DatasetsError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"data set {config.path} cannot be loaded: {said}",
            hint="check data.path and data.name; a hub name needs network access or a filled cache",
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise InputError(
                f"data set {config.path} has no split '{split}'; it has "
                f"{', '.join(map(str, found))}",
                hint="set data.split or data.held_out_split to one of these",
            )
        found = found[split]
    elif split != config.split:
        raise InputError(
            f"data set {config.path} has no splits, so none is called '{split}'",
            hint="leave data.held_out_split empty and use data.held_out_fraction",
        )
    for number, row in enumerate(found, start=1):
        yield f"{config.path}[{split}]:{number}", dict(row)
