"""Hub child: reads a hub tokenizer in a process of its own. In: a folder. Out: one JSON object on
stdout: the tokenizer, or why it cannot be read.

transformers imports torch where there is one, and with it much that no tokenizer needs. The child
has no torch, so it is done in a third of the time, and the starter imports neither.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import tokenizers

from gyre.core.errors import DeadlineError, InputError
from gyre.core.files import write_text
from gyre.text.hub import HubFiles, load

READ_S = 300.0  # on a cold disk, the imports take a minute
LOOK_S = 0.02
PROGRAM = "gyre.text.hub_child"


def load_apart(folder: Path, *, keep: Path | None = None) -> HubFiles:
    """Return what `load` returns, without importing transformers here. InputError as there. `keep`
    gets what was found, for other processes (`load_kept`)."""
    # -P: no Python of the folder where this was started is imported
    argv = [sys.executable, "-P", "-m", PROGRAM, str(folder)]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=READ_S, check=True)
        found = _files_of(ran.stdout)
        if keep is not None:
            write_text(keep, ran.stdout, durable=False)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise InputError(
            f"the tokenizer of {folder} could not be read: {said[-300:]}",
            hint="load it with transformers.AutoTokenizer to see more",
        ) from error
    return found


def load_kept(folder: Path, *, kept: Path) -> HubFiles:
    """Return what `load_apart` found in `folder`, and keeps in the file `kept`, once it is there.
    DeadlineError where it does not come."""
    until_s = time.monotonic() + READ_S
    while not kept.is_file():
        if time.monotonic() > until_s:
            raise DeadlineError(
                f"the tokenizer of {folder} was not read within {READ_S:g} s",
                hint="the server's log says what became of it",
            )
        time.sleep(LOOK_S)
    return _files_of(kept.read_text(encoding="utf-8"))


def _files_of(text: str) -> HubFiles:
    """Return the files that `describe` described. ValueError for another text."""
    found = json.loads(text)
    if (failure := found.pop("failure", None)) is not None:
        raise InputError(failure["message"], hint=failure["hint"])
    return HubFiles(backend=tokenizers.Tokenizer.from_str(found.pop("backend")), **found)


def describe(folder: Path) -> dict[str, object]:
    """Return the tokenizer as JSON-able values."""
    try:
        files = load(folder)
    except InputError as error:
        return {"failure": {"message": error.message, "hint": error.hint}}
    return {
        "backend": files.backend.to_str(),
        "chat_template": files.chat_template,
        "special_tokens": dict(files.special_tokens),
        "bos_id": files.bos_id,
        "eos_id": files.eos_id,
        "pad_id": files.pad_id,
        "size": files.size,
    }


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    json.dump(describe(Path(sys.argv[1])), sys.stdout)
