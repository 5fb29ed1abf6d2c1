"""The TCP server of a node's replicas: takes states of other nodes, and gives them back.

A thread per connection, of which a transfer has several; of all there is a bounded number. What it
decides runs on the event loop. A caller shows a certificate or the cluster token before anything
else is read, and has a few seconds for it. Until then it is a stranger: of those there are few at a
time, and a new one takes the place of another stranger, never of a peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megascale_checkpoint.concurrency import Cancellation, Reported, accept_all
from megascale_checkpoint.replicas.connection import SILENCE_S, Activity, Connection, PeerError
from megascale_checkpoint.replicas.protocol import (
    SealedState,
    StateKey,
    check_pieces,
    number_of,
    numbers_of,
    read,
)
from megascale_checkpoint.replicas.store import Filling, ReplicaSlot, ReplicaStore
from megascale_checkpoint.replicas.streams import MOST_STREAMS
from megascale_common.node.addresses import joined, listen
from megascale_common.service import logs, tasks
from megascale_common.service.errors import (
    DamagedError,
    NotFoundError,
    RequestError,
    ServiceError,
    SupersededError,
)
from megascale_job.visible import agreed, counted

# A state that arrives over several streams, and those of a server, by name. For threads.


class Arrival:
    """One state; each stream that brings pieces of it has a thread in :meth:`join`."""

    def __init__(self, state: SealedState, image: memoryview) -> None:
        self._state = state
        self._image = image
        self._activity = Activity(state.size_bytes)
        self._changed = threading.Condition()
        self._missing = set(range(len(state.pieces)))
        self._streams: dict[Connection, set[int]] = {}  # which pieces each of them writes now
        self._closed = False

    def receive_all(self, first: Connection) -> None:
        """Take pieces over ``first`` until it says that all are there.

        When it returns, or raises, no stream writes any more.

        Raises:
            PeerError: ``first`` broke, or pieces are missing.
            DamagedError: a piece is not what was sealed.
        """
        try:
            self._take_from(first)
        finally:
            self._close()
        # Only now: a stream whose request lay unread may have begun to write a piece again.
        if self._missing:
            missing = len(self._missing)
            raise PeerError(f"{counted(missing, 'piece')} {agreed(missing, 'have')} not arrived")

    def join(self, stream: Connection) -> None:
        """Take pieces over a further stream until it ends.

        Raises:
            PeerError: it broke.
            RequestError: the transfer has ended.
            DamagedError: a piece is not what was sealed.
        """
        with self._changed:
            if self._closed or len(self._streams) >= MOST_STREAMS:
                raise RequestError("replica: the transfer has ended, or has too many streams")
        stream.send({"verb": "go"})
        self._take_from(stream)

    def _take_from(self, stream: Connection) -> None:
        with self._changed:
            if self._closed:
                return
            self._streams[stream] = set()
        stream.activity = self._activity
        try:
            self._take_all(stream)
        finally:
            with self._changed:
                del self._streams[stream]
                self._changed.notify_all()

    def _take_all(self, stream: Connection) -> None:
        rank, step = self._state.key.rank, self._state.key.step
        while (message := stream.receive_or_end()) is not None and message.get("verb") != "end":
            numbers = numbers_of(message, self._state)
            self._claim(stream, set(numbers))
            where = f"replica of rank {rank}, step {step}"
            stream.receive_pieces(self._state, numbers, self._image, where)
            with self._changed:
                self._missing -= set(numbers)
                self._streams[stream] = set()
                self._changed.notify_all()
            stream.send({"verb": "have"})

    def _claim(self, stream: Connection, numbers: set[int]) -> None:
        """From here on this stream alone writes these pieces, which count as missing again.

        Another that has not ended yet is one that broke for the sender: what it would still write
        may be damaged, and would come behind the checksum.

        Raises:
            PeerError: the transfer has ended, or the other does not.
        """
        until_s = time.monotonic() + SILENCE_S
        with self._changed:
            if self._closed:  # what was sent before the end can still be read behind it
                raise PeerError("the transfer has ended")
            self._missing |= numbers
            while others := self._writing(numbers):
                for other in others:
                    other.shut()
                if not self._changed.wait(max(0.0, until_s - time.monotonic())):
                    raise PeerError("a stream that broke does not end")
            self._streams[stream] = numbers

    def _writing(self, numbers: set[int]) -> list[Connection]:
        return [stream for stream, own in self._streams.items() if own & numbers]

    def _close(self) -> None:
        """Let no stream write any more."""
        with self._changed:
            self._closed = True
            while self._streams:
                for stream in self._streams:
                    stream.shut()
                self._changed.wait()


class Arrivals:
    """The states that arrive at one server, by the names of their transfers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Arrival] = {}

    @contextlib.contextmanager
    def add(self, arrival: Arrival) -> Iterator[str]:
        """Streams may join it while the body runs; yields its name."""
        name = secrets.token_hex(8)
        with self._lock:
            self._by_name[name] = arrival
        try:
            yield name
        finally:
            with self._lock:
                del self._by_name[name]

    def find(self, name: object) -> Arrival:
        """The one of that name; raises NotFoundError without one."""
        with self._lock:
            found = self._by_name.get(str(name))
        if found is None:
            raise NotFoundError(f"no replica arrives here as {str(name)[:50]!r}")
        return found


T = TypeVar("T")
log = logs.get("replicas")
# The ranks of a peer or two that store, and of one that restores, each with its streams.
MAX_CONNECTIONS = 128
MAX_STRANGERS = 32  # connections whose caller has not shown yet who it is
HELLO_TIMEOUT_S = 5.0  # for a caller to show it, handshake of TLS included
PATIENCE_S = 2.0  # a caller for whom room is made hears so again
END_TIMEOUT_S = 5.0  # for the threads of closed connections


class ReplicaServer:
    """Serves until it is closed."""

    def __init__(self, store: ReplicaStore, token: str) -> None:
        self._store = store
        self._token = token
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS + MAX_STRANGERS, "replica-server")
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: dict[Connection, Cancellation] = {}
        self._serving: set[asyncio.Future[None]] = set()
        self._lock = threading.Lock()  # of the strangers: one that is shut has not been let in
        self._strangers: dict[Connection, str] = {}  # with its address; the oldest first
        self._pushed_out = Reported("callers gave way to others before they said who they are")
        self._arrivals = Arrivals()

    def start(self, host: str, port: int = 0) -> str:
        """Listen; returns host:port.

        Raises:
            OSError: the address cannot be used.
        """
        self._listener = listen(host, port, backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self._accepting = tasks.essential(self._accept(), "replica server")
        return joined(host, self._listener.getsockname()[1])

    async def close(self) -> None:
        """End all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for connection, cancelled in list(self._connections.items()):
            cancelled.cancel()
            connection.shut()
        if self._serving:
            await asyncio.wait(self._serving, timeout=END_TIMEOUT_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _accept(self) -> None:
        assert self._listener is not None
        await accept_all(self._listener, "a peer", self._is_full, self._take_in)

    def _is_full(self) -> bool:
        with self._lock:
            return len(self._connections) - len(self._strangers) >= MAX_CONNECTIONS

    def _take_in(self, sock: socket.socket) -> None:
        loop, cancelled = asyncio.get_running_loop(), Cancellation()
        connection = Connection(sock, cancelled)
        self._make_room()
        with self._lock:
            self._strangers[connection] = _address(sock)
        self._connections[connection] = cancelled
        late = loop.call_later(HELLO_TIMEOUT_S, self._shut_stranger, connection)
        serving = loop.run_in_executor(self._threads, self._serve, connection, loop)
        self._serving.add(serving)
        serving.add_done_callback(functools.partial(self._ended, connection, late))

    def _make_room(self) -> None:
        """Shut a stranger where there are too many: the oldest of the address with the most."""
        with self._lock:
            if len(self._strangers) < MAX_STRANGERS:
                return
            [(worst, _)] = Counter(self._strangers.values()).most_common(1)
            oldest = next(each for each, address in self._strangers.items() if address == worst)
        self._pushed_out.one_more()
        self._shut_stranger(oldest)

    def _shut_stranger(self, connection: Connection) -> None:
        with self._lock:
            if self._strangers.pop(connection, None) is not None:
                connection.shut()

    def _let_in(self, connection: Connection) -> None:
        with self._lock:
            if self._strangers.pop(connection, None) is None:
                raise PeerError("the caller took too long to show who it is, or others came")

    def _ended(
        self, connection: Connection, late: asyncio.TimerHandle, serving: asyncio.Future[None]
    ) -> None:
        late.cancel()
        with self._lock:
            self._strangers.pop(connection, None)
        self._connections.pop(connection)
        self._serving.discard(serving)

    def _serve(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """One connection, in its thread."""
        with connection:
            try:
                connection.accept(self._token)
                self._let_in(connection)
                request = connection.receive()
                if request.get("verb") == "store":
                    state = read(request.get("state"), SealedState)
                    self._take(connection, state, number_of(request, "attempt"), loop)
                elif request.get("verb") == "join":
                    self._arrivals.find(request.get("transfer")).join(connection)
                else:
                    self._give(connection, request, loop)
            except (ServiceError, PeerError) as error:
                log.info("replica connection ended", error=str(error))
                with contextlib.suppress(ServiceError, PeerError):
                    superseded = isinstance(error, SupersededError)
                    connection.send(
                        {"verb": "refused", "error": str(error), "superseded": superseded}
                    )
            except Exception:
                # A defect costs this connection only: the daemon has the snapshots of all ranks.
                log.exception("defect while serving a peer")

    def _take(
        self,
        connection: Connection,
        state: SealedState,
        attempt: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        begun = self._store.begin(state, attempt, connection.shut)
        filling = _on(loop, begun, lambda: connection.send({"verb": "wait"}))
        if filling is None:
            connection.send({"verb": "kept"})
            return
        whole, arrival = False, Arrival(state, filling.slot.memory.view)
        try:
            with self._arrivals.add(arrival) as name:
                connection.send({"verb": "go", "transfer": name})
                arrival.receive_all(connection)
            whole = True
        finally:
            _on(loop, self._finish(filling, whole))
        connection.send({"verb": "kept"})

    async def _finish(self, filling: Filling, whole: bool) -> None:
        if whole:
            self._store.sealed_now(filling)
        else:
            self._store.given_up(filling)

    def _give(
        self, connection: Connection, request: dict[str, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        key = read(request.get("key"), StateKey)
        slot = _on(loop, self._lend(key))
        state, image = slot.state, slot.memory.view
        try:
            assert state is not None
            given = {"state": state} if request.get("first") else {}
            connection.send({"verb": "state", **given})
            connection.activity = Activity(state.size_bytes)
            while (asked := connection.receive_or_end()) is not None:
                numbers = numbers_of(asked, state)
                # Here too: a damaged one must not be offered again at the next restart.
                check_pieces(state, numbers, image, f"the replica of rank {key.rank}")
                connection.send({"verb": "bytes"})
                connection.send_pieces(state, numbers, image)
        except DamagedError:
            _on(loop, self._discard(slot))
            raise
        finally:
            _on(loop, self._store.returned(slot))

    async def _discard(self, slot: ReplicaSlot) -> None:
        self._store.discard(slot)

    async def _lend(self, key: StateKey) -> ReplicaSlot:
        return self._store.lend(key)


def _address(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # gone already
        return ""


def _on(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    waiting: Callable[[], None] = lambda: None,
) -> T:
    """The result of a coroutine that runs on the event loop; for threads.

    While it takes longer, ``waiting`` is called every PATIENCE_S.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    while True:
        try:
            return future.result(PATIENCE_S)
        except TimeoutError:
            if future.done():
                raise
        with contextlib.suppress(PeerError):  # one that is gone is found out when there is a result
            waiting()
