"""Calls to a Kubernetes API server with bounded retries, and a local copy of watched objects.

Answers are the API's own JSON; fields that newer servers add pass through unread. Every write here
has a precondition or has the same effect twice as once, so it is retried like a read. Each kind of
refusal has one error type.

A :class:`Reflector` keeps a copy of some objects: it lists them once, then watches from the version
of the list on. Bookmarks advance that version while nothing changes, so that a watch that ends can
be continued. If the server has forgotten the version (410), the objects are listed again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config

from megascale_common.service import logs
from megascale_common.service.errors import (
    ExpiredError,
    NotFoundError,
    OptionError,
    StateError,
    UnavailableError,
)
from megascale_common.service.tasks import Backoff
from megascale_driver.platform.kubernetes.objects import Json

MERGE_PATCH = "application/merge-patch+json"
CALL_TIMEOUT_S = 10.0
# A call with all its repetitions. The decision that it belongs to is looked at again afterwards.
DEADLINE_S = 30.0
# What a server may ask for with Retry-After; more counts as this, and the deadline is above it.
MAX_RETRY_AFTER_S = 20.0
MAX_LINE_BYTES = 4 << 20  # of a watch; etcd takes objects of up to 1.5 MiB
_BACKOFF_S = (0.2, 5.0)
_RETRIED = (429, 500, 502, 503, 504)
_log = logs.get(__name__)


class KubernetesApi:
    """A connection to one API server, as an asynchronous context manager.

    Args:
        kubeconfig: a file of configuration; None: that of the pod's service account.
    """

    def __init__(self, kubeconfig: Path | None) -> None:
        self._kubeconfig = kubeconfig
        self._client: client.ApiClient | None = None

    async def __aenter__(self) -> KubernetesApi:
        found = client.Configuration()
        try:
            if self._kubeconfig is None:
                load: Any = config.load_incluster_config  # it has no types
                load(client_configuration=found)
            else:
                await config.load_kube_config(
                    config_file=str(self._kubeconfig),
                    client_configuration=found,
                    persist_config=False,
                )
        except (config.ConfigException, OSError, ValueError) as error:
            raise OptionError(
                f"--kubeconfig: {error}: give a file with a cluster and a user, or run this in a "
                "pod that has a service account"
            ) from None
        self._client = client.ApiClient(found)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """Read an object or a list; raises as :meth:`_call`."""
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: Json) -> Json:
        """Create an object of a fixed name; raises as :meth:`_call`."""
        return await self._call("POST", path, body=body)

    async def merge(self, path: str, patch: Json) -> Json:
        """Merge a patch into an object, with ``metadata.resourceVersion`` as its precondition."""
        return await self._call("PATCH", path, body=patch)

    async def delete(self, path: str, uid: str, version: str = "", *, force: bool = False) -> None:
        """Delete an object if it is still that one.

        Args:
            version: also only if it has not changed since.
            force: do not wait for the node that runs it.
        """
        conditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": conditions}
        await self._call(
            "DELETE", path, body=options | ({"gracePeriodSeconds": 0} if force else {})
        )

    async def watch(
        self,
        path: str,
        query: Mapping[str, str],
        timeout_s: int,
        begun: Callable[[], None],
    ) -> AsyncIterator[Json]:
        """The events of one watch, until the server ends it; ``begun`` is called once it answers.

        Raises:
            ExpiredError: the version at which it began is no longer held: list again.
            UnavailableError: the connection broke, or the server refuses.
        """
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        response = await self._send("GET", path, asked, None, timeout_s + CALL_TIMEOUT_S)
        try:
            if response.status != 200:
                raise _refusal("GET", path, response.status, await response.text())
            begun()
            async for event in _lines(response):
                if event.get("type") == "ERROR":
                    status = event.get("object") or {}
                    raise _refusal("GET", path, int(status.get("code") or 500), json.dumps(status))
                yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unanswered(path, error) from None
        finally:
            response.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
    ) -> Json:
        """Call, and call again until the deadline while the server is busy or does not answer.

        Raises:
            NotFoundError: there is no such object.
            StateError: a precondition does not hold, or the object is there already.
            ExpiredError: a page or version is no longer held.
            UnavailableError: the server refuses, or has not answered until the deadline.
        """
        loop, backoff = asyncio.get_running_loop(), Backoff(*_BACKOFF_S)
        ends_at_s = loop.time() + DEADLINE_S
        while True:
            try:
                response = await self._send(method, path, query or {}, body, CALL_TIMEOUT_S)
                async with response:
                    text, status = await response.text(), response.status
                if status < 300:
                    found = json.loads(text or "{}")
                    if not isinstance(found, dict):
                        raise UnavailableError(f"Kubernetes: {method} {path}: no object came back")
                    return found
                error: UnavailableError | None = None
                if status not in _RETRIED:
                    raise _refusal(method, path, status, text)
                wait_s = max(_retry_after_s(response.headers), backoff.next_s())
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as problem:
                error, wait_s, status, text = _unanswered(path, problem), backoff.next_s(), 0, ""
            if loop.time() + wait_s >= ends_at_s:
                raise error or _refusal(method, path, status, text)
            _log.info(
                "Kubernetes is asked again", path=path, status=status, wait_s=round(wait_s, 2)
            )
            await asyncio.sleep(wait_s)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        timeout_s: float,
    ) -> aiohttp.ClientResponse:
        assert self._client is not None, "use it as a context manager"
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        found: aiohttp.ClientResponse = await self._client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=timeout_s,
        )
        return found


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise UnavailableError(
                f"Kubernetes: a watch sent a line of over {MAX_LINE_BYTES} bytes"
            )
        for line in filter(None, lines):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise UnavailableError("Kubernetes: a watch sent a line that is no event")
            yield event


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "")
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0


def _unanswered(path: str, error: Exception) -> UnavailableError:
    why = str(error) or type(error).__name__
    return UnavailableError(f"Kubernetes does not answer ({path}): {why}")


def _refusal(
    method: str, path: str, status: int, text: str
) -> NotFoundError | StateError | ExpiredError | UnavailableError:
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip()
    said = f"Kubernetes answers {status} to {method} {path}: {message[:300]}"
    if status == 404:
        return NotFoundError(said)
    if status == 409:
        return StateError(said, reason="CONFLICT")
    if status == 410:
        return ExpiredError(said)
    if status in (401, 403):
        said += "; check the rights of this service account (deploy/kubernetes/base/rights.yaml)"
    return UnavailableError(said)


PAGE = 500
MAX_OBJECTS = 50_000  # of one kind: above any cluster that Kubernetes supports
WATCH_S = 300
SHORT_WATCH_S = 1.0  # a server that ends watches at once is not asked again at once
_RELIST_BACKOFF_S = (0.2, 10.0)


class Reflector:
    """The objects of one list, by name; :meth:`run` keeps them up to date until it is cancelled.

    Attributes:
        objects: None until they have been listed.
        fresh: whether the last call succeeded; else the copy may be old.
        lists: how often they were listed.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        query: Mapping[str, str],
        changed: Callable[[], None],
    ) -> None:
        self._api = api
        self._path = path
        self._query = dict(query)
        self._changed = changed
        self._version = ""
        self.objects: dict[str, Json] | None = None
        self.fresh = False
        self.lists = 0

    async def run(self) -> None:
        """Follow the server; what it refuses is asked again after a growing wait."""
        backoff, loop = Backoff(*_RELIST_BACKOFF_S), asyncio.get_running_loop()
        while True:
            try:
                if not self._version:
                    await self.list()
                began_at_s = loop.time()
                await self._follow()
                if loop.time() - began_at_s < SHORT_WATCH_S:
                    await backoff.sleep()
                else:
                    backoff.reset()
            except ExpiredError as error:
                _log.info("Kubernetes is listed again", path=self._path, reason=str(error))
                self._version = ""
                await backoff.sleep()
            except UnavailableError as error:
                self.fresh = False
                _log.warning("Kubernetes cannot be followed", path=self._path, error=str(error))
                await backoff.sleep()

    async def list(self) -> None:
        """Read all of them; raises what the call does."""
        found: dict[str, Json] = {}
        query = {**self._query, "limit": str(PAGE)}
        while True:
            page = await self._api.get(self._path, query)
            for item in page.get("items") or []:
                found[item["metadata"]["name"]] = item
            following = page["metadata"].get("continue")
            if not following:
                break
            if len(found) > MAX_OBJECTS:
                raise UnavailableError(
                    f"{self._path}: over {MAX_OBJECTS} objects; none is followed"
                )
            query["continue"] = following
        self._version = page["metadata"]["resourceVersion"]
        self.objects = found
        self.fresh = True
        self.lists += 1
        self._changed()

    async def _follow(self) -> None:
        assert self.objects is not None
        query = {**self._query, "resourceVersion": self._version}
        async for event in self._api.watch(self._path, query, WATCH_S, self._begun):
            found = event["object"]
            self._version = found["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                self.objects.pop(found["metadata"]["name"], None)
            else:
                self.objects[found["metadata"]["name"]] = found
            self._changed()

    def _begun(self) -> None:
        self.fresh = True
