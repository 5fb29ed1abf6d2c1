"""The unix socket for this node's workers; messages are those of megascale_common.node.messages.

One coroutine per connection and one answer per request, in order; checksums and file I/O run in
threads. Only the daemon's own user can connect. When a connection ends, the slots that it was
writing or reading are released; sealed slots are kept.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from megascale_checkpoint.checksums import MAX_JSON_DEPTH, is_too_deep
from megascale_checkpoint.concurrency import accept_all
from megascale_checkpoint.memory.registration import RegisteredRank, RegistrationFrames, parse
from megascale_checkpoint.restore.restore_requests import RestoreRequests
from megascale_checkpoint.save.rank_snapshots import RankSnapshots
from megascale_checkpoint.serve.driverless import HandOpenings
from megascale_checkpoint.serve.jobs import Jobs
from megascale_common.node import framing
from megascale_common.node.messages import (
    Accepted,
    Acquire,
    Acquired,
    AskSaves,
    Busy,
    DaemonAnswer,
    DaemonRequest,
    Drain,
    Drained,
    HandAnswer,
    HandRequest,
    LookInMemory,
    OpenAttempt,
    OpenStored,
    Pace,
    Pieces,
    ReadIndex,
    ReadStored,
    Register,
    Registered,
    Release,
    Released,
    RequestFailed,
    Restore,
    Seal,
    Sealed,
    StepTime,
    Verify,
    kind_of,
)
from megascale_common.node.unix_sockets import listen
from megascale_common.service import logs, tasks
from megascale_common.service.errors import RequestError, ServiceError

log = logs.get("local_server")
MAX_CONNECTIONS = 64  # workers of one node, and those of the previous attempt that are exiting
READ_BYTES = 1 << 16
SEND_TIMEOUT_S = 10.0  # answers are short: a worker that does not read one is stuck
MOST_DRAIN_S = 3600.0
_REQUESTS: Accepted[DaemonRequest | HandRequest] = Accepted(
    "the checkpoint daemon",
    Register,
    Pieces,
    Restore,
    LookInMemory,
    Verify,
    OpenStored,
    ReadIndex,
    ReadStored,
    Acquire,
    Seal,
    Release,
    Drain,
    StepTime,
    OpenAttempt,
    AskSaves,
)


class LocalServer:
    """Serves workers until it is closed."""

    def __init__(self, path: Path, jobs: Jobs, openings: HandOpenings | None = None) -> None:
        self._jobs = jobs
        self._openings = openings
        self._path = path
        self._listener = listen(path, "checkpoint daemon", MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self._accepted = 0
        self._connections: dict[asyncio.Task[None], _WorkerConnection] = {}

    async def serve(self) -> None:
        """Accept workers until cancelled."""
        await accept_all(self._listener, "a worker", self._is_full, self._take)

    def _is_full(self) -> bool:
        return len(self._connections) >= MAX_CONNECTIONS

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._accepted += 1
        connection = _WorkerConnection(sock, self._jobs, self._accepted, self._openings)
        task = tasks.single(connection.serve(), "worker connection")
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _WorkerConnection:
    """The connection of one worker; ``_held`` are the slots that it writes or reads."""

    def __init__(
        self, sock: socket.socket, jobs: Jobs, serial: int, openings: HandOpenings | None
    ) -> None:
        self._sock = sock
        self._jobs = jobs
        self.serial = serial
        self._openings = openings
        self._registration: RegisteredRank | None = None
        self._snapshots: RankSnapshots | None = None
        self._registering = RegistrationFrames()
        self._held: set[int] = set()
        self._task: asyncio.Task[Any] | None = None
        self._restores = RestoreRequests(
            lambda: self._current().restores, self._registered, lambda: self._held
        )
        self._handlers: Mapping[type[Any], Callable[[Any], Awaitable[DaemonAnswer]]] = {
            **self._restores.handlers,
            Acquire: self._acquire,
            Seal: self._seal,
            Release: self._release,
            Drain: self._drain,
            StepTime: self._step_time,
        }

    async def serve(self) -> None:
        """Answer requests until the worker disconnects or sends a bad one."""
        self._task = asyncio.current_task()
        try:
            await self._answer_all()
        except (ServiceError, framing.FramingError) as error:
            log.warning("worker refused", error=str(error), **self._log_context())
            await self._send_error(str(error))
        except (OSError, TimeoutError) as error:
            log.info("worker's connection ended", error=str(error), **self._log_context())
        except Exception:
            # A defect here must not end the daemon, which holds the snapshots of all ranks.
            log.exception("defect while serving a worker", **self._log_context())
        finally:
            self._release_held()
            self._sock.close()

    def end(self) -> set[int]:
        """Close this connection for its successor; the slots that it held, to be released."""
        # Emptied first: the cancelled task must not release what the successor releases.
        held = self._held
        self._held = set()
        if self._task is not None:
            self._task.cancel()
        return held

    async def _answer_all(self) -> None:
        decoder = framing.Decoder()
        while data := await asyncio.get_running_loop().sock_recv(self._sock, READ_BYTES):
            for message in decoder.feed(data):
                await self._answer(_REQUESTS.read(message))

    async def _answer(self, request: DaemonRequest | HandRequest) -> None:
        if self._snapshots is None:
            if isinstance(request, OpenAttempt | AskSaves) and self._openings is not None:
                await self._send(await self._openings.answer(request))
                return
            whole = self._registering.feed(request)
            if whole is not None:
                await self._register(whole)
            return
        handler = self._handlers.get(type(request))
        if handler is None:
            known = ", ".join(map(kind_of, self._handlers))
            raise RequestError(f"message kind {kind_of(request)!r} is not one of {known}")
        await self._send(await handler(request))

    async def _register(self, message: Register) -> None:
        registration = parse(message)
        snapshots = await self._jobs.register(registration, self)
        self._registration = registration
        self._snapshots = snapshots
        descriptors = [memory.descriptor for memory in snapshots.memories]
        first = snapshots.memories[0]
        answer = Registered(
            slots=len(descriptors),
            slot_bytes=len(first.view),
            landing_at=first.landing_at,
        )
        await self._send(answer, descriptors)

    async def _acquire(self, request: Acquire) -> Acquired | Busy:
        step = request.step
        if step < 1:
            raise RequestError(f"acquire.step is {step}; steps count from 1")
        snapshots = self._current()
        index = snapshots.acquire(step)
        assert self._registration is not None
        given = self._registration
        self._jobs.job(given.job).note_busy(given.attempt, step, given.rank, index is None)
        if index is None:
            return Busy()
        self._held.add(index)
        return Acquired(slot=index, store_ready=snapshots.table.store_ready)

    async def _seal(self, request: Seal) -> Sealed:
        if is_too_deep(request.small_state):
            raise RequestError(f"seal.small_state is nested deeper than {MAX_JSON_DEPTH} times")
        # The slot is not held from here on: if the worker dies during the checksums, it is sealed
        # all the same, because the whole state is in it.
        self._give_up_hold(request.slot)
        self._current().seal(
            request.slot,
            request.step,
            request.small_state,
            finite=request.finite,
            problem=request.problem,
            persist=request.persist,
            replicate=request.replicate,
        )
        return Sealed(step=request.step)

    async def _release(self, request: Release) -> Released:
        self._give_up_hold(request.slot)
        self._restores.released(request.slot)
        self._current().release(request.slot)
        return Released()

    async def _drain(self, request: Drain) -> Drained:
        step, timeout_s = request.step, request.timeout_s
        if not 0 <= timeout_s <= MOST_DRAIN_S:
            raise RequestError(
                f"drain.timeout_s is {timeout_s!r}; give 0 to {MOST_DRAIN_S:.0f} seconds"
            )
        snapshots = self._current()
        assert self._registration is not None
        waiting = False
        try:
            async with asyncio.timeout(timeout_s):
                problem = await self._while_connected(snapshots.drain(step))
        except TimeoutError:
            waiting = True
            late = "other ranks" if snapshots.is_reported(step) else "this rank"
            problem = snapshots.failure(step) or (
                f"step {step} is not complete: not saved in time by {late}"
            )
        committed = self._jobs.job(self._registration.job).committed
        # After a rollback an earlier attempt's commit may be of a later step, and of another state.
        if committed.step < step or committed.attempt != self._registration.attempt:
            return Drained(committed_step=committed.step, error=problem, waiting=waiting)
        return Drained(committed_step=committed.step)

    async def _while_connected(self, work: Coroutine[Any, Any, str]) -> str:
        """The result of ``work``, which may take an hour.

        Raises:
            ConnectionResetError: the worker has ended meanwhile, so nobody waits for it.
        """
        loop, gone = asyncio.get_running_loop(), asyncio.Event()

        def look() -> None:
            try:
                more = self._sock.recv(1, socket.MSG_PEEK)
            except OSError:
                more = b""
            loop.remove_reader(self._sock)
            if not more:  # else a request that is answered next
                gone.set()

        working, leaving = asyncio.create_task(work), asyncio.create_task(gone.wait())
        loop.add_reader(self._sock, look)
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionResetError("the worker has ended while it waited")
            return working.result()
        finally:
            loop.remove_reader(self._sock)
            working.cancel()
            leaving.cancel()

    async def _step_time(self, request: StepTime) -> Pace:
        step, time_s = request.step, request.time_s
        if step < 1 or not 0 <= time_s < math.inf:
            raise RequestError(
                f"step_time.step is {step} and time_s {time_s}; give a step and its seconds"
            )
        snapshots = self._current()
        job = self._jobs.job(snapshots.registration.job)
        writing = job.note_step(snapshots.registration, step, time_s)
        return Pace(
            persisting=writing,
            persist_s=snapshots.persist_s,
            replica_ended=snapshots.table.replica_ended,
        )

    def _current(self) -> RankSnapshots:
        """The rank's snapshots, as long as this connection owns them.

        Raises:
            RequestError: a newer connection of this rank has taken them over.
        """
        assert self._snapshots is not None
        if self._snapshots.owner is not self:
            raise RequestError("this worker is superseded: a newer one has registered for its rank")
        return self._snapshots

    def _registered(self) -> RegisteredRank:
        assert self._registration is not None
        return self._registration

    def _give_up_hold(self, index: int) -> None:
        if index not in self._held:
            raise RequestError(f"slot {index} is not held by this worker: acquire it first")
        self._held.discard(index)

    def _release_held(self) -> None:
        self._restores.ended()
        snapshots = self._snapshots
        if snapshots is None:
            return
        for index in self._held:
            snapshots.release(index)
        self._held.clear()
        if snapshots.owner is self:
            snapshots.owner = None

    async def _send_error(self, text: str) -> None:
        try:
            await self._send(RequestFailed(error=text))
        except (OSError, TimeoutError):
            pass  # the worker has disconnected

    async def _send(
        self, message: DaemonAnswer | HandAnswer, descriptors: list[int] | None = None
    ) -> None:
        data = framing.encode(message)
        if descriptors:
            # asyncio cannot send descriptors. Requests and answers alternate, so the send buffer is
            # empty and this plain send of a short message does not block.
            data = data[socket.send_fds(self._sock, [data], descriptors) :]
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await asyncio.get_running_loop().sock_sendall(self._sock, data)

    def _log_context(self) -> dict[str, Any]:
        given = self._registration
        if given is None:
            return {}
        return {"job": given.job, "attempt": given.attempt, "rank": given.rank}
