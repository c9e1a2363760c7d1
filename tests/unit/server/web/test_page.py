"""The page's files as routes: headers, tags, what needs no key, and what the files may not do."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware

from gyre.server.gateway.gate import KeyGate
from gyre.server.gateway.key_store import KeyStore
from gyre.server.gateway.keys import create_key
from gyre.server.gateway.limits import KeyLimits
from gyre.server.web.page import HEADERS, MEDIA_TYPES, has_tag, page_routes, read_page

PAGE = read_page()
SCRIPTS = {path: file.content.decode() for path, file in PAGE.items() if path.endswith(".js")}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def visit(work: Callable[[httpx.AsyncClient], Awaitable[None]], *middleware: Middleware) -> None:
    async def go() -> None:
        app = Starlette(routes=list(page_routes(PAGE)), middleware=middleware)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
            await work(client)

    asyncio.run(go())


def test_each_file_comes_with_its_type_and_may_load_nothing_else() -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

    async def go(client: httpx.AsyncClient) -> None:
        for path, file in PAGE.items():
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, file.content)
            suffix = path.rpartition(".")[2] if path != "/" else "html"
            assert answer.headers["content-type"] == f"{types[suffix]}; charset=utf-8"
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            head = await client.head(path)
            assert (head.status_code, head.content) == (200, b"")

    visit(go)


def test_what_a_browser_has_kept_is_not_sent_again() -> None:
    async def go(client: httpx.AsyncClient) -> None:
        tags = {(await client.get(path)).headers["etag"]: path for path in PAGE}
        assert len(tags) == len(PAGE)
        for tag, path in tags.items():
            for given_tag in (tag, f"W/{tag}", f'"other", {tag}'):
                answer = await client.get(path, headers={"if-none-match": given_tag})
                assert (answer.status_code, answer.content) == (304, b"")
                assert answer.headers["etag"] == tag
                assert answer.headers["cache-control"] == "no-cache"
                assert answer.headers.items() >= HEADERS.items()
            answer = await client.get(path, headers={"if-none-match": '"other"'})
            assert answer.status_code == 200

    visit(go)


@given(st.text(max_size=40))
def test_no_other_tag_is_taken_for_the_file_s(text: str) -> None:
    tag = PAGE["/"].etag
    assert has_tag(text, tag) == (tag in text or "*" in [one.strip() for one in text.split(",")])


@pytest.mark.parametrize(
    "path",
    ["/web", "/web/", "/web/index.html", "/web/page.py", "/web/..%2fpage.py", "/web/a/main.js"],
)
def test_nothing_else_is_served(path: str) -> None:
    async def go(client: httpx.AsyncClient) -> None:
        assert (await client.get(path)).status_code in (307, 404)
        assert (await client.post("/")).status_code == 405

    visit(go)


def test_with_keys_the_files_need_none_and_everything_else_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    create_key(keys, name="", role="user", limits=KeyLimits())
    gate = KeyGate(KeyStore(keys, emit=lambda kind, **fields: None), open_paths=PAGE)

    async def go(client: httpx.AsyncClient) -> None:
        for path in PAGE:
            assert (await client.get(path)).status_code == 200
        for path in PAGE:
            near = (f"{path}/", f"{path}x", f"/{path}", path.upper().replace("/", "//"))
            for one in near:
                answer = await client.get(httpx.URL("http://m").copy_with(raw_path=one.encode()))
                assert answer.status_code == 401, one
        for path in ("/web", "/web/", "/web/nothing.js", "/metrics", "/v1/models", "/openapi.json"):
            assert (await client.get(path)).status_code == 401

    visit(go, Middleware(gate.guard, count=lambda code: None))


def test_every_file_is_served_and_packed() -> None:
    folder = files("gyre.server.web") / "static"
    names = {file.name for file in folder.iterdir()}
    assert {path.rpartition("/")[2] or "index.html" for path in PAGE} == names
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    packed = project["tool"]["setuptools"]["package-data"]["gyre"]
    assert {f"**/*{suffix}" for suffix in MEDIA_TYPES} <= set(packed)


def test_every_import_is_there() -> None:
    for path, text in SCRIPTS.items():
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/web/{name}" in PAGE, (path, name)
    html = PAGE["/"].content.decode()
    assert set(re.findall(r'(?:src|href)="(/[^"]*)"', html)) == {"/web/app.css", "/web/main.js"}


def test_no_file_takes_markup_from_text_or_names_another_place() -> None:
    """The policy refuses these too; a reader should not have to trust it alone."""
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    for path, text in SCRIPTS.items():
        assert not re.search(sinks, text), path
        places = set(re.findall(r"https?://[\w.-]+", text))
        assert places <= {"http://www.w3.org"}, path  # the name of SVG's elements
    html = PAGE["/"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", html)
    assert "url(" not in PAGE["/web/app.css"].content.decode()
