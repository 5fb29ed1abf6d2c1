"""What the pages share of a cluster: each answer is kept for a moment, however many look at it.

Every list is bounded, and so is the number of jobs whose step records are followed."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import (
    TERMINAL_PHASES,
    Job,
    JobPhase,
    MegascaleError,
    Node,
    NotFound,
    NotPossible,
)
from megascale_client.messages import WatchJobResponse
from megascale_dashboard import grid_view, incident_view, job_view, node_view, shown, timeline_view
from megascale_dashboard.shown import Page


class Source(Protocol):
    """A cluster as the pages read it; the methods are those of AsyncClient and raise its errors."""

    notes: list[str]  # what the driver says with its newest answer

    async def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        """The leader, counts, rules, the breaker."""
        ...

    async def get(self, name: str) -> Job:
        """One job."""
        ...

    async def explain(self, name: str) -> driver_pb2.ExplainJobResponse:
        """Why a job is in its phase."""
        ...

    async def topology(self, name: str) -> driver_pb2.GetTopologyResponse:
        """Where each rank is, for whom it waits, and who holds the others up."""
        ...

    async def heat_map(self, name: str) -> driver_pb2.GetHeatMapResponse:
        """What each rank takes for each operation, and the nodes that are slow by that."""
        ...

    async def mfu_decline(self, name: str) -> driver_pb2.GetMfuDeclineResponse:
        """Why the steps of a job take longer than before."""
        ...

    def timeline(
        self, name: str, *, steps: int = 0, first_step: int = 0, ranks: Sequence[int] = ()
    ) -> AsyncIterator[bytes]:
        """A trace of these ranks on one clock: parts of a .json.gz."""
        ...

    def jobs(self) -> AsyncIterator[Job]:
        """All jobs by name."""
        ...

    def nodes(self) -> AsyncIterator[Node]:
        """All nodes by name."""
        ...

    def events(self, subject: str = "") -> AsyncIterator[types_pb2.Event]:
        """The lines of the audit log that the driver holds, oldest first."""
        ...

    def checkpoints(self, name: str) -> AsyncIterator[driver_pb2.Checkpoint]:
        """Complete checkpoints of a job, newest first."""
        ...

    def watch(self, name: str) -> AsyncIterator[WatchJobResponse]:
        """A job's state, step records and events as they happen."""
        ...


KEPT_S = 1.0  # an answer is used again so long
SPANS_KEPT_S = 10.0  # what the driver reads files of spans for
KEPT_ANSWERS = 256
KEPT_TIMELINES = 8  # among them
MAX_NODES = 20_000
MAX_JOBS = 2_000
MAX_EVENTS = 2_000  # the newest of a subject
MAX_CHECKPOINTS = 100
MAX_EXPLAINED = 20  # jobs that the first page explains
MAX_RECORDS = 20_000  # of each followed job, as many as the driver holds
MAX_FOLLOWED = 16
FIRST_RECORDS_S = 0.5  # how long a page waits for the records of a job it begins to follow
QUIET_S = 0.05  # no update for so long: what the driver held has arrived

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class ClusterReader:
    """The pages of one cluster, as their JSON twins have them.

    All methods raise MegascaleError where the cluster does not answer, or has no such thing.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._clock = clock
        self._answers: OrderedDict[str, tuple[float, asyncio.Future[Any]]] = OrderedDict()
        self._followed: OrderedDict[str, _Follower] = OrderedDict()

    async def close(self) -> None:
        """Stop following jobs."""
        followed = list(self._followed.values())
        self._followed = OrderedDict()
        for follower in followed:
            await follower.stop()

    async def now(self) -> Page:
        """What is wrong, since when, what is done, what one may do."""
        (info, notes), nodes, jobs = await asyncio.gather(
            self._kept("info", self._info), self._nodes(), self._jobs()
        )
        asked = [job.spec.name for job in jobs if _worth_explaining(job)][:MAX_EXPLAINED]
        found = await asyncio.gather(*map(self._explained, asked))
        explanations = dict(zip(asked, found, strict=True))
        events = await self._events("")
        restarted = [
            job.spec.name for job in jobs if job.spec.name in explanations and job.restarts
        ]
        lines = await asyncio.gather(*(self._events(f"jobs/{name}") for name in restarted))
        logs = dict(zip(restarted, lines, strict=True))
        state = incident_view.ClusterState(info, nodes, jobs, events, explanations, logs, notes)
        return incident_view.now(state, self._clock())

    async def fleet(self) -> Page:
        """All nodes by switch."""
        return node_view.fleet(await self._nodes())

    async def node(self, name: str) -> Page:
        """One node with its checks and events. Raises NotFound."""
        for node in await self._nodes():
            if node.name == name:
                return node_view.one(node, await self._events(f"nodes/{name}"))
        raise NotFound(f"no node has the name {name}")

    async def has(self, kind: str, name: str | None) -> bool:
        """Whether there is a job or node of the name, as far as is known now."""
        try:
            if name is not None and kind == "nodes":
                return any(node.proto.name == name for node in await self._nodes())
            if name is not None:
                await self._job(name)
        except NotFound:
            return False
        except MegascaleError:  # the page says what it is
            return True
        return True

    async def jobs(self) -> Page:
        """All jobs."""
        return job_view.listed(await self._jobs())

    async def job(self, name: str) -> Page:
        """One job with its curves, attempts, checkpoints and events. Raises NotFound."""
        job = await self._job(name)
        records = await self._records(name, job)
        events, explanation, checkpoints = await asyncio.gather(
            self._events(f"jobs/{name}"), self._explained(name), self._checkpoints(name)
        )
        return job_view.one(job, records, events, checkpoints, explanation)

    async def grid(self, name: str) -> Page:
        """The ranks of one job in their block. Raises NotFound."""

        async def drawn() -> Page:  # kept too: of a large job it takes longer than to ask for it
            topology = await self._source.topology(name)
            return grid_view.grid(await self._job(name), await self._nodes(), topology)

        return await self._kept(f"grid {name}", drawn)

    async def heat(self, name: str) -> Page:
        """How long each node of a job takes. Raises NotFound, NotPossible (no spans are kept)."""

        async def drawn() -> Page:
            answer = await self._source.heat_map(name)
            return grid_view.heat(await self._job(name), answer, await self._nodes())

        return await self._kept(f"heat {name}", drawn, SPANS_KEPT_S)

    async def timeline(self, name: str, wanted: timeline_view.Wanted) -> Page:
        """A few steps of the ranks of one group. Raises NotFound, NotPossible, InvalidRequest."""
        job = await self._job(name)
        _, _, ranks = timeline_view.members(job, wanted)

        async def trace(steps: int, first_step: int) -> bytes:
            parts = self._source.timeline(name, steps=steps, first_step=first_step, ranks=ranks)
            return b"".join([part async for part in parts])

        async def read() -> Page:
            data = await trace(wanted.steps, wanted.first_step)
            other = await trace(1, wanted.beside) if wanted.beside else None
            return await asyncio.to_thread(timeline_view.timeline, job, wanted, data, other)

        known = [key for key in self._answers if key.startswith("timeline ")]
        for key in known[: 1 - KEPT_TIMELINES]:
            del self._answers[key]  # megabytes each, and each address is one
        return await self._kept(f"timeline {name} {wanted}", read, SPANS_KEPT_S)

    async def slower(self, name: str) -> Page:
        """A job beside its plan and beside its own past. Raises NotFound."""
        job, decline, problem = await self._job(name), None, ""
        try:
            decline = await self._kept(
                f"decline {name}", lambda: self._source.mfu_decline(name), SPANS_KEPT_S
            )
        except NotPossible as error:  # this driver keeps no spans
            problem = str(error)
        return job_view.slower(job, decline, problem)

    async def events(self, subject: str) -> Page:
        """The newest lines of the audit log, newest first. Raises NotFound."""
        lines = await self._events(subject)
        return {
            "subject": subject,
            "full": len(lines) == MAX_EVENTS,
            "command": f"megascale events {subject}".rstrip(),
            "events": [shown.event(line) for line in reversed(lines)],
        }

    async def _info(self) -> tuple[driver_pb2.GetClusterInfoResponse, tuple[str, ...]]:
        info = await self._source.cluster_info()
        return info, tuple(self._source.notes)

    async def _nodes(self) -> list[Any]:
        return await self._kept("nodes", lambda: _first(self._source.nodes(), MAX_NODES))

    async def _jobs(self) -> list[Job]:
        return await self._kept("jobs", lambda: _first(self._source.jobs(), MAX_JOBS))

    async def _job(self, name: str) -> Job:
        return await self._kept(f"job {name}", lambda: self._source.get(name))

    async def _explained(self, name: str) -> driver_pb2.ExplainJobResponse:
        return await self._kept(f"why {name}", lambda: self._source.explain(name))

    async def _events(self, subject: str) -> list[types_pb2.Event]:
        async def newest() -> list[types_pb2.Event]:
            lines: deque[types_pb2.Event] = deque(maxlen=MAX_EVENTS)
            async for line in self._source.events(subject):
                lines.append(line)
            return list(lines)

        return await self._kept(f"events {subject}", newest)

    async def _checkpoints(self, name: str) -> list[driver_pb2.Checkpoint]:
        async def listed() -> list[driver_pb2.Checkpoint]:
            try:
                return await _first(self._source.checkpoints(name), MAX_CHECKPOINTS)
            except NotFound:
                raise
            except MegascaleError:  # no daemon can list them now; the job's page stands without
                return []

        return await self._kept(f"checkpoints {name}", listed)

    async def _records(self, name: str, job: Job) -> list[types_pb2.StepRecord]:
        known, follower = _Known.of(job), self._followed.get(name)
        # A stream ends with its job, which may have been restarted, or submitted again, since then.
        if follower is None or (follower.over and (follower.failed or follower.known != known)):
            follower = self._followed[name] = _Follower(self._source, name, known)
        self._followed.move_to_end(name)
        while len(self._followed) > MAX_FOLLOWED:
            _, oldest = self._followed.popitem(last=False)
            await oldest.stop()
        return await follower.records()

    async def _kept(
        self, key: str, ask: Callable[[], Awaitable[Answer]], kept_s: float = KEPT_S
    ) -> Answer:
        """The answer to ``ask``, which all who want it within ``kept_s`` share."""
        loop = asyncio.get_running_loop()
        asked_s, answer = self._answers.get(key, (0.0, None))
        if answer is None or (answer.done() and loop.time() - asked_s > kept_s):
            answer = asyncio.ensure_future(ask())
            self._answers[key] = (loop.time(), answer)
            self._answers.move_to_end(key)
            while len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
        # A browser that leaves must not cancel what others wait for.
        return cast(Answer, await asyncio.shield(answer))


class _Known(NamedTuple):
    """How far a job is, as far as it decides whether its records are followed anew."""

    created_ns: int
    attempt: int
    phase: int
    step: int

    @classmethod
    def of(cls, job: Job) -> _Known:
        """What is known now."""
        return cls(job.created_at.ToNanoseconds(), job.attempt, job.phase, job.step)


class _Follower:
    """The step records of one job, followed in the background since it was as ``known``."""

    def __init__(self, source: Source, name: str, known: _Known) -> None:
        self.known = known
        self._records: deque[types_pb2.StepRecord] = deque(maxlen=MAX_RECORDS)
        self._last_update_s = 0.0
        self._began_s = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._follow(source, name))

    @property
    def over(self) -> bool:
        """Whether the stream has ended."""
        return self._task.done()

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        done = self.over and not self._task.cancelled()
        return done and self._task.exception() is not None

    async def records(self) -> list[types_pb2.StepRecord]:
        """The records so far, oldest first; in the beginning, once those held have arrived."""
        loop = asyncio.get_running_loop()
        while not self._task.done() and loop.time() - self._began_s < FIRST_RECORDS_S:
            if self._last_update_s and loop.time() - self._last_update_s > QUIET_S:
                break
            await asyncio.sleep(QUIET_S / 2)
        return list(self._records)

    async def stop(self) -> None:
        """End the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self, source: Source, name: str) -> None:
        loop = asyncio.get_running_loop()
        async for update in source.watch(name):
            self._last_update_s = loop.time()
            if update.HasField("step"):
                self._records.append(update.step)


def _worth_explaining(job: Job) -> bool:
    """Whether the first page says why the job is where it is."""
    return job.phase not in TERMINAL_PHASES or job.phase == JobPhase.FAILED


async def _first(items: AsyncIterator[Item], most: int) -> list[Item]:
    found: list[Item] = []
    async for item in items:
        found.append(item)
        if len(found) == most:
            break
    return found
