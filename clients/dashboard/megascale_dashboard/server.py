"""The pages and their JSON twins over HTTP, for holders of the cluster's token.

    /  /fleet  /nodes/NAME  /jobs  /jobs/NAME  /events?subject=SUBJECT
    /jobs/NAME/ranks  /jobs/NAME/heat  /jobs/NAME/slower
    /jobs/NAME/timeline?rank=N&group=pp&steps=N&step=N

The twin of a page is its path with .json (``/now.json`` for the first). Nothing here changes the
cluster.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megascale_client import (
    InvalidRequest,
    MegascaleError,
    NotAllowed,
    NotFound,
    NotPossible,
    Unavailable,
)
from megascale_dashboard.access import COOKIE, SESSION_S, Access, TooManyAttempts
from megascale_dashboard.cluster_reader import ClusterReader
from megascale_dashboard.live import LiveStreams
from megascale_dashboard.page_values import Page
from megascale_dashboard.timeline_view import Wanted

_LINKS = (("/", "Now"), ("/fleet", "Fleet"), ("/jobs", "Jobs"), ("/events", "Events"))

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - megascale</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/uplot-1.6.32.min.css">
<link rel="stylesheet" href="/static/app.css">
<script src="/static/theme.js"></script>
{scripts}</head>
"""
_SCRIPTS = """<script src="/static/uplot-1.6.32.min.js" defer></script>
<script type="module" src="/static/app.js"></script>
"""
_PAGE = """<body>
<a class="skip" href="#page">Skip to the page</a>
<header>
<a class="brand" href="/">megascale</a>
<nav aria-label="Pages">{links}</nav>
<p id="live" role="status" data-state="loading">connecting</p>
<button id="theme" type="button">Dark or light</button>
<form method="post" action="/logout"><button>Log out</button></form>
</header>
<main id="page" tabindex="-1" aria-busy="true"><p class="state">Loading ...</p></main>
<noscript><p class="state">These pages need JavaScript; <a href="{twin}">the JSON version</a>
does not.</p></noscript>
<footer><a id="twin" href="{twin}">This page as JSON</a>
<span>Keys: <kbd>n</kbd> now, <kbd>f</kbd> fleet, <kbd>j</kbd> jobs, <kbd>e</kbd> events,
<kbd>/</kbd> filter</span></footer>
</body>
</html>
"""
_LOGIN = """<body>
<main id="page" class="login">
<h1>megascale</h1>
<form method="post" action="/login">
<label for="token">Token of the cluster</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Log in</button>
</form>
{problem}<p>The token is in the file <code>token</code> of the run folder.
The command <code>megascale dashboard</code> prints a link that needs no typing.</p>
</main>
</body>
</html>
"""


def page(path: str, twin: str, title: str) -> str:
    """The shell of the page at ``path``, whose JSON is at ``twin``."""
    links = "".join(f'<a href="{link}"{_current(link, path)}>{word}</a>' for link, word in _LINKS)
    head = _HEAD.format(title=escape(title), scripts=_SCRIPTS)
    return head + _PAGE.format(links=links, twin=escape(twin))


def login(problem: str = "") -> str:
    """The page that asks for the token."""
    shown = f'<p class="problem" role="alert">{escape(problem)}</p>\n' if problem else ""
    return _HEAD.format(title="Log in", scripts="") + _LOGIN.format(problem=shown)


def _current(link: str, path: str) -> str:
    inside = path == link or (link == "/jobs" and path.startswith("/jobs/"))
    inside = inside or (link == "/fleet" and path.startswith("/nodes/"))
    return ' aria-current="page"' if inside else ""


STATIC = Path(__file__).parent / "static"
MAX_FORM_BYTES = 4096
Read = Callable[[Request], Awaitable[Page]]

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
# State of the page and HTTP status for a failed call.
_STATES: tuple[tuple[type[MegascaleError], str, int], ...] = (
    (NotFound, "missing", 404),
    (NotAllowed, "not-permitted", 403),
    (InvalidRequest, "refused", 400),
    (NotPossible, "not-possible", 409),
    (Unavailable, "away", 503),
    (MegascaleError, "failed", 502),
)


def build(
    reader: ClusterReader,
    access: Access,
    streams: LiveStreams,
    *,
    hosts: Sequence[str],
    secure: bool = False,
) -> Starlette:
    """The application.

    Args:
        hosts: names by which browsers can call it; others are refused, so that a foreign site
            cannot reach it through a name of its own.
        secure: whether it is served by TLS, which the cookie then demands.
    """
    pages = _Pages(reader, streams, access, secure)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await reader.close()

    routes = [
        Route("/login", pages.login, methods=["GET", "POST"]),
        Route("/logout", pages.logout, methods=["POST"]),
        Route("/live", pages.live),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    for path, title, read in pages.views():
        twin = "/now.json" if path == "/" else f"{path}.json"
        routes.append(Route(twin, _twin(read)))  # before its page, whose NAME would match it
        routes.append(Route(path, _shell(title, reader)))
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
            Middleware(GZipMiddleware, minimum_size=1024, compresslevel=5),
            Middleware(_Guard, access=access, secure=secure),
        ],
    )


class _Pages:
    """The handlers of the routes."""

    def __init__(
        self, reader: ClusterReader, streams: LiveStreams, access: Access, secure: bool
    ) -> None:
        self._reader = reader
        self._streams = streams
        self._access = access
        self._secure = secure

    def views(self) -> list[tuple[str, str, Read]]:
        """Path, title and content of each page; the longest path first where two would match."""
        read = self._reader
        return [
            ("/", "Now", lambda request: read.now()),
            ("/fleet", "Fleet", lambda request: read.fleet()),
            ("/jobs", "Jobs", lambda request: read.jobs()),
            ("/jobs/{name}/ranks", "Ranks of {name}", lambda request: read.grid(_name(request))),
            ("/jobs/{name}/heat", "Heat of {name}", lambda request: read.heat(_name(request))),
            (
                "/jobs/{name}/timeline",
                "Timeline of {name}",
                lambda request: read.timeline(_name(request), Wanted.parse(request.query_params)),
            ),
            ("/jobs/{name}/slower", "Why {name} is slower", lambda r: read.slower(_name(r))),
            ("/jobs/{name}", "Job {name}", lambda request: read.job(_name(request))),
            ("/nodes/{name}", "Node {name}", lambda request: read.node(_name(request))),
            ("/events", "Events", lambda request: read.events(_subject(request))),
        ]

    async def live(self, request: Request) -> Response:
        """Notices about the page that the parameter ``page`` names."""
        page = request.query_params.get("page", "/")
        found = self._view(page, request)
        if found is None:
            return _json({"state": "missing", "message": f"no page {page}"}, 404)
        if self._streams.full:
            return _json({"state": "busy", "message": "too many browsers are open"}, 503)
        read, shown = found
        return StreamingResponse(
            self._streams.stream(lambda: read(shown)),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    def _view(self, page: str, request: Request) -> tuple[Read, Request] | None:
        """The content of the page at a path, and the request as that page would get it."""
        scope: Scope = {**request.scope, "path": page, "method": "GET"}
        for path, _, read in self.views():
            match, found = Route(path, self.live).matches(scope)
            if match is Match.FULL:
                return read, Request({**scope, **found})
        return None

    async def login(self, request: Request) -> Response:
        """The page that asks for the token, and what it sends."""
        if request.method == "GET":
            return HTMLResponse(login())
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM_BYTES:
                    return HTMLResponse(login("That is longer than any token."), 413)
        except ClientDisconnect:  # the answer has no reader
            return HTMLResponse(login("The connection ended early."), 400)
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()
        try:
            session = self._access.open(given, _caller(request))
        except TooManyAttempts as error:
            return HTMLResponse(login(f"{error}."), 429)
        if session is None:
            return HTMLResponse(login("That is not the token of this cluster."), 403)
        return _welcome("/", session, self._secure)

    async def logout(self, request: Request) -> Response:
        """Forget the session."""
        self._access.close(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer


class _Guard:
    """Admits requests with a session or the token; sets the headers of every answer."""

    def __init__(self, app: ASGIApp, access: Access, secure: bool) -> None:
        self._app = app
        self._access = access
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = dict(_HEADERS)
                if not scope["path"].startswith("/static/"):
                    extra["cache-control"] = "no-store"
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in extra.items()
                        if name.encode() not in present
                    ),
                ]
            await send(message)

        request = Request(scope)
        try:
            answer = self._answer(request)
        except TooManyAttempts as error:
            answer = _json({"state": "not-permitted", "message": str(error)}, 429)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer instead of the page; None: show the page."""
        # The path of the route: starlette builds request.url from the Host header, too.
        path: str = request.scope["path"]
        if path.startswith("/static/") or path == "/login":
            return None
        known = self._access.allows(request.cookies.get(COOKIE, ""))
        if "token" in request.query_params:
            rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
            clean = _here(path) + (f"?{urlencode(rest)}" if rest else "")
            if known:
                return RedirectResponse(clean, 303)
            session = self._access.open(request.query_params["token"], _caller(request))
            return _welcome(clean, session, self._secure) if session else _to_login()
        if known:
            return None
        header = request.headers.get("authorization", "")
        if header and self._access.bears(header, _caller(request)):
            return None
        if path.endswith(".json") or path == "/live":
            return _json({"state": "not-permitted", "message": "log in first, at /login"}, 401)
        return _to_login()


def _twin(read: Read) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return _json(await read(request))
        except MegascaleError as error:
            state, status = next((s, n) for kind, s, n in _STATES if isinstance(error, kind))
            return _json({"state": state, "message": str(error), "reason": error.reason}, status)

    return answer


def _shell(title: str, reader: ClusterReader) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
        found = await reader.has(path.split("/")[1], request.path_params.get("name"))
        twin = ("/now.json" if path == "/" else f"{_here(path)}.json") + (
            f"?{query}" if query else ""
        )
        text = page(path, twin, title.format(**request.path_params))
        return HTMLResponse(text, 200 if found else 404)

    return answer


def _json(content: Page, status: int = 200) -> Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, default=str)
    return Response(text, status, media_type="application/json")


def _welcome(path: str, session: str, secure: bool) -> Response:
    answer = RedirectResponse(path, 303)
    answer.set_cookie(
        COOKIE, session, max_age=int(SESSION_S), httponly=True, samesite="strict", secure=secure
    )
    return answer


def _here(path: str) -> str:
    """A path of this site, for a redirect: two slashes at its start would name another one."""
    return "/" + quote(path.lstrip("/\\"))


def _caller(request: Request) -> str | None:
    """The address that asks; None where a page of another site asks through a browser."""
    headers = request.headers
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    if site not in ("none", "same-origin"):
        return None
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return None
    return request.client.host if request.client is not None else ""


def _to_login() -> Response:
    return RedirectResponse("/login", 303)


def _name(request: Request) -> str:
    found: Any = request.path_params["name"]
    return str(found)


def _subject(request: Request) -> str:
    return request.query_params.get("subject", "")
