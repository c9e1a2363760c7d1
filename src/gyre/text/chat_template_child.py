"""Template child: the process that renders untrusted chat templates. In: frames on a socket: the
template once, then lists of conversations. Out: a frame for each: the names of the template's
variables, then texts, or an error. Started by `gyre.text.chat_template`.

Imports the standard library, and jinja2 once it knows the path. The kernel terminates it at its CPU
limit (ITIMER_PROF); its address space is limited while a template runs (RLIMIT_AS).
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import sys
from datetime import datetime
from typing import Any

HEADER = struct.Struct("!Q")  # bytes of a frame's JSON
BASE_BYTES = 256 << 20  # address space beside what a request of this size needs
BYTES_PER_REQUEST_BYTE = 24  # decoded, with 4 bytes a character, and the text made of it


def main(handle: int) -> None:
    # Ctrl-C is the parent's to answer; the end of the socket ends this
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # which ends the process; a parent may have passed on another
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with socket.socket(fileno=handle) as link:
        setup = receive(link)
        assert setup is not None
        sys.path[:] = setup["path"]
        import jinja2  # noqa: F401  before the limits are set

        made: list[Any] = []
        send(link, bounded(lambda: compile_into(made, setup["template"]), setup))
        while (request := receive(link)) is not None:
            send(link, bounded(lambda asked=request: render(made[0], asked), request))


def bounded(work: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run `work` within the request's limits; return its result or its error."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = BASE_BYTES + BYTES_PER_REQUEST_BYTE * request["size_bytes"]
    room = room if hard == resource.RLIM_INFINITY else min(room, hard)
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    try:
        return {"texts": work()}
    except MemoryError:
        return {"error": f"it needs more than {room >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001
        # the program is from elsewhere: whatever it raises is its answer
        said = str(error)[:300]
        return {
            "error": said
            if type(error).__name__ == "TemplateError"
            else f"{type(error).__name__}: {said}"
        }
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def render(template: Any, request: dict[str, Any]) -> list[str]:
    """Return the text of each conversation."""
    texts, size = [], 0
    for messages in request["conversations"]:
        pieces = []
        for piece in template.generate(messages=messages, **request["variables"]):
            size += len(piece)
            if size > request["max_chars"]:
                raise ValueError(f"it writes more than {request['max_chars']} characters")
            pieces.append(piece)
        texts.append("".join(pieces))
    return texts


def compile_into(made: list[Any], source: str) -> list[str]:
    """Append the compiled template to `made`; return the names that it takes from outside."""
    import jinja2.meta

    environment = make_environment()
    made.append(environment.from_string(source))
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def make_environment() -> Any:
    """Return the environment of transformers.apply_chat_template. It has block trimming, loop
    controls, the generation tag, and the names tojson, raise_exception, strftime_now, namespace and
    dict."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012  as the base class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.TemplateError(
                    f"a namespace takes no name that begins with an underscore, got {name!r}"
                )
            super().__setitem__(name, value)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Namespace,
        "dict": make_dict,
    }
    return environment


def receive(link: socket.socket) -> dict[str, Any] | None:
    """Return the next frame; None when the parent has exited."""
    header = _read(link, HEADER.size)
    if header is None:
        return None
    data = _read(link, HEADER.unpack(header)[0])
    return None if data is None else {**json.loads(data), "size_bytes": len(data)}


def _read(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(1 << 20, size - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)


def send(link: socket.socket, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    link.sendall(HEADER.pack(len(data)) + data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
