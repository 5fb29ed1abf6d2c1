"""What stands between the tests' API server and processes: controllers, a scheduler, kubelets.

Pods are processes of this machine: the real command lines of the manifests, with the folder of each
volume in place of its path in the container. A shell reads them; what it would execute is forked by
:mod:`tests.harness.program_start`. Secrets, certificates (cert-manager's CSI driver) and
the downward API are filled as a kubelet would. A probe counts until it first succeeds, and a
container that ends by itself is started again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.harness import program_start
from tests.harness.kubernetes_api import KubernetesApi
from tests.harness.kubernetes_store import Key, Object
from tests.harness.processes import living_processes_of_group, until_gone

from megascale_common.node.process import child_environment
from megascale_common.service.identity import authority
from megascale_common.service.identity.peers import Role

TURN_S = 0.05
_CSI = "csi.cert-manager.io"
_SOCKETS = "/run/megascale"  # the paths of sockets are short
_PATHS = ("/etc/megascale", "/var/lib/megascale", _SOCKETS)
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")
# In place of the interpreter that a container's shell executes at its end: the command line of the
# program, for `_exec`.
_PYTHON = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done > "$0.part"
mv "$0.part" "$0.words"
"""


@dataclass
class Running:
    """The processes of a pod."""

    folder: Path
    address: str
    paths: dict[str, str] = field(
        default_factory=dict
    )  # of the containers, and where they are here
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # by container
    probe: subprocess.Popen[bytes] | None = None
    ready: bool = False
    terminated: bool = False
    restarts: int = 0


@dataclass
class Machines:
    """Runs what the API server's objects ask for; ``async with machines.running()``.

    Args:
        tls: the folder of the authority that issues the pods' certificates.
        settings: the ConfigMap of the pods.
        overrides: variables of every container, in place of the manifests'.
        secrets: files by name of the secret.
        family: of the pods' addresses; 6: they are added to this network namespace's loopback
            interface, which has to be one of the test's own.
    """

    api: KubernetesApi
    folder: Path
    cluster: str
    tls: Path
    settings: Mapping[str, str]
    overrides: dict[str, str]
    secrets: Mapping[str, Mapping[str, str]]
    pods: dict[str, Running] = field(default_factory=dict)  # by uid
    dead: set[str] = field(default_factory=set)  # machines whose kubelet is gone
    addresses: int = 0
    family: Literal[4, 6] = 4

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at all objects again and again; at the end no process of a pod is left."""
        task = asyncio.create_task(self._turn_for_ever())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            for uid in list(self.pods):
                self._end(uid)

    def lose(self, name: str) -> None:
        """A machine loses its power: its processes are gone, and nobody hears of it any more."""
        self.dead.add(name)
        for pod in self.api.store.list("pods", "", lambda found: True):
            if pod["spec"].get("nodeName") == name and pod["metadata"]["uid"] in self.pods:
                self._end(pod["metadata"]["uid"])
        unknown = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
        lost = {"status": {"conditions": unknown}}
        self.api.store.update(("nodes", "", name), lambda found: {**found, **lost}, True)

    def kill(self, name: str, container: str) -> None:
        """SIGKILL to a container of a pod, which its kubelet starts again."""
        for pod in self.api.store.list("pods", "", lambda found: True):
            if pod["metadata"]["name"] == name:
                self.pods[pod["metadata"]["uid"]].processes[container].kill()

    async def _turn_for_ever(self) -> None:
        while True:
            self._make_pods()
            self._schedule()
            for pod in self.api.store.list("pods", "", lambda found: True):
                if pod["spec"].get("nodeName", "") not in {"", *self.dead}:
                    self._run(pod)
            await asyncio.sleep(TURN_S)

    def _make_pods(self) -> None:
        store = self.api.store
        for each in store.list("statefulsets", "", lambda found: True):
            meta, spec = each["metadata"], each["spec"]
            for number in range(spec["replicas"]):
                name = f"{meta['name']}-{number}"
                if ("pods", meta["namespace"], name) not in store.objects:
                    self._make_pod(each, {"name": name})
        for each in store.list("deployments", "", lambda found: True):
            uid = each["metadata"]["uid"]
            have = [pod for pod in store.list("pods", "", lambda _: True) if _owner(pod) == uid]
            for _ in range(each["spec"]["replicas"] - len(have)):
                self._make_pod(each, {"generateName": f"{each['metadata']['name']}-"})

    def _make_pod(self, owner: Object, names: Mapping[str, str]) -> None:
        meta = owner["metadata"]
        made = pod_of(owner["spec"]["template"], "")
        made["metadata"] = {"labels": made["metadata"]["labels"], **names}
        reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "uid": meta["uid"]}
        made["metadata"]["ownerReferences"] = [
            {**reference, "name": meta["name"], "controller": True}
        ]
        self.api.store.create("pods", meta["namespace"], made)

    def _schedule(self) -> None:
        """Bind pods to machines that are ready, not cordoned or tainted, and without their like."""
        store = self.api.store
        pods = store.list("pods", "", lambda found: True)
        for pod in pods:
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            labels = pod["metadata"]["labels"]
            taken = {
                other["spec"].get("nodeName")
                for other in store.list("pods", "", lambda found: True)
                if other["metadata"]["labels"] == labels
            }
            for machine in store.list("nodes", "", takes_pods):
                name = machine["metadata"]["name"]
                if name not in taken:
                    bound = {**pod, "spec": {**pod["spec"], "nodeName": name}}
                    store.update(_key(pod), lambda _, bound=bound: bound, False)  # type: ignore[misc]
                    break

    def _run(self, pod: Object) -> None:
        """What the kubelet of the pod's machine does in one turn."""
        uid = pod["metadata"]["uid"]
        running = self.pods.get(uid)
        if running is None:
            if "deletionTimestamp" in pod["metadata"]:
                self.api.store.delete(_key(pod), {"gracePeriodSeconds": 0})
            else:
                self.pods[uid] = self._start(pod)
                self._show(pod, self.pods[uid])
            return
        self._write_downward(pod, running)
        for container in pod["spec"]["containers"]:
            self._exec(pod, running, container)
        left = [each for each in running.processes.values() if each.poll() is None]
        if "deletionTimestamp" in pod["metadata"]:
            if not running.terminated:
                running.terminated = True
                for each in left:
                    each.send_signal(signal.SIGTERM)
            if not left:
                self._end(uid)
                self.api.store.delete(_key(pod), {"gracePeriodSeconds": 0})
        elif len(left) < len(running.processes):
            for container in pod["spec"]["containers"]:
                if running.processes[container["name"]].poll() is not None:
                    self._run_container(pod, running, container)
                    running.restarts += 1
            running.ready = False
            self._show(pod, running)
        elif not running.ready and self._probed(pod, running):
            running.ready = True
            self._show(pod, running)

    def _start(self, pod: Object) -> Running:
        meta = pod["metadata"]
        folder = self.folder / "pods" / f"{meta['name']}-{meta['uid'][:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        address = self._next_address()
        running = Running(folder, address)
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            for mount in container["volumeMounts"]:
                here = folder / mount["name"]
                if mount["mountPath"] == _SOCKETS:
                    here = Path(os.environ["XDG_RUNTIME_DIR"]) / meta["uid"][:8]
                self._fill(volumes[mount["name"]], here, pod, address)
                running.paths[mount["mountPath"]] = str(here)
        self._write_downward(pod, running)
        for container in pod["spec"]["containers"]:
            self._run_container(pod, running, container)
        return running

    def _next_address(self) -> str:
        self.addresses += 1
        if self.family == 6:
            address = f"fd77::{self.addresses:x}"
            add = ["ip", "-6", "address", "add", f"{address}/128", "dev", "lo", "nodad"]
            subprocess.run(add, check=True)
            return address
        # Ports of pods are fixed: another test run on this machine has other addresses.
        run = os.getpid()
        return f"127.{run // 250 % 250 + 1}.{run % 250}.{self.addresses % 250 + 1}"

    def _run_container(self, pod: Object, running: Running, container: Object) -> None:
        """Start a container's shell, with an interpreter that hands over its command line."""
        python = running.folder / f"{container['name']}.bin" / "python"
        if not python.exists():
            python.parent.mkdir()
            python.write_text(_PYTHON)
            python.chmod(0o755)
        words = [*container["command"], *container.get("args", ())]
        self._begin(pod, running, container, [located(word, running.paths) for word in words])

    def _exec(self, pod: Object, running: Running, container: Object) -> None:
        """The program that a container's shell has come to."""
        words = running.folder / f"{container['name']}.bin" / "python.words"
        if running.processes[container["name"]].poll() != 0 or not words.exists():
            return
        arguments = words.read_text().split("\0")[:-1]
        words.unlink()
        self._begin(pod, running, container, [sys.executable, *arguments])

    def _begin(self, pod: Object, running: Running, container: Object, words: list[str]) -> None:
        """Start a process as the container's."""
        own = environment_of(container, pod, running.address)
        host = {"MEGASCALE_HOST": running.address}  # there are no names of pods here
        environment = child_environment({**self.settings, **own, **self.overrides, **host})
        if words[0] != sys.executable:
            stands_in = running.folder / f"{container['name']}.bin"
            environment["PATH"] = f"{stands_in}{os.pathsep}{environment['PATH']}"
        with (running.folder / f"{container['name']}.log").open("ab") as log:
            running.processes[container["name"]] = program_start.start(
                words,
                env=environment,
                cwd=running.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _fill(self, volume: Object, here: Path, pod: Object, address: str) -> None:
        here.mkdir(exist_ok=True)
        if "secret" in volume:
            for name, text in self.secrets[volume["secret"]["secretName"]].items():
                (here / name).write_text(text)
        elif "csi" in volume and not (here / _TLS_FILES[0]).exists():
            assert volume["csi"]["driver"] == _CSI
            given = volume["csi"]["volumeAttributes"]
            uri = _with_names(given[f"{_CSI}/uri-sans"], pod)
            domain, role, name = re.fullmatch(r"spiffe://([^/]+)/.*/([^/]+)/([^/]+)", uri).groups()  # type: ignore[union-attr]
            hosts = _with_names(given.get(f"{_CSI}/dns-names", ""), pod).split(",")
            issued = authority.issue(
                self.tls, self.cluster, Role(role), name, [address, *(h for h in hosts if h)],
                trust_domain=domain,
            )  # fmt: skip
            assert issued.ca is not None
            files = (issued.certificate, issued.key, issued.ca)
            for source, file in zip(files, _TLS_FILES, strict=True):
                shutil.copyfile(source, here / file)

    def _write_downward(self, pod: Object, running: Running) -> None:
        for volume in pod["spec"]["volumes"]:
            for item in volume.get("downwardAPI", {}).get("items", ()):
                path = item["fieldRef"]["fieldPath"]
                key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
                assert key is not None, path
                text = (pod["metadata"].get("annotations") or {}).get(key[1], "")
                file = running.folder / volume["name"] / item["path"]
                if not file.exists() or file.read_text() != text:
                    file.write_text(text)

    def _probed(self, pod: Object, running: Running) -> bool:
        probe = pod["spec"]["containers"][0].get("readinessProbe")
        if probe is None:
            return True
        if running.probe is None:
            command = [located(word, running.paths) for word in probe["exec"]["command"]]
            with (running.folder / "probe.log").open("ab") as log:
                running.probe = program_start.start(
                    [sys.executable, *command[1:]], stdout=log, stderr=log, env=child_environment()
                )
        status = running.probe.poll()
        if status is not None:
            running.probe = None
        return status == 0

    def _show(self, pod: Object, running: Running) -> None:
        word = "True" if running.ready else "False"
        container = pod["spec"]["containers"][0]["name"]
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": word}],
            "containerStatuses": [
                {"name": container, "ready": running.ready, "restartCount": running.restarts}
            ],
        }
        self.api.store.update(_key(pod), lambda found: {**found, "status": status}, True)

    def _end(self, uid: str) -> None:
        """Nothing of the pod's process groups is left."""
        running = self.pods.pop(uid)
        if running.probe is not None:
            running.probe.kill()
            running.probe.wait()
        groups = [
            pid
            for each in running.processes.values()
            for pid in living_processes_of_group(each.pid)
        ]
        for each in running.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
        until_gone(groups, "processes of a pod")

    def ready_addresses(self, app: str) -> list[str]:
        """The addresses of the ready pods with that name of an application."""
        return [
            self.pods[pod["metadata"]["uid"]].address
            for pod in self.api.store.list("pods", "", lambda found: True)
            if pod["metadata"]["labels"]["app.kubernetes.io/name"] == app
            and pod["metadata"]["uid"] in self.pods
            and self.pods[pod["metadata"]["uid"]].ready
        ]

    def log(self, name: str) -> str:
        """The logs of the pods of that name, with their probes'."""
        files = sorted((self.folder / "pods").glob(f"{name}-*/*log"))
        return "\n".join(f"{file}:\n{file.read_text()[-3000:]}" for file in files)


def _owner(pod: Object) -> str:
    return str(pod["metadata"].get("ownerReferences", [{}])[0].get("uid", ""))


def takes_pods(machine: Object) -> bool:
    """Whether a scheduler gives the machine further pods."""
    spec = machine["spec"]
    conditions = {each["type"]: each["status"] for each in machine["status"]["conditions"]}
    closed = spec.get("unschedulable") or any(
        taint["effect"] in ("NoSchedule", "NoExecute") for taint in spec.get("taints") or ()
    )
    return conditions.get("Ready") == "True" and not closed


def pod_of(template: Object, name: str) -> Object:
    """A pod from the template of its controller."""
    meta = {"name": name, "labels": dict(template["metadata"]["labels"])}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": dict(template["spec"])}


def environment_of(container: Object, pod: Object, address: str) -> dict[str, str]:
    """The variables that a container names itself."""
    fields = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "status.podIP": address,
    }
    return {
        each["name"]: each["value"]
        if "value" in each
        else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container.get("env", ())
    }


def located(text: str, paths: Mapping[str, str]) -> str:
    """A word of a command with folders of this machine in place of the container's."""
    for path in sorted(paths, key=len, reverse=True):
        if path.startswith(_PATHS):
            text = text.replace(path, paths[path])
    return text


def _with_names(text: str, pod: Object) -> str:
    meta: Any = pod["metadata"]
    text = text.replace("${POD_NAME}", meta["name"])
    return text.replace("${POD_NAMESPACE}", meta["namespace"])


def _key(found: Object) -> Key:
    return ("pods", found["metadata"]["namespace"], found["metadata"]["name"])
