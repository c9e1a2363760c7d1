"""A real Prometheus for tests, on loopback. In: a folder, a config, a server to scrape. Out: what
its HTTP API answers. Debian's package has it, and promtool."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from etcd_process import free_ports

START_S = 30.0
END_S = 20.0
PORT_TAKEN = "address already in use"  # by another process, since `free_ports` looked


def find_tool(name: str) -> str:
    """Where `prometheus` or `promtool` is; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return found


class PrometheusProcess:
    """Starts at once; `close` ends it."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """`config` is what prometheus.yml says; its rule files are found from its own folder."""
        tool = find_tool("prometheus")
        folder.mkdir(exist_ok=True)
        self._log = folder / "prometheus.log"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        try:
            self._start(tool, folder)
        except AssertionError:
            if PORT_TAKEN not in self.log():
                raise
            self._start(tool, folder)

    def _start(self, tool: str, folder: Path) -> None:
        """Leaves no process where it fails."""
        (port,) = free_ports(1)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [tool, f"--config.file={folder / 'prometheus.yml'}",
                 f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> None:
        ends_s = time.monotonic() + START_S
        while time.monotonic() < ends_s:
            assert self.process.poll() is None, self.log()
            try:
                if self._client.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(self.log())

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def get(self, path: str, **params: str | list[str]) -> Any:
        """What the API answers; a query that does not parse fails here."""
        answer = self._client.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, (params, answer.text)
        return answer.json()["data"]

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series that a query gives now."""
        data = self.get("query", query=query)
        assert data["resultType"] == "vector", (query, data["resultType"])
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def close(self) -> None:
        self._client.close()
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)
