"""Python engine: a model in this process, without a server. In: a run or model folder, prompts.
Out: generations, on the caller's thread or its event loop.

One class has both ways to call. Its event loop runs in a thread of its own. So the blocking
methods work where a loop runs already, as in a notebook, and those with an `a` on any loop. The
objects behind it are those of `gyre serve`, and so are the answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from gyre.core.events import Emit
from gyre.core.hub import is_hub_name
from gyre.core.records import EngineStats, Request
from gyre.launch.python.engine_thread import EngineThread
from gyre.launch.python.requests import (
    Asked,
    ChatArgs,
    GenerateArgs,
    Messages,
    TextPrompt,
    as_gyre_error,
    chats_asked,
    stream_asked,
    texts_asked,
)
from gyre.launch.python.results import RequestOutput
from gyre.launch.python.streams import AsyncTextStream, OpenCompletion, TextStream
from gyre.launch.run_folder.run_folder import find_model
from gyre.models.hub.folders import find_folder, refuse_reward_model
from gyre.runconfig.run_config import RunConfig
from gyre.server.bodies.schema import ApiError

RUN_KEYS = ("device", "dtype", "threads")  # settings of [run]; all others are of [engine]


def find_served(
    path: str | Path, config: str | Path | None, settings: Mapping[str, Any]
) -> tuple[Path, RunConfig]:
    """Return the model folder and the settings that `gyre serve` would take. A hub name that is no
    folder here is fetched. ConfigError for a setting that there is not."""
    target = Path(path).expanduser()
    if not target.exists() and "/" in str(path) and is_hub_name(str(path)):
        target = find_folder(path)
    overrides = [
        f"{'run' if name in RUN_KEYS else 'engine'}.{name}={json.dumps(value, default=str)}"
        for name, value in settings.items()
    ]
    return find_model(target, None if config is None else Path(config), overrides)


def log_event(kind: str, /, **fields: Any) -> None:
    """Pass an event to the logger "gyre.engine": faults as warnings, others for debugging."""
    is_fault = kind.startswith("warn.") or kind.endswith("failed")
    level = logging.WARNING if is_fault else logging.DEBUG
    logging.getLogger("gyre.engine").log(level, "%s %s", kind, fields)


class Engine:
    """A model that answers in this process. It has the device's memory until `close`."""

    def __init__(
        self,
        path: str | Path,
        *,
        config: str | Path | None = None,
        emit: Emit = log_event,
        **settings: Any,
    ) -> None:
        """Load the model. `path` is a run, a model folder or a hub name. `config` is a run's TOML,
        for a model folder. `settings` are keys of [engine], or device, dtype, threads of [run]."""
        folder, decided = find_served(path, config, settings)
        refuse_reward_model(folder)
        self._thread = EngineThread(folder, decided, name=str(path), emit=emit)
        weakref.finalize(self, self._thread.stop).atexit = False  # a daemon thread ends by itself

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._thread.local.model.context_tokens

    # -- blocking

    @overload
    def generate(self, prompts: TextPrompt, **asked: Unpack[GenerateArgs]) -> RequestOutput: ...
    @overload
    def generate(
        self, prompts: Sequence[TextPrompt], **asked: Unpack[GenerateArgs]
    ) -> list[RequestOutput]: ...
    def generate(self, prompts: Any, **asked: Any) -> Any:
        """Continue a prompt, or each of a list: texts or token ids."""
        return self._thread.run(self._answer(texts_asked(prompts, asked)))

    @overload
    def chat(self, messages: Messages, **asked: Unpack[ChatArgs]) -> RequestOutput: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], **asked: Unpack[ChatArgs]
    ) -> list[RequestOutput]: ...
    def chat(self, messages: Any, **asked: Any) -> Any:
        """Answer a conversation, or each of a list."""
        return self._thread.run(self._answer(chats_asked(messages, asked)))

    def stream(self, prompt: TextPrompt | Messages, **asked: Unpack[GenerateArgs]) -> TextStream:
        """Return the texts of one completion, as they are chosen. A list of messages is answered as
        by `chat`."""
        return TextStream(self._thread, self._open(prompt, asked), self)

    def stats(self) -> EngineStats:
        """Return what the engine runs, holds and has counted."""
        return self._thread.run(self._thread.local.engine.stats())

    def close(self) -> None:
        """Free the model's memory and end the engine's threads. Requests under way are aborted.
        May be called twice."""
        self._thread.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the caller's event loop

    @overload
    async def agenerate(
        self, prompts: TextPrompt, **asked: Unpack[GenerateArgs]
    ) -> RequestOutput: ...
    @overload
    async def agenerate(
        self, prompts: Sequence[TextPrompt], **asked: Unpack[GenerateArgs]
    ) -> list[RequestOutput]: ...
    async def agenerate(self, prompts: Any, **asked: Any) -> Any:
        """Await `generate`. Cancelling it aborts the requests."""
        return await self._thread.arun(self._answer(texts_asked(prompts, asked)))

    @overload
    async def achat(self, messages: Messages, **asked: Unpack[ChatArgs]) -> RequestOutput: ...
    @overload
    async def achat(
        self, messages: Sequence[Messages], **asked: Unpack[ChatArgs]
    ) -> list[RequestOutput]: ...
    async def achat(self, messages: Any, **asked: Any) -> Any:
        """Await `chat`. Cancelling it aborts the requests."""
        return await self._thread.arun(self._answer(chats_asked(messages, asked)))

    def astream(
        self, prompt: TextPrompt | Messages, **asked: Unpack[GenerateArgs]
    ) -> AsyncTextStream:
        """Return `stream` for `async for`."""
        return AsyncTextStream(self._thread, self._open(prompt, asked), self)

    async def astats(self) -> EngineStats:
        """Await `stats`."""
        return await self._thread.arun(self._thread.local.engine.stats())

    async def aclose(self) -> None:
        """Await `close`."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- both

    def _open(self, prompt: Any, asked: Mapping[str, Any]) -> OpenCompletion:
        one = stream_asked(prompt, asked)
        return OpenCompletion(self._thread.local, one)

    async def _answer(self, asked: Asked | list[Asked]) -> RequestOutput | list[RequestOutput]:
        """Answer on the engine's loop. All requests are checked before the first is submitted."""
        several = [asked] if isinstance(asked, Asked) else asked
        local = self._thread.local
        try:
            requests: list[Request] = []
            for one in several:
                requests.append(one.request(local.model))
                await asyncio.sleep(0)  # let answers of other callers go on
            answers = await local.complete(requests)
        except ApiError as error:
            raise as_gyre_error(error) from None
        found = [
            RequestOutput(
                prompt_tokens=tuple(request.tokens.tolist()), completions=one.completions(parts)
            )
            for one, request, parts in zip(several, requests, answers, strict=True)
        ]
        return found[0] if isinstance(asked, Asked) else found
