"""A Kubernetes API server for tests: HTTP in front of :mod:`tests.harness.kubernetes_store`.

No real API server runs where these tests do. This one keeps what clients rely on: versions, uids,
preconditions, pages, watches with bookmarks that end with 410 once their version is forgotten,
evictions within disruption budgets, and rights by bearer token. It can be told to refuse calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import kubernetes_validate
import yaml
from aiohttp import web
from tests.harness.kubernetes_rights import Rights
from tests.harness.kubernetes_store import (
    MERGE,
    Change,
    Object,
    Refusal,
    Store,
    expired,
    patched,
    selector,
)

SCHEMAS = "1.32"
BOOKMARK_INTERVAL_S = 0.2
WATCH_S = 30.0  # a real server ends a watch after 30 to 60 minutes, unless the client asks for less


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource: where it is served, and whether in namespaces and with a status of its own."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True
    status: bool = True

    @property
    def api_version(self) -> str:
        """As objects have it."""
        return f"{self.group}/{self.version}" if self.group else self.version


KINDS = {
    kind.plural: kind
    for kind in (
        Kind("", "v1", "nodes", "Node", namespaced=False),
        Kind("", "v1", "namespaces", "Namespace", namespaced=False),
        Kind("", "v1", "pods", "Pod"),
        Kind("", "v1", "events", "Event", status=False),
        Kind("apps", "v1", "statefulsets", "StatefulSet"),
        Kind("apps", "v1", "deployments", "Deployment"),
        Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    )
}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True, slots=True)
class Call:
    """A request as the rules of access see it."""

    user: str
    verb: str
    group: str
    resource: str  # with its subresource: pods/eviction
    namespace: str
    name: str


@dataclass
class Refusing:
    """Calls that are to be refused: the next ``times`` of those that ``concerns`` names."""

    times: int
    code: int
    reason: str
    retry_after_s: int
    concerns: Callable[[Call], bool]


@dataclass
class KubernetesApi:
    """The server; as an asynchronous context manager it listens on a port of loopback.

    Attributes:
        rights: who may do what; None: everybody everything.
        tokens: the user of each bearer token.
        calls: all requests, in order.
        tls: with which it is served; None: without.
    """

    store: Store = field(default_factory=Store)
    rights: Rights | None = None
    tokens: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    refusing: list[Refusing] = field(default_factory=list)
    url: str = ""
    tls: ssl.SSLContext | None = None
    _watches: set[asyncio.Event] = field(default_factory=set)
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'https' if self.tls else 'http'}://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop_watches()
        assert self._runner is not None
        await self._runner.cleanup()

    def kubeconfig(self, token: str = "", namespace: str = "default") -> str:
        """A configuration of kubectl and of clients."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                "users": [{"name": "test", "user": {"token": token} if token else {}}],
                "contexts": [
                    {
                        "name": "test",
                        "context": {"cluster": "test", "user": "test", "namespace": namespace},
                    }
                ],
            }
        )

    def refuse(
        self,
        code: int,
        *,
        times: int = 1,
        reason: str = "TooManyRequests",
        retry_after_s: int = 0,
        concerns: Callable[[Call], bool] = lambda call: True,
    ) -> None:
        """Answer the next calls that are concerned with an error."""
        self.refusing.append(Refusing(times, code, reason, retry_after_s, concerns))

    def drop_watches(self) -> None:
        """Break the connection of every watch."""
        for ended in self._watches:
            ended.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            if (found := discovery(request.path)) is not None:
                return web.json_response(found)
            return await self._answer(request)
        except Refusal as refusal:
            headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
            return web.json_response(refusal.status(), status=refusal.code, headers=headers)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind, namespace, name, sub = located(request.path)
        watching = _true(request.query.get("watch", ""))
        verb = {"POST": "create", "PUT": "update"}.get(request.method, request.method.lower())
        if verb == "get" and not name:
            verb = "watch" if watching else "list"
        user = self.tokens.get(request.headers.get("Authorization", "").removeprefix("Bearer "), "")
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        call = Call(user, verb, kind.group, resource, namespace, name)
        self.calls.append(call)
        self._require_allowed(call)
        if verb == "watch":
            return await self._watch(request, kind, namespace)
        text = await request.text()
        try:
            body = json.loads(text) if text.strip() else {}
        except ValueError:
            raise Refusal(400, "BadRequest", "the body is not JSON") from None
        found = self._done(request, kind, (kind.plural, namespace, name), sub, body)
        return web.json_response(found, status=201 if verb == "create" else 200)

    def _require_allowed(self, call: Call) -> None:
        for each in self.refusing:
            if each.times > 0 and each.concerns(call):
                each.times -= 1
                raise Refusal(each.code, each.reason, "refused by the test", each.retry_after_s)
        if self.rights is not None:
            if not call.user:
                raise Refusal(401, "Unauthorized", "Unauthorized")
            self.rights.require(call)

    def _done(
        self, request: web.Request, kind: Kind, key: tuple[str, str, str], sub: str, body: Any
    ) -> Object:
        """Carry out a call that is no watch."""
        plural, namespace, name = key
        match request.method:
            case "GET" if not name:
                return self._listed(request, kind, namespace)
            case "GET" if (plural, sub) == ("statefulsets", "scale"):
                return scale_of(self.store.get(key))
            case "GET":
                return self.store.get(key)
            case "POST" if (plural, sub) == ("pods", "eviction"):
                return self._evicted(key, body.get("deleteOptions") or {})
            case "POST" if not sub:
                given = {"apiVersion": kind.api_version, "kind": kind.name, **body}
                if given["kind"] != kind.name:
                    raise Refusal(400, "BadRequest", f"{given['kind']} is no {kind.name}")
                require_valid(given)
                return self.store.create(plural, namespace, given)
            case "PUT" | "PATCH" if (plural, sub) == ("statefulsets", "scale"):
                form = request.headers.get("Content-Type", MERGE).partition(";")[0]
                whole = request.method == "PUT"
                return scale_of(
                    self.store.update(
                        key,
                        lambda found: scaled(
                            found, body if whole else patched(scale_of(found), body, form)
                        ),
                        False,
                    )
                )
            case "PUT" if sub in ("", "status"):
                return self.store.update(key, lambda _: body, sub == "status")
            case "PATCH" if sub in ("", "status"):
                form = request.headers.get("Content-Type", MERGE).partition(";")[0]
                return self.store.update(
                    key, lambda found: patched(found, body, form), sub == "status"
                )
            case "DELETE" if not sub:
                options = dict(body)
                if (grace := request.query.get("gracePeriodSeconds")) is not None:
                    options.setdefault("gracePeriodSeconds", int(grace))
                return self.store.delete(key, options)
        raise Refusal(405, "MethodNotAllowed", f"{request.method} {plural}/{sub} is not served")

    def _listed(self, request: web.Request, kind: Kind, namespace: str) -> Object:
        query = request.query
        limit, token = int(query.get("limit") or 0), query.get("continue", "")
        if token:
            if token not in self.store.pages:
                raise expired(int(token.partition("-")[0]))
            items = self.store.pages.pop(token)
            version = token.partition("-")[0]
        else:
            chosen = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
            items = self.store.list(kind.plural, namespace, chosen)
            version = str(self.store.version)
        meta = {"resourceVersion": version}
        if limit and len(items) > limit:
            following = f"{version}-{items[limit]['metadata']['uid']}"
            self.store.pages[following] = items[limit:]
            meta["continue"] = following
            items = items[:limit]
        api = {"kind": f"{kind.name}List", "apiVersion": kind.api_version}
        return {**api, "metadata": meta, "items": items}

    def _evicted(self, key: tuple[str, str, str], options: Object) -> Object:
        """Delete a pod unless a disruption budget forbids it."""
        pod = self.store.get(key)
        for budget in self.store.list("poddisruptionbudgets", key[1], lambda _: True):
            spec = budget["spec"]
            labels = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
            if not selector(labels, "")(pod):
                continue
            all_of = self.store.list("pods", key[1], selector(labels, ""))
            healthy = [each for each in all_of if ready(each)]
            least = spec.get("minAvailable", len(all_of) - spec.get("maxUnavailable", 0))
            if ready(pod) and len(healthy) - 1 < least:
                why = "Cannot evict pod as it would violate the pod's disruption budget."
                raise Refusal(429, "TooManyRequests", why)
        self.store.delete(key, options)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    async def _watch(self, request: web.Request, kind: Kind, namespace: str) -> web.StreamResponse:
        query = request.query
        chosen = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        version = int(query.get("resourceVersion") or self.store.version)
        seconds = float(query.get("timeoutSeconds") or WATCH_S)
        bookmarks = _true(query.get("allowWatchBookmarks", ""))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            changes = deque(self.store.since(version))
        except Refusal as refusal:
            await _send(response, {"type": "ERROR", "object": refusal.status()})
            return response
        moved, ended, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

        def listen(change: Change) -> None:
            changes.append(change)
            moved.set()

        def mine(found: Object) -> bool:
            return namespace in ("", found["metadata"].get("namespace", "")) and chosen(found)

        self.store.listeners.append(listen)
        self._watches.add(ended)
        ends_at_s = loop.time() + seconds
        try:
            while loop.time() < ends_at_s and not ended.is_set():
                moved.clear()
                while changes:
                    change = changes.popleft()
                    event = change.event(mine) if change.plural == kind.plural else None
                    if event is not None:
                        version = change.version
                        await _send(response, event)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BOOKMARK_INTERVAL_S):
                        await moved.wait()
                    continue
                if bookmarks and version != self.store.version:
                    version = self.store.version
                    await _send(response, _bookmark(kind, version))
        except ConnectionError:
            pass
        finally:
            self.store.listeners.remove(listen)
            self._watches.discard(ended)
        return response


def scale_of(found: Object) -> Object:
    """The object that stands for how many pods a workload keeps; without it for none."""
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    meta = {name: found["metadata"][name] for name in names}
    count = found["spec"].get("replicas", 1)
    scale: Object = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta}
    return {**scale, "spec": {"replicas": count} if count else {}, "status": {"replicas": count}}


def scaled(found: Object, scale: Object) -> Object:
    """A workload as a scale has it; Refusal 422 for a negative number."""
    count = scale["spec"].get("replicas", 0)
    if not isinstance(count, int) or count < 0:
        raise Refusal(422, "Invalid", f"spec.replicas: Invalid value: {count!r}")
    meta = {**found["metadata"], "resourceVersion": scale["metadata"].get("resourceVersion")}
    return {**found, "metadata": meta, "spec": {**found["spec"], "replicas": count}}


def _true(text: str) -> bool:
    """As the API reads a boolean of a query."""
    return text.lower() in ("1", "t", "true")


async def _send(response: web.StreamResponse, event: Object) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


def _bookmark(kind: Kind, version: int) -> Object:
    meta = {"resourceVersion": str(version)}
    body = {"kind": kind.name, "apiVersion": kind.api_version, "metadata": meta}
    return {"type": "BOOKMARK", "object": body}


def require_valid(given: Object) -> None:
    """Check an object against Kubernetes' own schemas; Refusal 422."""
    try:
        kubernetes_validate.validate(given, SCHEMAS, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refusal(422, "Invalid", error.message) from None


def ready(pod: Object) -> bool:
    """Whether a pod counts as healthy for a disruption budget."""
    conditions = pod.get("status", {}).get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and any(
        (each["type"], each["status"]) == ("Ready", "True") for each in conditions
    )


def located(path: str) -> tuple[Kind, str, str, str]:
    """Kind, namespace, name and subresource that a path names; Refusal 404."""
    parts = path.strip("/").split("/")
    root, parts = (parts[:2], parts[2:]) if parts[0] == "api" else (parts[1:3], parts[3:])
    namespace = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    kind = KINDS.get(parts[0]) if parts else None
    if kind is None or (root[-1] if kind.group == "" else "/".join(root)) != kind.api_version:
        raise Refusal(404, "NotFound", "the server could not find the requested resource")
    return kind, namespace, *[*parts[1:3], "", ""][:2]  # type: ignore[return-value]


def discovery(path: str) -> Object | None:
    """What is served, for kubectl; None for a path that is none of discovery."""
    parts = path.strip("/").split("/")
    groups = {kind.group: kind.version for kind in KINDS.values() if kind.group}
    if path == "/version":
        return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        listed = [
            {"name": group, "versions": [version], "preferredVersion": version}
            for group, version in (
                (group, {"groupVersion": f"{group}/{word}", "version": word})
                for group, word in groups.items()
            )
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    served = "/".join(parts[1:])
    if served not in {kind.api_version for kind in KINDS.values()}:
        return None
    resources = []
    for kind in KINDS.values():
        if kind.api_version == served:
            entry = {"name": kind.plural, "singularName": kind.name.lower(), "kind": kind.name}
            resources.append({**entry, "namespaced": kind.namespaced, "verbs": _VERBS})
    if served == "apps/v1":
        entry = {"name": "statefulsets/scale", "singularName": "", "kind": "Scale"}
        where = {"group": "autoscaling", "version": "v1", "namespaced": True}
        resources.append({**entry, **where, "verbs": ["get", "patch", "update"]})
    if served == "v1":
        eviction = {"name": "pods/eviction", "singularName": "", "kind": "Eviction"}
        where = {"group": "policy", "version": "v1", "namespaced": True, "verbs": ["create"]}
        resources.append({**eviction, **where})
    return {"kind": "APIResourceList", "groupVersion": served, "resources": resources}
