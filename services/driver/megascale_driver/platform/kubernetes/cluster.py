"""State of the machines and of our pods in a Kubernetes cluster, and the writes to them.

Each write names the uid and the version that was read. So the server refuses a write if the object
has changed since, and the decision is made again from the new state.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
from collections.abc import AsyncIterator

from megascale_common.service import tasks
from megascale_common.service.errors import ExistsError, NotFoundError, StateError, UnavailableError
from megascale_driver.platform.kubernetes import objects
from megascale_driver.platform.kubernetes.api import KubernetesApi, Reflector
from megascale_driver.platform.kubernetes.objects import Json, Machine, Mark, Pod

SOURCE = "megascale-platform"
_NODES = "/api/v1/nodes"


class KubernetesCluster:
    """All machines of the cluster, and the pods of one namespace that match ``selector``.

    Args:
        switch_label: label of a machine whose value is its switch.
    """

    def __init__(
        self, api: KubernetesApi, namespace: str, selector: str, switch_label: str
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._switch_label = switch_label
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.changed = asyncio.Event()
        self._machines = Reflector(api, _NODES, {}, self.changed.set)
        self._pods = Reflector(api, self._pods_path, {"labelSelector": selector}, self.changed.set)

    async def read(self) -> None:
        """Read machines and pods once.

        Raises:
            ExpiredError: the list expired between two of its pages.
            UnavailableError: the server refuses or does not answer.
        """
        for each in (self._machines, self._pods):
            await each.list()

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Keep the copies of machines and pods up to date inside this context."""
        following = [tasks.repeated(each.run, "copy") for each in (self._machines, self._pods)]
        try:
            yield
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    @property
    def known(self) -> bool:
        """True if both copies exist and are current: nothing is decided from old ones."""
        return all(each.objects is not None and each.fresh for each in (self._machines, self._pods))

    def machines(self) -> dict[str, Machine]:
        """All machines, by name."""
        found = (self._machines.objects or {}).values()
        return {
            each.name: each for each in (objects.machine_of(f, self._switch_label) for f in found)
        }

    def pods(self) -> dict[str, Pod]:
        """Our pods, by name."""
        return {
            each.name: each for each in map(objects.pod_of, (self._pods.objects or {}).values())
        }

    async def mark(self, machine: Machine, mark: Mark) -> None:
        """Cordon, taint and mark a machine, or change its mark if it has one.

        Raises:
            StateError: the machine has changed since it was read; decide again.
            UnavailableError: the server refuses or does not answer.
        """
        found = self._read(machine)
        patch = objects.marking if machine.mark is None else objects.changing_mark
        await self._api.merge(f"{_NODES}/{machine.name}", patch(found, mark))

    async def unmark(self, machine: Machine, mark: Mark) -> None:
        """Remove mark, taint and our cordon; raises as :meth:`mark`."""
        found = self._read(machine)
        await self._api.merge(f"{_NODES}/{machine.name}", objects.unmarking(found, mark))

    async def show_condition(self, machine: Machine) -> None:
        """Show in the machine's status whether it is evicted; raises as :meth:`mark`."""
        patch = objects.condition_patch(self._read(machine), machine.mark, _now())
        await self._api.merge(f"{_NODES}/{machine.name}/status", patch)

    async def set_topology(self, pod: Pod, topology: str) -> None:
        """Annotate a pod with the topology for its agent; raises as :meth:`mark`."""
        meta = {"uid": pod.uid, "resourceVersion": pod.version}
        annotations = {objects.TOPOLOGY: topology}
        patch = {"metadata": {**meta, "annotations": annotations}}
        await self._api.merge(f"{self._pods_path}/{pod.name}", patch)

    async def delete_pod(self, pod: Pod, why: str, *, force: bool) -> None:
        """Delete a pod if it is unchanged, and record an event with the reason.

        Raises as :meth:`mark`; a pod that is already gone is no error.
        """
        path = f"{self._pods_path}/{pod.name}"
        with contextlib.suppress(NotFoundError):
            await self._api.delete(path, pod.uid, pod.version, force=force)
        await self._report(pod, why)

    async def provide(self, stateful_set: str, count: int) -> int:
        """Scale a StatefulSet up to ``count`` pods, never down; returns its number of pods.

        Raises:
            NotFoundError: there is no StatefulSet with that name.
            StateError: it was changed meanwhile; call again.
            UnavailableError: the server refuses or does not answer.
        """
        sets = f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets"
        found = await self._api.get(f"{sets}/{stateful_set}/scale")
        there = int(found["spec"].get("replicas", 0))  # the API leaves out a zero
        if there >= count:
            return there
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        patch: Json = {"metadata": version, "spec": {"replicas": count}}
        await self._api.merge(f"{sets}/{stateful_set}/scale", patch)
        return count

    async def _report(self, pod: Pod, why: str) -> None:
        """Record an event of the pod, under a fixed name, so that a repetition is a duplicate."""
        digest = hashlib.sha256(f"{pod.uid} {why}".encode()).hexdigest()[:12]
        now = _now()
        event: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{pod.name}.{digest}", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.name,
                "namespace": self._namespace,
                "uid": pod.uid,
            },
            "type": "Warning",
            "reason": "MegascaleEvicted",
            "message": why[:1024],  # more is refused by the API
            "source": {"component": SOURCE},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        # Events are only for people; the eviction does not depend on them.
        with contextlib.suppress(StateError, ExistsError, UnavailableError):
            await self._api.create(f"/api/v1/namespaces/{self._namespace}/events", event)

    def _read(self, machine: Machine) -> Json:
        """The machine's object in the version on which the decision was based.

        Raises:
            StateError: there is a newer version.
        """
        found = (self._machines.objects or {}).get(machine.name)
        if found is None or found["metadata"]["resourceVersion"] != machine.version:
            raise StateError(f"machine {machine.name} has changed", reason="CONFLICT")
        return found


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
