"""gyre serve OWNER/MODEL: the hub's own client against a server that speaks the hub's few routes, on
loopback. --dry-run loads everything but the weights into an engine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from system_models import save_checkpoint

pytestmark = pytest.mark.slow  # `make test` has the servers of test_serve.py

NAME, COMMIT = "owner/tiny", "a" * 40


@contextmanager
def hub(folder: Path, asked: list[str]) -> Iterator[str]:
    """The URL of a hub that has one model."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["pytorch_model.bin"] = b"a file that nobody should fetch"

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            asked.append(path)
            about, resolve = f"/api/models/{NAME}", f"/{NAME}/resolve/{COMMIT}/"
            if path == about or path.startswith((f"{about}/revision/", f"{about}/tree/")):
                data = json.dumps(self.tell(path)).encode()
                self.send(200, data, with_body, {"Content-Type": "application/json"})
            elif path.startswith(resolve) and (name := path.removeprefix(resolve)) in files:
                tag = hashlib.sha256(files[name]).hexdigest()
                headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
                self.send(200, files[name], with_body, headers)
            else:
                missing = {"X-Error-Code": "RepoNotFound"}
                self.send(404, b'{"error": "Repository not found"}', with_body, missing)

        def tell(self, path: str) -> object:
            if "/tree/" in path:
                return [
                    {"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                    for name, data in files.items()
                ]
            names = [{"rfilename": name} for name in files]
            return {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": names}

        def send(self, status: int, data: bytes, with_body: bool, more: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def run(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in an empty folder, with a cache of its own for the hub's files."""
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env={**kept, "HF_HOME": str(folder / "hf"), "NO_PROXY": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def serve(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from gyre.cli.main import main; main()"
    return run(folder, "-c", code, "serve", *argv, "--dry-run", "--json", **environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


def test_a_hub_name_is_fetched_once_and_then_served_without_the_hub(model, tmp_path) -> None:
    asked: list[str] = []
    with hub(model, asked) as url:
        done = serve(tmp_path / "a", NAME, "--revision", "v2", HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["model"]
    assert told["name"] == NAME
    assert any(path == f"/api/models/{NAME}/revision/v2" for path in asked)
    (snapshot,) = (tmp_path / "a" / "hf" / "hub").glob("models--owner--tiny/snapshots/*")
    found = {path.name for path in snapshot.iterdir()}
    assert snapshot.name == COMMIT and found == {path.name for path in model.iterdir()}
    assert (snapshot / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    code = "import sys; from pathlib import Path\n"
    code += "from gyre.launch.run_folder.run_folder import find_model\n"
    code += f"print(find_model(Path({NAME!r}), None, [], revision='v2')[0])"
    again = run(tmp_path / "a", "-c", code, HF_HUB_OFFLINE="1")
    assert again.stdout.strip() == str(snapshot), again.stderr


CLOSED = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("argv", "environment", "said"),
    [
        (
            (NAME,),
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE is set, and the hub's cache has no copy",
        ),
        ((NAME,), {"HF_ENDPOINT": CLOSED}, "the hub cannot be reached"),
        ((NAME, "--follow"), {"HF_ENDPOINT": CLOSED}, "only a folder here is looked at"),
        (("here/tiny",), {"HF_ENDPOINT": CLOSED}, "neither a run folder nor a model folder"),
        (("here", "--revision", "v2"), {"HF_ENDPOINT": CLOSED}, "has no revisions"),
    ],
)
def test_what_cannot_be_had_is_said(tmp_path, argv, environment, said) -> None:
    (tmp_path / "a" / "here").mkdir(parents=True)
    (tmp_path / "a" / "here" / "config.json").write_text("{}")
    done = serve(tmp_path / "a", *argv, **environment)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert done.returncode == 2 and said in error["message"] and error["hint"]


def test_a_name_that_the_hub_does_not_have(model, tmp_path) -> None:
    with hub(model, []) as url:
        done = serve(tmp_path / "a", "owner/other", HF_ENDPOINT=url)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert done.returncode == 2 and "neither a folder here nor a model" in error["message"]
