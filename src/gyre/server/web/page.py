"""Page: the web app as routes. In: the files in `static/`. Out: GET routes, with headers by which a
browser runs and loads nothing but these files.

The files need no key, since a browser asks for them before anybody could give one. They hold
nothing of the model, its users or this server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

# script and style from these files alone; the last two refuse markup that a script makes of text
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but asked for by tag: scripts of two versions never mix
}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FIRST = "index.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file, as it is answered."""

    content: bytes
    media_type: str
    etag: str


def read_page() -> Mapping[str, PageFile]:
    """Return the files of the package by the path that each is asked for at."""
    folder = files("gyre.server.web") / "static"
    found = {}
    for file in folder.iterdir():
        suffix = PurePosixPath(file.name).suffix
        if suffix in MEDIA_TYPES:
            content = file.read_bytes()
            found["/" if file.name == FIRST else f"/web/{file.name}"] = PageFile(
                content=content,
                media_type=MEDIA_TYPES[suffix],
                etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            )
    return found


def page_routes(page: Mapping[str, PageFile]) -> Sequence[Route]:
    """Return the routes. One takes all files below /web, so that they share a series of metrics."""

    async def answer(http: HttpRequest) -> Response:
        file = page.get(http.scope["path"])
        if file is None:
            raise HTTPException(404)
        headers = HEADERS | {"etag": file.etag}
        if has_tag(http.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return [Route("/", answer, methods=["GET"]), Route("/web/{name}", answer, methods=["GET"])]


def has_tag(given: str, etag: str) -> bool:
    """Return whether an If-None-Match names the tag, which a proxy may have made weak. Pure."""
    tags = [one.strip().removeprefix("W/") for one in given.split(",")]
    return etag in tags or "*" in tags
