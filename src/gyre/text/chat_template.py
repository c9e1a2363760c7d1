"""Chat templates: programs from model folders, rendered in a separate process. In: a template,
conversations, tools. Out: their text, or an InputError that names the template's file.

A template is untrusted code. jinja2's sandbox denies files and processes, but bounds neither time
nor memory. The process (`chat_template_child`) does, and is terminated when a template exceeds its
limits. It starts with the first conversation and ends with its `ChatTemplate`, or with this
process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.core.errors import ConfigError, InputError
from gyre.text.chat_template_child import HEADER
from gyre.text.messages import AnyMessage, Tool, as_schemas, as_turns, count_chars

# per call; templates of published models take below a millisecond for a conversation
CPU_LIMIT_S = 1.5
WALL_LIMIT_S = 60.0  # for a machine that gives the process no CPU
EXTRA_CHARS = 1 << 20  # that a template may write beside four times what it was given
RESERVED = (
    "messages",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "continue_final_message",
    "return_dict",
)
ADVICE = (
    "some models take no system message or need user and assistant to alternate (see "
    "data.system); a template that is "
    'broken can be avoided: data.template = "{prompt}", with tokenizer.end_token'
)

Messages = Sequence[AnyMessage]


class ChatTemplate:
    """One template of one model folder. Thread-safe; serves one caller at a time."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, where: str) -> None:
        """Bind the template. `variables` are the special tokens by name; `where` is the template's
        file."""
        self.source = source
        self.where = where
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()  # that the template takes from outside
        self.child: _Child | None = None

    def render(
        self,
        conversations: Sequence[Messages],
        options: Mapping[str, Any],
        *,
        generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
    ) -> list[str]:
        """Return the text of each conversation, ready for the model's turn with
        `generation_prompt`. All of them have the same tools. A batch costs less than single calls;
        the CPU limit covers the whole batch."""
        for name in RESERVED:
            if name in options:
                raise ConfigError(
                    f"data.template_options.{name}: gyre sets this itself",
                    hint="leave it out of data.template_options",
                )
        turns, schemas = [as_turns(messages) for messages in conversations], as_schemas(tools)
        # templates write the tools once in each conversation
        num_chars = count_chars(turns) + len(turns) * count_chars(schemas or [])
        variables = {"tools": None, "documents": None, **self._variables, **options}
        if schemas is not None:
            variables["tools"] = schemas
        request = {
            "variables": variables | {"add_generation_prompt": generation_prompt},
            "conversations": turns,
            "max_chars": 4 * num_chars + EXTRA_CHARS,
            "cpu_s": CPU_LIMIT_S,
        }
        with self._lock:
            if self.child is None:
                self._start()
            return self._ask(request)

    def uses(self, name: str) -> bool:
        """Return whether the template reads the variable `name`. InputError when it cannot be
        compiled."""
        with self._lock:
            if self.child is None:
                self._start()
            return name in self._names

    def close(self) -> None:
        """Terminate the process. The next `render` starts another one."""
        with self._lock:
            if self.child is not None:
                self.child.stop()
                self.child = None

    def _start(self) -> None:
        self.child = _Child()
        weakref.finalize(self, self.child.stop)
        names = self._ask(
            {
                "path": [path for path in sys.path if path],
                "template": self.source,
                "cpu_s": CPU_LIMIT_S,
            }
        )
        self._names = frozenset(names)

    def _ask(self, request: Mapping[str, Any]) -> list[str]:
        assert self.child is not None
        try:
            answer = self.child.ask(json.dumps(request, default=str).encode())
            reason = answer.get("error")
        except (OSError, EOFError) as fault:  # TimeoutError is an OSError
            reason, answer = self.child.why_gone(fault), {}
        except BaseException:  # Ctrl-C within an exchange: what comes next would be its answer
            self.child.stop()
            self.child = None
            raise
        if reason is not None:
            self.child.stop()
            self.child = None
            raise InputError(
                f"the chat template in {self.where} refused the conversation: {reason}", hint=ADVICE
            )
        return answer["texts"]


class _Child:
    """The process and the socket to it."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self._link.settimeout(WALL_LIMIT_S)
        script = str(Path(__file__).with_name("chat_template_child.py"))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-P", script, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )

    def ask(self, request: bytes) -> dict[str, Any]:
        """Return the answer. Raises OSError or EOFError when the process exited or timed out."""
        self._link.sendall(HEADER.pack(len(request)))
        self._link.sendall(request)
        size = HEADER.unpack(self._read(HEADER.size))[0]
        return json.loads(self._read(size))

    def why_gone(self, fault: Exception) -> str:
        if isinstance(fault, TimeoutError):
            return f"it gave no answer in {WALL_LIMIT_S:g} s"
        try:
            code = self.process.wait(WALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if code == -signal.SIGPROF:
            return f"it took more than {CPU_LIMIT_S:g} s of CPU time"
        return (
            "its process ended with "
            f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        )

    def stop(self) -> None:
        self._link.close()
        self.process.kill()
        self.process.wait()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._link.recv(min(1 << 20, size - len(data)))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)
