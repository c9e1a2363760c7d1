"""A real etcd for tests, on loopback, that can be stopped, killed and given older data. In: a
folder. Out: its client URL."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

START_S = 30.0


class EtcdProcess:
    """Starts at once; `close` ends it. Its leases take one second at least, since it elects itself
    ten times faster than by default."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http") -> None:
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed (Debian: etcd-server)")
        folder.mkdir(exist_ok=True)
        self.folder, self._flags = folder, flags
        client, peer, health = free_ports(3)
        self.url, self.peer = f"{scheme}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._health = f"http://127.0.0.1:{health}"
        self.process: subprocess.Popen[bytes] | None = None
        if "--initial-cluster" not in flags:
            self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        self.launch(self._flags)
        self.await_health()

    def launch(self, flags: tuple[str, ...]) -> None:
        assert self.process is None
        self._flags = flags
        alone = () if "--initial-cluster" in flags else ("--initial-cluster", f"one={self.peer}")
        log = (self.folder / "etcd.log").open("ab")
        self.process = subprocess.Popen(
            ["etcd", "--name", "one", "--data-dir", str(self.data),
             "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
             "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer,
             "--listen-metrics-urls", self._health,
             "--heartbeat-interval", "10", "--election-timeout", "100", *alone, *flags],
            stdout=log, stderr=log,
        )  # fmt: skip
        log.close()

    def await_health(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            assert self.process is not None and self.process.poll() is None, self.log()
            try:
                with urllib.request.urlopen(f"{self._health}/health", timeout=1) as answer:
                    if b'"true"' in answer.read():
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise AssertionError(self.log())

    def log(self) -> str:
        return (self.folder / "etcd.log").read_text()[-4000:]

    def kill(self) -> None:
        """End it with SIGKILL; its data stays."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(20)
        self.process = None

    def end(self) -> None:
        """End it with SIGTERM, so that it may say goodbye to its clients."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(20)
        self.process = None

    def stop(self) -> None:
        assert self.process is not None
        stop_process(self.process)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def ctl(self, *words: str) -> str:
        """Run etcd's own command; return what it prints."""
        command = shutil.which("etcdctl")
        if command is None:
            pytest.skip("etcdctl is not installed (Debian: etcd-client)")
        return subprocess.run(
            [command, "--endpoints", self.url, *words],
            env={"ETCDCTL_API": "3"}, check=True, capture_output=True, text=True, timeout=30,
        ).stdout  # fmt: skip

    def ask(self, revision: int = 0) -> tuple[dict[str, tuple[str, int]], int]:
        """What etcd itself answers: values and leases by key under /gyre/ at a revision (0: the
        newest), and the newest revision."""

        def coded(text: str) -> str:
            return base64.b64encode(text.encode()).decode()

        body = {"key": coded("/gyre/"), "range_end": coded("/gyre0"), "revision": revision}
        request = urllib.request.Request(f"{self.url}/v3/kv/range", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as response:
            answer = json.load(response)
        found = {
            base64.b64decode(entry["key"]).decode(): (
                base64.b64decode(entry["value"]).decode(),
                int(entry.get("lease", 0)),
            )
            for entry in answer.get("kvs", ())
        }
        return found, int(answer["header"]["revision"])

    def copy_data(self, name: str) -> Path:
        """Copy the data of a killed etcd."""
        assert self.process is None
        return Path(shutil.copytree(self.data, self.folder / name))

    def take_data(self, older: Path) -> None:
        """Put older data into its place."""
        assert self.process is None
        shutil.rmtree(self.data)
        shutil.copytree(older, self.data)

    def close(self) -> None:
        if self.process is not None:
            self.kill()


def start_members(folder: Path, number: int) -> list[EtcdProcess]:
    """Start the members of one cluster."""
    members = [
        EtcdProcess(folder / f"member-{index}", "--initial-cluster") for index in range(number)
    ]
    peers = ",".join(f"member-{index}={member.peer}" for index, member in enumerate(members))
    for index, member in enumerate(members):
        member.launch(("--name", f"member-{index}", "--initial-cluster", peers))
    for member in members:
        member.await_health()
    return members


def stop_process(process: subprocess.Popen[Any]) -> None:
    """Stop a child, and return when all its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
