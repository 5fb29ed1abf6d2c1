"""A copy of some objects of the API server that follows their changes.

One list, then a watch from its version on. Bookmarks move that version on while nothing changes, so
that a watch that ends is continued; a version that the server has forgotten (410) means to list
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from megascale_common.service import logs
from megascale_common.service.errors import ExpiredError, UnavailableError
from megascale_common.service.tasks import Backoff
from megascale_driver.platform.kubernetes.api import KubernetesApi
from megascale_driver.platform.kubernetes.objects import Json

PAGE = 500
MAX_OBJECTS = 50_000  # of one kind: above any cluster that Kubernetes supports
WATCH_S = 300
SHORT_WATCH_S = 1.0  # a server that ends watches at once is not asked again at once
_BACKOFF_S = (0.2, 10.0)
_log = logs.get(__name__)


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
        backoff, loop = Backoff(*_BACKOFF_S), asyncio.get_running_loop()
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
