"""gyre serve. In: a run folder, a model folder or a hub name; where to listen. Out: a server, until
it is stopped; with --dry-run, what it would take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.core.errors import ConfigError
from gyre.launch.run_folder.run_folder import find_model, is_model_name
from gyre.runconfig.run_config import RunConfig
from gyre.runconfig.toml_tree import apply_overrides

# columns of the text: no cell is folded below the first; the second where there is no terminal
FOLDED, UNFOLDED = 72, 120
# what a server reads of a config, beside [engine]
READ: dict[str, frozenset[str]] = {
    "run": frozenset(("device", "dtype", "threads")),
    "cluster": frozenset(
        (
            "start_deadline_s",
            "call_deadline_s",
            "hang_s",
            "stall_s",
            "return_s",
            "progress_tokens",
            "routing",
            "multicast",
        )
    ),
    "parallel": frozenset(("timeout_s",)),
    "tokenizer": frozenset(("end_token",)),
    "data": frozenset(("template", "system", "template_options")),
}
INSTEAD = {
    "cluster.max_restarts": "leave it out: an engine is started again 5 times within 10 minutes",
    "cluster": "leave it out; --replicas N serves with N engines of this host",
    "parallel": "leave it out; engine.tensor_ranks cuts each engine over several devices",
    "memory": "leave it out; engine.kv_bytes says how much KV takes",
    "model": "serve the folder, or the hub name, of that model",
    "tokenizer": "serve a folder that has that tokenizer",
    "run.seed": "leave it out; each request may have a seed",
    "run.stop_deadline_s": "give --drain-s",
    "run.name": "give --name",
    "observe.otlp_endpoint": "give --otlp-endpoint",
    "observe.prometheus": "leave it out; GET /metrics is always there",
    "engine.kind": "leave it out; gyre serve runs the native engine",
    "engine.vllm": "leave it out; gyre serve runs the native engine",
}


def run_serve(
    target: Path,
    config_path: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
    dry_run: bool = False,
    **given: Any,
) -> Mapping[str, Any]:
    revision = given.pop("revision")
    if given["follow"] is not None and is_model_name(target):
        raise ConfigError(
            f"--follow with {target}: only a folder here is looked at",
            hint="leave it out, or give a run folder or a model folder",
        )
    given["name"] = given["name"] or name_of(target)
    # refused before torch is loaded
    model, config = find_model(target, config_path, overrides, revision=revision, served=True)
    refuse_unread(overrides)
    if dry_run:
        return run_dry(model, config, as_json=as_json, **given)
    with loading():
        from gyre.launch.serving.server import ServeArgs, serve

    return serve(ServeArgs(folder=model, config=config, **given), as_json=as_json)


def refuse_unread(overrides: list[str]) -> None:
    """Raise ConfigError for a setting that was typed for the server and would change nothing. What
    a run's own config has for its training stays."""
    for section, fields in apply_overrides({}, overrides).items():
        for field, value in fields.items():
            if section == "engine":
                is_read = field != "vllm" and (field != "kind" or value == "native")
            else:
                is_read = field in READ.get(section, ())
            if not is_read:
                name = f"{section}.{field}"
                instead = (text for begin, text in INSTEAD.items() if name.startswith(begin))
                raise ConfigError(
                    f"--set {name}: a server does not read it",
                    hint=next(instead, "leave it out; it is for training"),
                )


def name_of(target: Path) -> str:
    """Return its name for clients by default: a hub name, or a folder's own name."""
    return str(target) if is_model_name(target) else target.resolve().name


def run_dry(model: Path, config: RunConfig, *, as_json: bool, **given: Any) -> Mapping[str, Any]:
    """Say what serving the model takes and bears. Nothing is started."""
    with loading():
        from gyre.launch.serving.plan import plan_serve

    columns = max(FOLDED, shutil.get_terminal_size((UNFOLDED, 24)).columns)
    name = given["name"]
    result = plan_serve(model, config, name=name, replicas=given["replicas"], columns=columns)
    text = result.pop("text")
    if not as_json:
        print(text, end="")
    return result
