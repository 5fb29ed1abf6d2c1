"""The dashboard over HTTP: who may look, twins, notices, and what is said when all is not well."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urljoin, urlsplit

import pytest
from starlette.requests import Request
from starlette.types import Message
from tests.harness.recorded_fleet import JOB, RecordedCluster
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2
from megascale_client import InvalidRequest, Unavailable
from megascale_dashboard import server, serving
from megascale_dashboard.access import (
    COOKIE,
    MAX_CALLERS,
    MAX_FAILURES,
    MAX_SESSIONS,
    SESSION_S,
    Access,
)
from megascale_dashboard.access import TooManyAttempts as TooMany
from megascale_dashboard.cluster_reader import MAX_FOLLOWED, ClusterReader
from megascale_dashboard.live import LiveStreams

TOKEN = "a-token-of-the-cluster"
PAGES = (
    "/",
    "/fleet",
    "/jobs",
    f"/jobs/{JOB}",
    f"/jobs/{JOB}/ranks",
    f"/jobs/{JOB}/heat",
    f"/jobs/{JOB}/timeline",
    f"/jobs/{JOB}/slower",
    "/nodes/n3",
    "/events",
)


class Browser:
    """Sends requests to the application without a socket, and keeps the cookie."""

    def __init__(self, source: RecordedCluster | None = None, access: Access | None = None) -> None:
        self.access = access or Access(TOKEN)
        self.reader = ClusterReader(source or RecordedCluster(nodes=8))
        self.streams = LiveStreams(interval_s=0.01, most=1)
        self.app = server.build(self.reader, self.access, self.streams, hosts=["localhost"])
        self.cookie = ""

    async def get(
        self,
        url: str,
        method: str = "GET",
        body: bytes = b"",
        more: Mapping[str, str] = MappingProxyType({}),
        **headers: str,
    ) -> tuple[int, dict[str, str], str]:
        path, _, query = url.partition("?")
        sent: list[Message] = []
        given = {"host": "localhost", "cookie": f"{COOKIE}={self.cookie}", **headers, **more}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 40_000),
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        text = b"".join(each.get("body", b"") for each in sent[1:]).decode()
        if "set-cookie" in answered:
            self.cookie = answered["set-cookie"].partition("=")[2].partition(";")[0]
        return sent[0]["status"], answered, text

    async def log_in(self) -> Browser:
        status, *_ = await self.get("/login", method="POST", body=f"token={TOKEN}".encode())
        assert status == 303
        return self


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_is_shown_without_the_token(path: str) -> None:
    browser = Browser()
    assert (await browser.get(path))[1]["location"] == "/login"
    twin = "/now.json" if path == "/" else f"{path}.json"
    status, _, text = await browser.get(twin)
    assert status == 401 and json.loads(text)["state"] == "not-permitted"
    assert (await browser.get(f"/live?page={path}"))[0] == 401
    assert (await browser.get(twin, authorization="Bearer wrong"))[0] == 401
    assert (await browser.get(twin, authorization=f"Bearer {TOKEN}"))[0] == 200
    await browser.reader.close()


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_has_a_twin(path: str) -> None:
    browser = await Browser().log_in()
    status, headers, text = await browser.get(path)
    twin = "/now.json" if path == "/" else f"{path}.json"
    assert status == 200 and f'href="{twin}"' in text
    assert "script-src 'self'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    status, headers, text = await browser.get(twin)
    assert status == 200 and headers["content-type"] == "application/json"
    assert json.loads(text)
    await browser.reader.close()


@pytest.mark.parametrize("path", ["/jobs/nosuch", "/jobs/nosuch/ranks", "/nodes/nosuch"])
async def test_the_page_of_what_is_missing_is_not_found(path: str) -> None:
    browser = await Browser().log_in()
    status, _, text = await browser.get(path)
    assert status == 404 and "app.js" in text, "the page itself says what is missing"
    assert (await browser.get(f"{path}.json"))[0] == 404
    await browser.reader.close()


async def test_a_link_is_exchanged_for_a_cookie_and_keeps_no_secret() -> None:
    browser = Browser()
    status, headers, _ = await browser.get(f"/events?subject=nodes/n3&token={browser.access.key}")
    assert (status, headers["location"]) == (303, "/events?subject=nodes%2Fn3")
    assert all(word in headers["set-cookie"] for word in ("HttpOnly", "SameSite=strict"))
    assert (await browser.get("/fleet"))[0] == 200
    await browser.get("/logout", method="POST")
    assert (await browser.get("/fleet"))[0] == 303
    assert (await browser.get("/fleet?token=wrong"))[1]["location"] == "/login"


async def test_a_foreign_name_of_this_machine_is_refused() -> None:
    browser = await Browser().log_in()
    assert (await browser.get("/fleet", host="attacker.example"))[0] == 400


async def test_wrong_tokens_of_anybody_keep_the_right_one_not_out() -> None:
    browser = Browser()
    for _ in range(MAX_FAILURES):
        status, _, text = await browser.get("/login", method="POST", body=b"token=wrong")
        assert status == 403 and "not the token" in text
    assert (await browser.get("/login", method="POST", body=b"token=wrong"))[0] == 429
    assert (await browser.get("/jobs.json", authorization="Bearer wrong"))[0] == 429
    assert (await browser.get("/x.png?token=wrong"))[0] == 429
    assert (await browser.get("/jobs.json", authorization=f"Bearer {TOKEN}"))[0] == 200
    assert (await browser.get(f"/fleet?token={browser.access.key}"))[1]["location"] == "/fleet"
    assert (await browser.get("/fleet"))[0] == 200
    assert (await browser.get("/fleet?token=wrong"))[1]["location"] == "/fleet", "a known session"
    await browser.log_in()
    assert (await browser.get("/login", method="POST", body=b"x" * 5000))[0] == 413
    await browser.reader.close()


@pytest.mark.parametrize(
    "header",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
async def test_what_a_page_of_another_site_asks_is_no_attempt_of_this_browser(
    header: dict[str, str],
) -> None:
    browser = Browser()
    for _ in range(MAX_FAILURES + 1):
        assert (await browser.get("/x.png?token=wrong", "GET", b"", header))[0] == 303
        assert (await browser.get("/login", "POST", b"token=wrong", header))[0] == 403
    assert (await browser.get("/login", "POST", b"token=wrong"))[0] == 403
    here = {"sec-fetch-site": "same-origin", "origin": "http://localhost"}
    for _ in range(MAX_FAILURES - 1):
        assert (await browser.get("/login", "POST", b"token=wrong", here))[0] == 403
    assert (await browser.get("/login", "POST", b"token=wrong", here))[0] == 429


@pytest.mark.parametrize(
    "path", ["//evil.example/x", "/\\evil.example/x", "///evil.example", "/\t/evil.example/x"]
)
async def test_a_link_leads_to_no_other_site(path: str) -> None:
    browser = Browser()
    found = (await browser.get(f"{path}?token={browser.access.key}"))[1]["location"]
    assert urljoin("http://localhost/", found).startswith("http://localhost/"), found
    assert found[:2] != "//" and not set(found) & set("\\\t")


@pytest.mark.parametrize("path", PAGES)
async def test_the_guard_does_not_read_the_host_header(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette up to 1.0.0 builds its URLs from that header, so that any path could be /login."""

    def url(request: Request) -> str:
        return "http://localhost/login"

    monkeypatch.setattr(Request, "url", property(url))
    browser = Browser()
    twin = "/now.json" if path == "/" else f"{path}.json"
    assert (await browser.get(path))[1]["location"] == "/login"
    assert (await browser.get(twin))[0] == 401
    assert (await browser.get(f"{path}?token={browser.access.key}"))[1]["location"] == path


def test_sessions_end_and_are_bounded() -> None:
    now = [0.0]
    access = Access(TOKEN, lambda: now[0])
    first = access.open(TOKEN, "here")
    assert first is not None and access.allows(first) and not access.allows("")
    now[0] = SESSION_S
    assert not access.allows(first)
    sessions = [access.open(access.key, "here") or "" for _ in range(MAX_SESSIONS + 1)]
    assert not access.allows(sessions[0]) and access.allows(sessions[1])
    for _ in range(MAX_FAILURES):
        assert access.open("wrong", "here") is None
    with pytest.raises(TooMany):
        access.open("wrong", "here")
    assert access.open("wrong", "there") is None, "another address"
    assert access.open(TOKEN, "here")
    now[0] += 61
    assert access.open("wrong", "here") is None
    for number in range(MAX_CALLERS + 1):
        assert access.open("wrong", f"caller {number}") is None
    assert len(access._failures) == MAX_CALLERS


async def test_what_is_not_there_says_so() -> None:
    browser = await Browser().log_in()
    for twin in ("/jobs/other.json", "/nodes/other.json", "/jobs/other/ranks.json"):
        status, _, text = await browser.get(twin)
        assert status == 404 and "other" in json.loads(text)["message"]
    assert (await browser.get("/live?page=/nowhere"))[0] == 404


class Away(RecordedCluster):
    """A cluster whose driver is away when ``away`` is set."""

    away = True

    async def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        if self.away:
            raise Unavailable("the cluster is down")
        return await super().cluster_info()


async def test_a_driver_that_is_away_is_reported_and_comes_back() -> None:
    source = Away(nodes=2)
    browser = await Browser(source).log_in()
    status, _, text = await browser.get("/now.json")
    assert status == 503 and json.loads(text)["state"] == "away"
    stream = browser.streams.stream(browser.reader.now)
    assert (await anext(stream)).startswith("event: away\ndata: ")
    source.away = False
    while (notice := await anext(stream)).startswith(": "):  # an answer is kept for a moment
        pass
    assert notice.startswith("event: changed")
    await stream.aclose()  # type: ignore[attr-defined]
    assert browser.streams.open == 0


async def test_a_job_that_is_gone_is_not_a_driver_that_is_away() -> None:
    reader = ClusterReader(RecordedCluster(nodes=2))
    stream = LiveStreams(interval_s=0.01).stream(lambda: reader.job("other"))
    assert (await anext(stream)).startswith("event: changed")


async def test_streams_are_bounded() -> None:
    browser = await Browser().log_in()
    stream = browser.streams.stream(browser.reader.fleet)
    await anext(stream)
    status, _, text = await browser.get("/live?page=/fleet")
    assert (status, json.loads(text)["state"]) == (503, "busy")


async def test_many_browsers_cost_the_driver_one_call() -> None:
    source = RecordedCluster(nodes=8)
    reader = ClusterReader(source)
    await asyncio.gather(*(reader.fleet() for _ in range(50)))
    assert source.calls == 1


async def test_followed_jobs_are_bounded() -> None:
    class ManyJobs(RecordedCluster):
        async def get(self, name: str):  # type: ignore[no-untyped-def]
            return await super().get(JOB)

    reader = ClusterReader(ManyJobs(nodes=2))
    for index in range(MAX_FOLLOWED + 3):
        assert (await reader.job(f"job-{index}"))["curves"]["step"]
    assert len(reader._followed) == MAX_FOLLOWED
    await reader.close()


async def refused(folder: Path, host: str, port: int = 0) -> str:
    (folder / "token").write_text("x" * 32)
    with pytest.raises(InvalidRequest) as error:
        await serving.serve(serving.Options(run_folder=folder, host=host, port=port), print)
    return str(error.value)


async def test_addresses_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    assert "--certificate" in await refused(tmp_path, "0.0.0.0")
    assert "not an IP address" in await refused(tmp_path, "here")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert "--port" in await refused(tmp_path, "127.0.0.1", holder.getsockname()[1])


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """A dashboard on a real port, of a run folder whose driver is away."""
    (folder / "token").write_text(TOKEN)
    (folder / "driver.address").write_text("127.0.0.1:1")
    links: asyncio.Queue[str] = asyncio.Queue()
    options = serving.Options(run_folder=folder)
    serve = asyncio.create_task(serving.serve(options, links.put_nowait))
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            found = urlsplit(await links.get())
            assert found.hostname is not None and found.port is not None
            yield found.hostname, found.port
    finally:
        serve.cancel()
        await asyncio.wait([serve])


async def answer(address: tuple[str, int], request: str) -> str:
    """The first line of what is answered."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request.replace("\n", "\r\n").encode())
    found = await reader.readline()
    writer.close()
    return found.decode().strip()


SLOW_HEAD = "GET /login HTTP/1.1\r\nHost: localhost\r\nX-A: "
SLOW_BODY = "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\ntoken="
LOGIN = "GET /login HTTP/1.1\nHost: localhost\n\n"


@pytest.mark.parametrize("part", [SLOW_HEAD, SLOW_BODY, ""])
async def test_requests_that_never_end_keep_nobody_out(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING", 8)
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 24)
    async with served(tmp_path) as address:
        slow = []
        for _ in range(60):
            slow.append(await asyncio.open_connection(*address))
            slow[-1][1].write(part.encode())
        assert await answer(address, LOGIN) == "HTTP/1.1 200 OK"
        with suppress(ConnectionResetError):
            assert await slow[0][0].read() == b"", "the oldest gave way"
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize("part", [SLOW_HEAD, SLOW_BODY])
async def test_a_request_has_some_seconds_to_come_whole(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that sends a byte now and then."""
    monkeypatch.setattr(serving, "REQUEST_TIMEOUT_S", 0.2)
    async with served(tmp_path) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(part.encode())
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            writer.write(b"x")
            await asyncio.wait([ended], timeout=0.05)
        with suppress(ConnectionResetError):
            await ended
        writer.close()


async def test_no_host_header_opens_a_page(tmp_path: Path) -> None:
    async with served(tmp_path) as address:
        port = address[1]
        for host in (f"127.0.0.1:{port}/login?", f"127.0.0.1:{port}/static/?", "127.0.0.1/login"):
            found = await answer(address, f"GET /jobs.json HTTP/1.1\nHost: {host}\n\n")
            assert found.split()[1] in ("400", "401"), (host, found)


def test_scripts_are_small_and_come_from_here_alone() -> None:
    scripts = [*server.STATIC.glob("*.js")]
    assert sum(each.stat().st_size for each in scripts) < 150_000
    for each in scripts:
        if "uplot" not in each.name:  # whose comment names its page
            assert "https://" not in each.read_text(), each
