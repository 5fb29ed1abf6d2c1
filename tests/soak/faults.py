"""The faults of the soak, drawn at random; many are in progress at the same time.

A fault begins at once and ends by itself; :meth:`Faults.end` undoes what still lasts. Orders count
as faults too: they come at bad moments, and twice under one request id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from tests.soak.clusters import NODES, Process, SoakCluster
from tests.soak.follow import Followed

from megascale.v1 import driver_pb2
from megascale_client import AsyncClient, MegascaleError
from megascale_common.node.process import start_ticks

STOPS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
FULL_S = (1.0, 4.0, 10.0, 25.0)
SLOW_S = (5.0, 15.0)
# A slow daemon runs for a fifth of the time: what it writes takes five times as long.
SLOW_STOP_S = 0.2
SLOW_RUN_S = 0.05
SUSPENDED_S = (0.0, 1.0, 4.0, 10.0)
BACK_AFTER_S = (1.0, 5.0, 15.0)  # a node that ended comes back
ORDER_S = 90.0  # an order is answered within this time
REASON = "soak"
_KILLED = ("worker", "worker", "loader", "daemon", "daemon", "driver", "keeper", "etcd", "template")
_STOPPED = ("worker", "worker", "loader", "daemon", "agent", "agent", "driver", "etcd", "keeper")
_WORKERS = ("worker", "loader", "template")


@dataclass(slots=True)
class Faults:
    """Draws faults for one job at a time.

    Attributes:
        counts: how many of each kind there were.
        problems: orders that were not answered, and faults that failed by a defect of the soak.
    """

    cluster: SoakCluster
    client: AsyncClient
    random: random.Random
    disks: bool
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    spares_services: bool = False  # then services are stopped, and not killed
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _stopped: dict[int, int | None] = field(default_factory=dict)
    _junk: set[Path] = field(default_factory=set)
    _damaged: set[Path] = field(default_factory=set)
    _due_s: dict[str, float] = field(default_factory=dict)

    def strike(self, job: Followed) -> None:
        """Begin one fault."""
        kinds: dict[Callable[[Followed], Coroutine[Any, Any, None]], int] = {
            self._kill: 6,
            self._stop: 6,
            self._kill_agent: 2,
            self._slow: 2,
            self._damage: 2,
            self._damage_run_file: 1,
            self._order_node: 4,
            self._suspend: 1,
            self._restart: 2,
            self._from_step: 1,
            self._update: 1,
            self._twice: 2,
        }
        if self.disks:
            kinds |= {self._fill_checkpoints: 2, self._fill_run: 1}
        [fault] = self.random.choices(list(kinds), list(kinds.values()))
        self.counts[fault.__name__.strip("_")] += 1
        self._begin(fault(job))

    async def revive(self) -> None:
        """Bring back nodes that have ended a while ago."""
        missing = self.cluster.missing_nodes()
        now_s = time.monotonic()
        for node in list(self._due_s):
            if node not in missing:
                del self._due_s[node]
        for node in missing:
            due_s = self._due_s.setdefault(node, now_s + self.random.choice(BACK_AFTER_S))
            if now_s >= due_s:
                self._due_s[node] = now_s + ORDER_S  # one start at a time
                self._begin(self._revive(node))

    async def end(self, job: Followed) -> None:
        """Let all faults end, and undo what an operator would undo."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=max(STOPS_S) + ORDER_S)
        for pid in list(self._stopped):
            self._continue(pid)
        for path in list(self._junk):
            self._free(path)
        self._due_s = {}
        for node in NODES:
            await self._order(self.client.uncordon(node, REASON), f"uncordon {node}")
        if job.suspended:
            await self._order(self.client.resume(job.name, REASON), "resume")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.problems.append(f"a fault failed: {error!r}")

    def _say(self, *words: object) -> None:
        print(f"{time.strftime('%H:%M:%S')}   ", *words, file=sys.stderr, flush=True)

    def _pick(self, kinds: tuple[str, ...], job: Followed | None = None) -> Process | None:
        kind = self.random.choice(kinds)
        found = [one for one in self.cluster.processes() if one.kind == kind]
        if job is not None and kind == "worker":
            found = [one for one in found if f"of job {job.name} " in one.command] or found
        return self.random.choice(found) if found else None

    # Processes.

    async def _kill(self, job: Followed) -> None:
        victim = self._pick(_WORKERS if self.spares_services else _KILLED, job)
        if victim is not None and self.cluster.kills_left.get(victim.kind, 1) > 0:
            if victim.kind in self.cluster.kills_left:
                self.cluster.kills_left[victim.kind] -= 1
            self._say("kill", victim.name, victim.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)

    async def _kill_agent(self, job: Followed) -> None:
        """Never more than one at a time: two jobs' worth of nodes must be left."""
        if self.spares_services or self.cluster.missing_nodes():
            return
        if (victim := self._pick(("agent",))) is not None:
            self._say("kill", victim.name, victim.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)

    async def _stop(self, job: Followed) -> None:
        seconds = self.random.choice(STOPS_S)
        if (victim := self._pick(_STOPPED, job)) is not None:
            self._say(f"stop {victim.name} {victim.pid} for {seconds:g} s")
            self._hold(victim.pid)
            await asyncio.sleep(seconds)
            self._continue(victim.pid)

    async def _slow(self, job: Followed) -> None:
        """What the daemon stores takes five times as long."""
        seconds = self.random.choice(SLOW_S)
        if (victim := self._pick(("daemon",))) is None:
            return
        self._say(f"slow storage of {victim.name} for {seconds:g} s")
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._hold(victim.pid)
            await asyncio.sleep(SLOW_STOP_S)
            self._continue(victim.pid)
            await asyncio.sleep(SLOW_RUN_S)

    def _hold(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            started = start_ticks(pid)
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = started

    def _continue(self, pid: int) -> None:
        if pid in self._stopped and start_ticks(pid) == self._stopped.pop(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _revive(self, node: str) -> None:
        self._say("start", node)
        try:
            await self.cluster.revive(node)
        except (MegascaleError, OSError) as error:  # a full disk, or no driver: again later
            self._say("start", node, "->", str(error)[:200])
        self._due_s.pop(node, None)

    # Disks and files.

    async def _fill_checkpoints(self, job: Followed) -> None:
        await self._fill(self.cluster.checkpoints)

    async def _fill_run(self, job: Followed) -> None:
        await self._fill(self.cluster.run)

    async def _fill(self, folder: Path) -> None:
        seconds = self.random.choice(FULL_S)
        path = folder / f"junk-{uuid.uuid4().hex}"
        self._junk.add(path)
        self._say(f"{folder.name} is full for {seconds:g} s")
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:  # again and again: others free some
            await asyncio.to_thread(_fill_up, path)
            await asyncio.sleep(0.5)
        self._free(path)

    def _free(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._junk.discard(path)

    async def _damage(self, job: Followed) -> None:
        """Flip, cut or delete a file of a checkpoint, while the job has another one to restore."""
        files = [path for folder in self._spared(job) for path in folder.iterdir()]
        if not files:
            return
        path = self.random.choice(sorted(files))
        self._damaged.add(path.parent)
        job.damaged = True
        how = self.random.choice(("flip", "cut", "delete"))
        self._say(how, path.relative_to(self.cluster.checkpoints))
        with contextlib.suppress(OSError):
            if how == "delete":
                path.unlink()
            elif how == "cut":
                os.truncate(path, path.stat().st_size // 2)
            else:
                self._flip(path)

    def _spared(self, job: Followed) -> list[Path]:
        """Folders of the checkpoints that the job could restore, if there are two at least.

        A job whose last whole checkpoint is damaged waits for a person, as it should. None where
        a step was ordered: it may be the damaged one.
        """
        root = self.cluster.checkpoints / job.name
        whole: dict[int, Path] = {}
        for path in sorted((root / "commits").glob("*.json")):
            try:
                record = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # being written, or removed
            if record.get("kind") == "OPEN":
                restored = record["restored_from"]["step"]
                whole = {step: folder for step, folder in whole.items() if step == restored}
            elif record.get("kind") == "COMMIT":
                whole[record["step"]] = (root / record["manifest"]).parent
        found = [one for one in whole.values() if one not in self._damaged and one.is_dir()]
        return found if len(found) > 1 and not job.may_go_back else []

    def _flip(self, path: Path) -> None:
        with path.open("r+b") as file:
            at = self.random.randrange(max(1, path.stat().st_size))
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 16]))

    async def _damage_run_file(self, job: Followed) -> None:
        """Delete or empty a file that services keep for others."""
        names = ("pids.json", "prometheus.json", "checkpoint.log", "config.json", "agent.log")
        files = sorted(path for path in self.cluster.run.rglob("*") if path.name in names)
        if files:
            path = self.random.choice(files)
            how = self.random.choice(("delete", "empty"))
            self._say(how, path.relative_to(self.cluster.run))
            with contextlib.suppress(OSError):
                path.unlink() if how == "delete" else os.truncate(path, 0)

    # Orders.

    async def _order(self, call: Awaitable[object], what: str) -> None:
        """Give an order, which may be refused, and must be answered."""
        self._say("order:", what)
        try:
            await asyncio.wait_for(call, ORDER_S)
        except MegascaleError as error:
            self._say("order:", what, "->", type(error).__name__, str(error)[:120])
        except TimeoutError:
            self.problems.append(f"no answer to {what} within {ORDER_S:g} s")

    async def _order_node(self, job: Followed) -> None:
        node, client = self.random.choice(NODES), self.client
        orders: dict[str, Callable[[], Awaitable[object]]] = {
            "evict": lambda: client.evict(node, REASON),
            "evict now": lambda: client.evict(node, REASON, now=True),
            "drain": lambda: client.drain(node, REASON),
            "cordon": lambda: client.cordon(node, REASON),
            "uncordon": lambda: client.uncordon(node, REASON),
        }
        what = self.random.choice(list(orders))
        await self._order(orders[what](), f"{what} {node}")

    async def _suspend(self, job: Followed) -> None:
        await self._order(self.client.suspend(job.name, REASON), "suspend")
        await asyncio.sleep(self.random.choice(SUSPENDED_S))
        await self._order(self.client.resume(job.name, REASON), "resume")

    async def _restart(self, job: Followed) -> None:
        now = self.random.random() < 0.5
        await self._order(self.client.restart(job.name, REASON, now=now), f"restart, now={now}")

    async def _from_step(self, job: Followed) -> None:
        """Go back to a checkpoint: the only order by which a committed step may go back."""
        if any(job.name in folder.parts for folder in self._damaged):
            return
        job.may_go_back = True  # from here on nothing is damaged that it may restore
        try:
            steps = [one.step async for one in self.client.checkpoints(job.name)]
        except MegascaleError:
            return
        if steps:
            step = self.random.choice(steps)
            await self._order(
                self.client.restart(job.name, REASON, from_step=step), f"restart from {step}"
            )

    async def _update(self, job: Followed) -> None:
        spec = type(job.spec)()
        spec.CopyFrom(job.spec)
        spec.labels["soak"] = str(self.random.randrange(1000))
        restart = self.random.random() < 0.5
        await self._order(self.client.update(spec, REASON, restart=restart), "update")

    async def _twice(self, job: Followed) -> None:
        """The same order twice at once, under one request id."""
        node = self.random.choice(NODES)
        key = str(uuid.uuid4())
        restart = driver_pb2.RestartJobRequest(name=job.name, reason=REASON, request_id=key)
        evict = driver_pb2.EvictNodeRequest(name=node, reason=REASON, request_id=key)
        uncordon = driver_pb2.UncordonNodeRequest(name=node, reason=REASON, request_id=key)
        calls: tuple[tuple[Message, type[Message]], ...] = (
            (restart, driver_pb2.RestartJobResponse),
            (evict, driver_pb2.EvictNodeResponse),
            (uncordon, driver_pb2.UncordonNodeResponse),
        )
        request, answer = self.random.choice(calls)
        method = type(request).__name__.removesuffix("Request")
        unary = self.client._connection.unary
        await asyncio.gather(
            *(self._order(unary(method, request, answer), f"{method} twice") for _ in range(2))
        )


def _fill_up(path: Path) -> None:
    """Write into a file until its disk is full."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            block = b"\0" * size
            with contextlib.suppress(OSError):
                while file.write(block) == size:
                    pass
