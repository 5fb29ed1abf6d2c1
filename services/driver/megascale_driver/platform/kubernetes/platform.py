"""Kubernetes as a platform: its nodes are our pods, under their names.

This is for people and for `megascale platform`. A cluster on Kubernetes does not need `megascale
platform follow`: the platform process (:mod:`megascale_driver.platform.kubernetes`) does more than
that, and recognises a drain from here by its mark.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from megascale_common.service.errors import (
    ExpiredError,
    NotFoundError,
    OptionError,
    StateError,
    UnavailableError,
)
from megascale_driver.platform.interface import PREFIX, PlatformNode, require_count
from megascale_driver.platform.kubernetes import objects
from megascale_driver.platform.kubernetes.api import KubernetesApi
from megascale_driver.platform.kubernetes.cluster import KubernetesCluster
from megascale_driver.platform.kubernetes.objects import Machine, Mark, Pod

NAMESPACE_VARIABLE, SWITCH_VARIABLE = "MEGASCALE_NAMESPACE", "MEGASCALE_SWITCH_LABEL"
SET_VARIABLE = "MEGASCALE_STATEFUL_SET"
TRIES = 5  # for a change to a machine that others change at the same time


class KubernetesPlatform:
    """The cluster of ``KUBECONFIG``, or of this pod; see :class:`Platform` for the methods.

    ``MEGASCALE_NAMESPACE`` names the namespace (default ``megascale``), ``MEGASCALE_SWITCH_LABEL``
    the label for a machine's switch, and ``MEGASCALE_STATEFUL_SET`` the StatefulSet that is scaled
    to provide nodes (default ``megascale-node``).
    """

    def __init__(self) -> None:
        file = os.environ.get("KUBECONFIG", "")
        self._kubeconfig = Path(file) if file else None
        self._namespace = os.environ.get(NAMESPACE_VARIABLE) or "megascale"
        self._switch_label = os.environ.get(SWITCH_VARIABLE) or objects.SWITCH_LABEL
        self._stateful_set = os.environ.get(SET_VARIABLE) or objects.STATEFUL_SET

    async def nodes(self) -> tuple[PlatformNode, ...]:
        """Our pods that have a machine, with the state of that machine."""
        async with self._read() as cluster:
            machines, pods = cluster.machines(), cluster.pods()
        return tuple(
            PlatformNode(
                name=name,
                switch=machine.switch,
                ready=machine.conditions == ("Ready",),
                drained=machine.cordoned,
                conditions=machine.conditions,
                reason=machine.mark.reason if machine.mark is not None else machine.trouble,
                reached=machine.reached,
            )
            for name, pod in sorted(pods.items())
            if (machine := machines.get(pod.machine)) is not None
        )

    async def drain(self, name: str, reason: str) -> None:
        """Cordon and taint the pod's machine; running pods continue."""
        if not reason.strip():
            raise OptionError("reason: say why the machine is drained; Kubernetes shows it")
        said = reason.strip()[: objects.MAX_REASON_CHARS]
        for _ in range(TRIES):
            async with self._read() as cluster:
                pod, machine = _placed(cluster, name)
                mark = machine.mark
                if mark is not None and mark.reason == said:
                    return
                ours = not machine.cordoned or (mark is not None and mark.cordoned)
                new = Mark(node=name, pod=pod.uid, reason=said, cordoned=ours, state="drained")
                with contextlib.suppress(StateError):
                    await cluster.mark(machine, new if mark is None else replace(mark, reason=said))
                    return
        raise UnavailableError(f"machine {machine.name} changes all the time; try again")

    async def restore(self, name: str) -> None:
        """Undo our drain; an eviction by the driver returns while the driver keeps it."""
        for _ in range(TRIES):
            async with self._read() as cluster:
                _, machine = _placed(cluster, name)
                mark = machine.mark
                if mark is None or not mark.reason.startswith(PREFIX):
                    return
                with contextlib.suppress(StateError):
                    await cluster.unmark(machine, mark)
                    return
        raise UnavailableError(f"machine {machine.name} changes all the time; try again")

    async def replace(self, name: str) -> bool:
        """Delete the pod; its StatefulSet creates it again on a machine that accepts pods."""
        async with self._read() as cluster:
            pod, _ = _placed(cluster, name)
            if not pod.ending:
                with contextlib.suppress(StateError):  # it has been replaced meanwhile
                    await cluster.delete_pod(pod, f"{PREFIX}replaced", force=False)
        return True

    async def provide(self, count: int) -> int:
        """Scale the StatefulSet of our pods; the cluster has to have machines for them."""
        require_count(count)
        for _ in range(TRIES):
            async with self._open() as cluster:
                with contextlib.suppress(StateError):
                    return await cluster.provide(self._stateful_set, count)
        raise UnavailableError(f"StatefulSet {self._stateful_set} changes all the time; try again")

    @contextlib.asynccontextmanager
    async def _read(self) -> AsyncIterator[KubernetesCluster]:
        """The cluster with its present state; raises as :meth:`_open`."""
        async with self._open() as found:
            await found.read()
            yield found

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[KubernetesCluster]:
        """A connection to the cluster; refusals of Kubernetes become UnavailableError."""
        try:
            async with KubernetesApi(self._kubeconfig) as api:
                yield KubernetesCluster(api, self._namespace, objects.SELECTOR, self._switch_label)
        except (NotFoundError, ExpiredError) as error:
            raise UnavailableError(str(error)) from None


def _placed(cluster: KubernetesCluster, name: str) -> tuple[Pod, Machine]:
    """A pod and its machine; OptionError if there is none, or it has no machine."""
    pod = cluster.pods().get(name)
    machine = cluster.machines().get(pod.machine) if pod is not None else None
    if pod is None or machine is None:
        raise OptionError(f"node: Kubernetes runs no pod of ours of the name {name!r}")
    return pod, machine
