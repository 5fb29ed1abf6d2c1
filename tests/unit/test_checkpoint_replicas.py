"""Replicas between real sockets: what is taken, refused, and given back."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.concurrency import BURST_S, Cancellation, Pools, Signal, TokenBucket
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas import connection as connections
from megascale_checkpoint.replicas import server as servers
from megascale_checkpoint.replicas.connection import Connection, PeerError
from megascale_checkpoint.replicas.node_replicas import fetch
from megascale_checkpoint.replicas.protocol import (
    PieceBytes,
    SealedState,
    StateKey,
    read,
)
from megascale_checkpoint.replicas.server import ReplicaServer
from megascale_checkpoint.replicas.store import Filling, ReplicaSlot, ReplicaStore
from megascale_common.service.channel import present, presented
from megascale_common.service.errors import (
    DamagedError,
    NotFoundError,
    NotReadyError,
    RequestError,
    ServiceError,
    SupersededError,
)
from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role

TOKEN, SLOT_BYTES = "token-of-the-tests", 3 << 20


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of one daemon, which plays both parts."""
    folder = tmp_path_factory.mktemp("tls")
    authority.create(folder, "test")
    return authority.issue(folder, "test", Role.CHECKPOINT, "n1")


@pytest.fixture(autouse=True, params=["plain", "encrypted"])
def transport(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[None]:
    """Every test on plain and on encrypted connections."""
    present(certificates if request.param == "encrypted" else None)
    yield
    present(None)


@dataclass
class Peer:
    store: ReplicaStore
    endpoint: str
    staging: StagingFolder
    attempts: dict[str, int]


@asynccontextmanager
async def peer_at(folder: Path, limit_bytes: int | None = None) -> AsyncIterator[Peer]:
    staging = StagingFolder(folder / "staging", "test", "n1", "i1", limit_bytes)
    pools, attempts = Pools(), {"job": 1}
    store = ReplicaStore(staging, pools, lambda job: attempts.get(job, 0), Signal())
    server = ReplicaServer(store, TOKEN)
    try:
        yield Peer(store, server.start("127.0.0.1"), staging, attempts)
    finally:
        await server.close()
        await store.close()
        pools.close()
        staging.remove()


def image_of(step: int) -> bytearray:
    return bytearray((step * 7 + byte) % 251 for byte in range(997)) * (SLOT_BYTES // 997)


def state_of(step: int, attempt: int = 1, rank: int = 0) -> tuple[SealedState, bytearray]:
    """Two pieces with a hole between them, as padding makes one."""
    image = image_of(step)
    image += bytes(SLOT_BYTES - len(image))
    spans = ((0, 2_500_000), (2_500_032, 300_000))
    pieces = tuple(
        PieceBytes(start, size, checksum(memoryview(image)[start : start + size]))
        for start, size in spans
    )
    key = StateKey("job", rank, attempt, step, "digest")
    return SealedState(key, SLOT_BYTES, pieces, {"position": step}), image


def send(endpoint: str, state: SealedState, image: bytearray, attempt: int = 0) -> str:
    """Store a state as a sender of ``attempt`` does (0: that of the state); its last answer."""
    attempt = attempt or state.key.attempt
    with Connection.dial(endpoint, TOKEN, Cancellation()) as connection:
        connection.send({"verb": "store", "attempt": attempt, "state": state})
        reply = connection.receive()
        if reply["verb"] == "go":
            connection.send({"verb": "pieces", "numbers": [0, 1]})
            connection.send_pieces(state, [0, 1], memoryview(image))
            reply = connection.receive()
        if reply["verb"] == "have":
            connection.send({"verb": "end"})
            reply = connection.receive()
        return str(reply.get("error") or reply["verb"])


async def stored(peer: Peer, step: int, attempt: int = 1, rank: int = 0) -> str:
    return await asyncio.to_thread(send, peer.endpoint, *state_of(step, attempt, rank))


def steps(peer: Peer) -> list[tuple[int, int]]:
    return [(key.attempt, key.step) for key in peer.store.sealed("job")]


async def test_a_state_comes_back_bit_for_bit_and_two_of_them_are_kept(tmp_path: Path) -> None:
    async with peer_at(tmp_path) as peer:
        for step in (10, 20, 30):
            assert await stored(peer, step) == "kept"
        assert steps(peer) == [(1, 20), (1, 30)]
        assert peer.store.used_bytes == peer.staging.used_bytes == 2 * SLOT_BYTES
        assert await stored(peer, 30) == "kept", "it is here already: nothing travels"
        state, image = state_of(30)
        into = bytearray(b"\xff" * SLOT_BYTES)
        found = await asyncio.to_thread(
            fetch, peer.endpoint, TOKEN, state.key, memoryview(into), Cancellation()
        )
        assert found == state
        expected = bytearray(SLOT_BYTES)
        for piece in state.pieces:
            end = piece.offset + piece.size_bytes
            expected[piece.offset : end] = image[piece.offset : end]
        assert into == expected
        with pytest.raises(NotFoundError, match="step 10"):
            await asyncio.to_thread(
                fetch, peer.endpoint, TOKEN, state_of(10)[0].key, memoryview(into), Cancellation()
            )


async def test_an_older_state_never_takes_the_place_of_a_newer(tmp_path: Path) -> None:
    """Also one of an earlier attempt, whatever its step, and one that begins with free slots."""
    async with peer_at(tmp_path) as peer:
        assert await stored(peer, 30) == "kept"
        assert await stored(peer, 20) == "attempt 1, step 30 is kept here"
        peer.attempts["job"] = 2
        assert await stored(peer, 10, attempt=2) == "kept"
        state, image = state_of(40, attempt=1)
        late = await asyncio.to_thread(send, peer.endpoint, state, image, 2)
        assert late == "attempt 2, step 10 is kept here"
        assert steps(peer) == [(1, 30), (2, 10)]


async def test_bytes_that_changed_on_the_way_are_no_replica(tmp_path: Path) -> None:
    async with peer_at(tmp_path) as peer:
        assert await stored(peer, 10) == "kept"
        state, image = state_of(20)
        image[2_600_000] ^= 1
        answer = await asyncio.to_thread(send, peer.endpoint, state, image)
        assert "piece 1 of the replica is not what was sealed" in answer
        assert steps(peer) == [(1, 10)], "the whole one stands"
        assert await stored(peer, 20) == "kept"


async def test_a_flipped_bit_at_the_peer_is_found_once_and_not_offered_again(
    tmp_path: Path,
) -> None:
    async with peer_at(tmp_path) as peer:
        assert await stored(peer, 10) == await stored(peer, 20) == "kept"
        key = state_of(20)[0].key
        slot = peer.store.lend(key)
        slot.memory.view[5] ^= 4
        await peer.store.returned(slot)
        arguments = (peer.endpoint, TOKEN, key, memoryview(bytearray(SLOT_BYTES)), Cancellation())
        with pytest.raises(NotFoundError, match="piece 0 of the replica is not what was sealed"):
            await asyncio.to_thread(fetch, *arguments)
        assert steps(peer) == [(1, 10)]
        with pytest.raises(NotFoundError, match="no replica of step 20"):
            await asyncio.to_thread(fetch, *arguments)


async def test_bytes_that_change_on_the_way_back_are_found_by_the_reader() -> None:
    state, image = state_of(10)
    image[5] ^= 4
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with Connection(listener.accept()[0], Cancellation()) as connection:
                listener.close()  # further streams are refused
                connection.accept(TOKEN)
                connection.receive()
                connection.send({"verb": "state", "state": state})
                asked = connection.receive()
                connection.send({"verb": "bytes"})
                connection.send_pieces(state, asked["numbers"], memoryview(image))

        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        into = memoryview(bytearray(SLOT_BYTES))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(serve)
            with pytest.raises(DamagedError, match="piece 0"):
                await asyncio.to_thread(fetch, endpoint, TOKEN, state.key, into, Cancellation())


async def test_a_state_waits_for_the_reader_of_the_replica_whose_place_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer_at(tmp_path) as peer:
        assert await stored(peer, 10) == await stored(peer, 20) == "kept"
        slot, waits = peer.store.lend(state_of(10)[0].key), asyncio.Event()
        until_unread = peer.store._until_unread

        async def waiting(slot: ReplicaSlot) -> None:
            waits.set()
            await until_unread(slot)

        monkeypatch.setattr(peer.store, "_until_unread", waiting)
        storing = asyncio.create_task(stored(peer, 30))
        await waits.wait()
        await peer.store.returned(slot)
        assert await storing == "kept"
        peer.store.reader_wait_s = 0.01
        slot = peer.store.lend(state_of(20)[0].key)
        assert "is being read: try again" in await stored(peer, 40)
        await peer.store.returned(slot)
        assert steps(peer) == [(1, 20), (1, 30)], "what was read is kept"


async def test_only_the_present_attempt_of_a_job_with_ranks_here_is_kept(tmp_path: Path) -> None:
    async with peer_at(tmp_path) as peer:
        peer.attempts["job"] = 2
        assert "attempt 2 of job job has registered here" in await stored(peer, 10, attempt=1)
        # The state that attempt 2 has restored: it is sent anew, because the peer may be another.
        state, image = state_of(10, attempt=1)
        assert await asyncio.to_thread(send, peer.endpoint, state, image, 2) == "kept"
        assert await stored(peer, 10, attempt=2) == "kept"
        peer.attempts.clear()
        peer.store.rank_wait_s = 0.01
        assert "no rank of job job has slots on this node" in await stored(peer, 20, attempt=2)
        await peer.store.retire()
        assert steps(peer) == [] and peer.staging.used_bytes == 0


async def test_a_state_waits_for_the_first_rank_of_its_job(tmp_path: Path) -> None:
    """At the start of an attempt its nodes register one after the other."""
    async with peer_at(tmp_path) as peer:
        peer.attempts.clear()
        asked, attempt_of = asyncio.Event(), peer.store._attempt_of

        def asking(job: str) -> int:
            asked.set()
            return attempt_of(job)

        peer.store._attempt_of = asking
        storing = asyncio.create_task(stored(peer, 10))
        await asked.wait()
        peer.attempts["job"] = 1
        peer.store._changed.notify()
        assert await storing == "kept"


async def test_replicas_of_an_attempt_before_stay_until_the_present_has_its_own(
    tmp_path: Path,
) -> None:
    async with peer_at(tmp_path) as peer:
        assert await stored(peer, 10, rank=0) == await stored(peer, 10, rank=1) == "kept"
        peer.attempts["job"] = 2
        await peer.store.retire()
        assert len(steps(peer)) == 2
        assert await stored(peer, 12, attempt=2, rank=1) == "kept"
        await peer.store.retire()
        assert {key.rank for key in peer.store.sealed("job")} == {0, 1}
        assert await stored(peer, 14, attempt=2, rank=1) == "kept"
        await peer.store.retire()
        assert {key.rank for key in peer.store.sealed("job")} == {1}


async def test_a_newer_transfer_ends_one_that_stands_still(tmp_path: Path) -> None:
    async with peer_at(tmp_path) as peer:
        stalled, _ = state_of(10)

        def stall() -> Connection:
            connection = Connection.dial(peer.endpoint, TOKEN, Cancellation())
            request = {"verb": "store", "attempt": 1, "state": stalled}
            connection.send(request)
            assert connection.receive()["verb"] == "go"
            return connection

        with await asyncio.to_thread(stall):
            begun_s = time.monotonic()
            assert await stored(peer, 20) == "kept"
            assert time.monotonic() - begun_s < connections.SILENCE_S
        assert steps(peer) == [(1, 20)]


async def test_a_limit_of_staging_memory_refuses_a_replica(tmp_path: Path) -> None:
    async with peer_at(tmp_path, limit_bytes=SLOT_BYTES) as peer:
        assert "no room" in await stored(peer, 10)
        assert peer.staging.used_bytes == 0


async def test_a_stranger_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    async with peer_at(tmp_path) as peer:

        def ask(token: str) -> str:
            with Connection.dial(peer.endpoint, token, Cancellation()) as connection:
                connection.send({"verb": "fetch", "key": state_of(1)[0].key})
                return str(connection.receive()["error"])

        assert "does not have the token" in await asyncio.to_thread(ask, "wrong")
        assert "no replica of step 1" in await asyncio.to_thread(ask, TOKEN)

        def shout() -> bytes:
            host, _, port = peer.endpoint.rpartition(":")
            with socket.create_connection((host, int(port)), CALL_TIMEOUT_S) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return sock.recv(4096)

        if presented() is None:
            assert b"no frame of the replica protocol" in await asyncio.to_thread(shout)
        else:
            with suppress(ConnectionResetError):
                assert b"replica" not in await asyncio.to_thread(shout)


@pytest.mark.parametrize("transport", ["encrypted"], indirect=True)
async def test_a_certificate_that_is_no_nodes_gets_no_snapshot(
    tmp_path: Path, certificates: Certificates
) -> None:
    person = authority.issue(certificates.key.parent, "test", Role.OPERATOR, "ada")
    async with peer_at(tmp_path) as peer:
        host, _, port = peer.endpoint.rpartition(":")

        def ask() -> bytes:
            context = person.context(ssl.PROTOCOL_TLS_CLIENT)
            with (
                socket.create_connection((host, int(port)), 10.0) as plain,
                context.wrap_socket(plain, server_hostname=host) as encrypted,
            ):
                return encrypted.recv(4096)

        with suppress(OSError):
            assert await asyncio.to_thread(ask) == b""
        # Nor does a daemon give its own to a server that is none.
        present(person)
        with pytest.raises(PeerError, match=r"cannot be trusted|broke|closed"):
            await asyncio.to_thread(send, peer.endpoint, *state_of(1))
        assert peer.store.sealed("job") == []


async def test_a_peer_that_is_gone_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerError, match="cannot be reached"):
        await asyncio.to_thread(send, endpoint, *state_of(1))


async def test_a_peer_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerError, match=r"sends nothing|handshake operation timed out"):
            await asyncio.to_thread(send, endpoint, *state_of(1))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "seal", "seal", "give up", "lend", "return"]),
        st.sampled_from([0, 0, 0, 1]),
        st.integers(-1, 2),  # from the newest step to that of the next transfer
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.parametrize("transport", ["plain"], indirect=True)  # nothing is sent
@given(OPERATIONS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_newest_whole_replica_of_a_rank_always_stands(
    tmp_path: Path, operations: list[tuple[str, int, int]]
) -> None:
    asyncio.run(_operate(tmp_path, operations))


async def _operate(folder: Path, operations: list[tuple[str, int, int]]) -> None:
    staging = StagingFolder(folder / "staging", "test", "n1", uuid.uuid4().hex)
    pools = Pools()
    store = ReplicaStore(staging, pools, lambda _: 1, Signal())
    store.reader_wait_s = 0.0
    fillings: dict[int, Filling] = {}
    lent: list[tuple[ReplicaSlot, SealedState]] = []
    newest = {0: 0, 1: 0}

    def stop(rank: int) -> Callable[[], None]:
        return lambda: store.given_up(fillings.pop(rank))

    try:
        for what, rank, ahead in operations:
            if what == "begin":
                step = max(1, newest[rank] + ahead)
                state = SealedState(StateKey("job", rank, 1, step, "d"), 4096, (), {})
                with suppress(SupersededError, NotReadyError):
                    begun = await store.begin(state, 1, stop(rank))
                    if begun is not None:
                        fillings[rank] = begun
            elif what == "lend" and newest[rank]:
                slot = store.lend(StateKey("job", rank, 1, newest[rank], "d"))
                assert slot.state is not None
                lent.append((slot, slot.state))
            elif what == "return" and lent:
                await store.returned(lent.pop()[0])
            elif rank in fillings and what in ("seal", "give up"):
                filling = fillings.pop(rank)
                if what == "seal":
                    store.sealed_now(filling)
                    newest[rank] = filling.state.key.step
                else:
                    store.given_up(filling)
            for number, expected in newest.items():
                found = [key.step for key in store.sealed("job") if key.rank == number]
                assert len(found) <= 2 and max(found, default=0) == expected
            assert all(slot.state is state for slot, state in lent), "what is read is not written"
    finally:
        await store.close()
        pools.close()
        staging.remove()


@pytest.mark.parametrize(
    "change",
    [
        {"slot_bytes": -1},
        {"slot_bytes": 100},
        {"pieces": "many"},
        {"pieces": [[0, 10]]},
        {"pieces": [[-1, 10, "x"]]},
        {"small_state": 3},
        {"key": {"job": "../etc", "rank": 0, "attempt": 1, "step": 1, "layout_digest": "d"}},
        {"key": {"job": "job", "rank": True, "attempt": 1, "step": 1, "layout_digest": "d"}},
        {"key": None},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    good = to_builtins(state_of(1)[0])
    assert to_builtins(read(good, SealedState)) == good
    with pytest.raises(RequestError, match="replica"):
        read({**good, **change}, SealedState)


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 2)), min_size=1, max_size=50),
)
def test_a_bucket_never_lets_more_than_its_rate_through(
    rate: float, asked: list[tuple[int, float]]
) -> None:
    bucket, now_s, sent = TokenBucket(rate, 0.0), 0.0, 0
    for size, pause_s in asked:
        now_s += pause_s
        now_s += bucket.take(size, now_s)
        sent += size
        # What has gone out when the wait is over: the burst, and the rate since the start.
        assert sent <= rate * (BURST_S + now_s) * (1 + 1e-9) + 1e-3


def stranger(endpoint: str) -> socket.socket:
    host, port = endpoint.rsplit(":", 1)
    return socket.create_connection((host, int(port)), CALL_TIMEOUT_S)


def ended(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection; waits for it a while."""
    sock.settimeout(CALL_TIMEOUT_S)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass  # a reset
    return True


async def test_idle_strangers_keep_no_peer_out(tmp_path: Path) -> None:
    """With as many as there are places for peers, and a few more; none of them sends a byte."""
    async with peer_at(tmp_path) as peer:
        with ExitStack() as stack:
            strangers = [
                stack.enter_context(await asyncio.to_thread(stranger, peer.endpoint))
                for _ in range(servers.MAX_CONNECTIONS + 12)
            ]
            for step in (10, 20):
                assert await stored(peer, step) == "kept"
            assert steps(peer) == [(1, 10), (1, 20)]
            assert await asyncio.to_thread(ended, strangers[0]), "it gave way to a later one"


async def test_a_peer_with_streams_that_last_is_not_pushed_out_by_strangers(
    tmp_path: Path,
) -> None:
    state, image = state_of(10)

    def transfer(peer: Peer) -> str:
        with Connection.dial(peer.endpoint, TOKEN, Cancellation()) as first, ExitStack() as stack:
            first.send({"verb": "store", "attempt": 1, "state": state})
            assert first.receive()["verb"] == "go"
            for _ in range(2 * servers.MAX_STRANGERS):
                stack.enter_context(stranger(peer.endpoint))
            first.send({"verb": "pieces", "numbers": [0, 1]})
            first.send_pieces(state, [0, 1], memoryview(image))
            assert first.receive()["verb"] == "have"
            first.send({"verb": "end"})
            return str(first.receive()["verb"])

    async with peer_at(tmp_path) as peer:
        assert await asyncio.to_thread(transfer, peer) == "kept"


async def test_a_caller_has_a_few_seconds_to_say_who_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that sends a byte now and then, which is no silence."""
    monkeypatch.setattr(servers, "HELLO_TIMEOUT_S", 0.3)

    def drip(sock: socket.socket) -> None:
        # The head of a record of TLS, or of a frame, whose length promises more than ever comes.
        head = b"\x16\x03\x01\x02\x00\x01\x00" if presented() else b"MSR2\x00\x10\x00\x00"
        sock.settimeout(0.05)
        until_s = time.monotonic() + CALL_TIMEOUT_S
        for sent in range(1000):
            assert time.monotonic() < until_s, "it may drip as long as it likes"
            try:
                sock.sendall(head[sent : sent + 1] or b"\x00")
                if not sock.recv(1 << 16):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    async with peer_at(tmp_path) as peer:
        with stranger(peer.endpoint) as silent, stranger(peer.endpoint) as dripping:
            await asyncio.to_thread(drip, dripping)
            assert await asyncio.to_thread(ended, silent)


def test_a_bucket_without_a_rate_never_waits() -> None:
    assert TokenBucket(0.0, 0.0).take(1 << 40, 0.0) == 0.0


def test_a_sender_that_is_cancelled_stops_between_two_chunks() -> None:
    state, image = state_of(1)
    cancelled = Cancellation()
    here, there = socket.socketpair()
    with there, Connection(here, cancelled) as connection:
        cancelled.cancel()
        with pytest.raises(ServiceError, match="cancelled"):
            connection.send_pieces(state, [0, 1], memoryview(image), lambda _: 30.0)
