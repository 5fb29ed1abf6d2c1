"""Transfers of replicas over several connections: shares, broken streams, bytes that come late."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_checkpoint_replicas import TOKEN, Peer, peer_at, steps

from megascale_checkpoint.__main__ import _parse
from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas import server as servers
from megascale_checkpoint.replicas import streams
from megascale_checkpoint.replicas.connection import (
    Activity,
    Connection,
    PeerError,
    RefusedError,
)
from megascale_checkpoint.replicas.node_replicas import fetch
from megascale_checkpoint.replicas.protocol import PieceBytes, SealedState, StateKey
from megascale_checkpoint.replicas.server import Arrival
from megascale_checkpoint.replicas.streams import MOST_BREAKS, Shares, Streams, batches
from megascale_common.service.errors import NotFoundError, SupersededError

PIECE, COUNT = 64 << 10, 12
SLOT_BYTES = PIECE * COUNT
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LEAST_BATCH_BYTES", PIECE)


def state_of(step: int = 1) -> tuple[SealedState, bytearray]:
    image = bytearray(bytes(range(step, step + 128)) * (SLOT_BYTES // 128))
    pieces = tuple(
        PieceBytes(at, PIECE, checksum(memoryview(image)[at : at + PIECE]))
        for at in range(0, SLOT_BYTES, PIECE)
    )
    return SealedState(StateKey("job", 0, 1, step, "digest"), SLOT_BYTES, pieces, {}), image


class Moves:
    """Stands for connections: which batches each of them moved, and what breaks."""

    def __init__(self, breaking: Sequence[Exception] = ()) -> None:
        self.breaking, self.lock = list(breaking), threading.Lock()
        self.moved: list[int] = []
        self.dialled = 0

    def connection(self) -> Connection:
        here, self.there = socket.socketpair()
        return Connection(here, Cancellation())

    def dial(self) -> Connection:
        with self.lock:
            self.dialled += 1
        return self.connection()

    def move(self, connection: Connection, numbers: Sequence[int]) -> None:
        with self.lock:
            if self.breaking and connection is not self.first:
                raise self.breaking.pop()
            self.moved += numbers

    def run(self, shares: Shares) -> None:
        how = (Activity(), Cancellation(), self.dial, lambda _: None, self.move)
        self.first = self.connection()
        with self.first:
            Streams(shares, *how).run(self.first)


def test_every_piece_is_in_one_batch_and_large_ones_go_first() -> None:
    state, _ = state_of()
    found = batches(state, 2)
    assert sorted(number for batch in found for number in batch) == list(range(COUNT))
    sizes = [sum(state.pieces[n].size_bytes for n in batch) for batch in found]
    assert sizes == sorted(sizes, reverse=True)
    assert Shares(state, 99).streams == len(found), "no stream without work"
    assert Shares(SealedState(state.key, 0, (), {}), 4).streams == 1


def test_what_a_broken_stream_had_taken_is_moved_by_another() -> None:
    state, _ = state_of()
    moves = Moves([PeerError("it broke")] * MOST_BREAKS)
    moves.run(Shares(state, 3))
    assert sorted(moves.moved) == list(range(COUNT))


def test_streams_that_break_too_often_end_the_transfer() -> None:
    state, _ = state_of()
    moves = Moves([PeerError("it broke")] * (MOST_BREAKS + 1))

    def slow(connection: Connection, numbers: Sequence[int]) -> None:
        moves_on.wait(WAIT_S) if connection is moves.first else None
        Moves.move(moves, connection, numbers)

    moves_on, shares = threading.Event(), Shares(state, 3)
    moves.move = slow  # type: ignore[method-assign]
    ended = shares._end

    def end(again: Any, failure: Exception | None) -> None:
        ended(again, failure)
        if failure is not None:
            moves_on.set()

    shares._end = end  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="it broke"):
        moves.run(shares)


@pytest.mark.parametrize("error", [RefusedError("no"), SupersededError("cancelled")])
def test_what_no_other_stream_could_move_ends_the_transfer(error: Exception) -> None:
    state, _ = state_of()
    shares = Shares(state, 2)
    batch = shares.take()
    assert batch is not None
    shares.failed(error)
    with pytest.raises(type(error)):
        Moves().run(shares)


def dial(peer: Peer) -> Connection:
    return Connection.dial(peer.endpoint, TOKEN, Cancellation())


def begin(peer: Peer, state: SealedState) -> tuple[Connection, str]:
    first = dial(peer)
    first.send({"verb": "store", "attempt": 1, "state": state})
    reply = first.receive()
    assert reply["verb"] == "go"
    return first, reply["transfer"]


def join(peer: Peer, transfer: str) -> Connection:
    stream = dial(peer)
    stream.send({"verb": "join", "transfer": transfer})
    assert stream.receive() == {"verb": "go"}
    return stream


def put(stream: Connection, state: SealedState, image: bytearray, numbers: list[int]) -> Any:
    stream.send({"verb": "pieces", "numbers": numbers})
    stream.send_pieces(state, numbers, memoryview(image))
    return stream.receive()


async def assert_fetched(peer: Peer, state: SealedState, image: bytearray) -> None:
    into = memoryview(bytearray(SLOT_BYTES))
    how = (peer.endpoint, TOKEN, state.key, into, Cancellation(), 3)
    assert await asyncio.to_thread(fetch, *how) == state
    assert into == image


async def test_what_a_broken_stream_still_sends_is_not_written_over_what_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum would have been compared before: the replica would be damaged, and kept."""
    state, image = state_of()
    claimed, claim = threading.Event(), Arrival._claim

    def watched(arrival: Arrival, stream: Connection, numbers: set[int]) -> None:
        claim(arrival, stream, numbers)
        claimed.set()

    monkeypatch.setattr(Arrival, "_claim", watched)

    def transfer(peer: Peer) -> str:
        first, name = begin(peer, state)
        with first, join(peer, name) as broken, join(peer, name) as other:
            broken.send({"verb": "pieces", "numbers": [1]})
            broken._send(memoryview(bytes(PIECE // 2)))  # zeros: not what was sealed
            assert claimed.wait(WAIT_S)
            assert put(other, state, image, [1, 2]) == {"verb": "have"}
            with pytest.raises(PeerError):
                broken._send(memoryview(bytes(PIECE // 2)))
                broken.receive()
            rest = [number for number in range(COUNT) if number not in (1, 2)]
            assert put(first, state, image, rest) == {"verb": "have"}
            first.send({"verb": "end"})
            return str(first.receive()["verb"])

    async with peer_at(tmp_path) as peer:
        assert await asyncio.to_thread(transfer, peer) == "kept"
        await assert_fetched(peer, state, image)


async def test_a_stream_that_comes_behind_the_end_of_a_transfer_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request lay unread while another stream moved the same pieces to the end."""
    state, image = state_of()
    waiting, ended, late = threading.Event(), threading.Event(), [True]
    claim, close = Arrival._claim, Arrival._close

    def claim_late(arrival: Arrival, stream: Connection, numbers: set[int]) -> None:
        if late:
            late.clear()
            waiting.set()
            assert ended.wait(WAIT_S)
        claim(arrival, stream, numbers)

    def end(arrival: Arrival) -> None:
        arrival._closed = True
        ended.set()
        close(arrival)

    monkeypatch.setattr(Arrival, "_claim", claim_late)
    monkeypatch.setattr(Arrival, "_close", end)

    def transfer(peer: Peer) -> str:
        first, name = begin(peer, state)
        with first, join(peer, name) as broken:
            broken.send({"verb": "pieces", "numbers": [1]})
            broken._send(memoryview(bytes(PIECE // 2)))  # zeros: not what was sealed
            assert waiting.wait(WAIT_S)
            assert put(first, state, image, list(range(COUNT))) == {"verb": "have"}
            first.send({"verb": "end"})
            return str(first.receive()["verb"])

    async with peer_at(tmp_path) as peer:
        assert await asyncio.to_thread(transfer, peer) == "kept"
        await assert_fetched(peer, state, image)


def test_a_frame_with_a_flipped_bit_is_refused() -> None:
    """A flipped offset would put a piece in another place, with its own checksum."""
    here, there = socket.socketpair()
    with Connection(here, Cancellation()) as sender:
        sender.send({"verb": "pieces", "numbers": [10]})
    frame = bytearray(there.recv(1 << 10))
    for at in range(frame.index(b"{"), len(frame)):
        near, far = socket.socketpair()
        with Connection(near, Cancellation()) as receiver, far:
            far.sendall(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :])
            with pytest.raises(PeerError, match="not what was sent"):
                receiver.receive()
    there.close()


async def test_a_state_of_which_pieces_are_missing_is_no_replica(tmp_path: Path) -> None:
    state, image = state_of()

    def transfer(peer: Peer) -> str:
        first, _ = begin(peer, state)
        with first:
            assert put(first, state, image, [0, 1]) == {"verb": "have"}
            first.send({"verb": "end"})
            return str(first.receive().get("error"))

    async with peer_at(tmp_path) as peer:
        assert "10 pieces have not arrived" in await asyncio.to_thread(transfer, peer)
        assert steps(peer) == []


async def test_a_stream_of_no_transfer_is_refused(tmp_path: Path) -> None:
    def ask(peer: Peer) -> str:
        with dial(peer) as stream:
            stream.send({"verb": "join", "transfer": "of another time"})
            return str(stream.receive()["error"])

    async with peer_at(tmp_path) as peer:
        assert "no replica arrives here" in await asyncio.to_thread(ask, peer)


async def test_a_peer_that_makes_room_asks_for_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of gigabytes take longer to clear than a silent peer is waited for."""
    monkeypatch.setattr(servers, "PATIENCE_S", 0.01)
    asked, populate = threading.Event(), StagingFolder.populate

    def slowly(self: StagingFolder, *arguments: Any) -> None:
        asked.wait(WAIT_S)
        populate(self, *arguments)

    monkeypatch.setattr(StagingFolder, "populate", slowly)

    def transfer(peer: Peer) -> None:
        for step in (1, 2):  # the second replica is populated when it comes
            state, image = state_of(step)
            with dial(peer) as first:
                first.send({"verb": "store", "attempt": 1, "state": state})
                while (reply := first.receive())["verb"] == "wait":
                    asked.set()
                assert put(first, state, image, list(range(COUNT))) == {"verb": "have"}
                first.send({"verb": "end"})
                assert first.receive() == {"verb": "kept"}, reply

    async with peer_at(tmp_path) as peer:
        await asyncio.to_thread(transfer, peer)
        assert asked.is_set() and steps(peer) == [(1, 1), (1, 2)]


class Relay:
    """Passes connections on to a peer, and cuts the first ones after some bytes of an answer."""

    def __init__(self, target: str, cut: int) -> None:
        self.target, self.cut, self.taken = target, cut, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        host, _, port = self.target.rpartition(":")
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.taken += 1
            most = PIECE // 2 if 1 < self.taken <= 1 + self.cut else 1 << 40
            far = socket.create_connection((host, int(port)))
            for source, sink, limit in ((near, far, 1 << 40), (far, near, most)):
                how = (source, sink, limit)
                threading.Thread(target=self._pass, args=how, daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, limit: int) -> None:
        try:
            while limit > 0 and (data := source.recv(min(limit, 1 << 14))):
                sink.sendall(data)
                limit -= len(data)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


async def test_a_fetch_goes_on_when_further_streams_are_cut(tmp_path: Path) -> None:
    state, image = state_of()

    def store(peer: Peer) -> None:
        first, _ = begin(peer, state)
        with first:
            assert put(first, state, image, list(range(COUNT))) == {"verb": "have"}
            first.send({"verb": "end"})
            assert first.receive() == {"verb": "kept"}

    async with peer_at(tmp_path) as peer:
        await asyncio.to_thread(store, peer)
        relay = Relay(peer.endpoint, cut=2)
        into = memoryview(bytearray(SLOT_BYTES))
        how = (relay.endpoint, TOKEN, state.key, into, Cancellation(), 3)
        assert await asyncio.to_thread(fetch, *how) == state
        assert into == image
        relay.listener.close()
        with pytest.raises(NotFoundError):
            gone = StateKey("job", 0, 1, 9, "digest")
            await asyncio.to_thread(fetch, peer.endpoint, TOKEN, gone, into, Cancellation(), 3)


@pytest.mark.parametrize("text", ["0", "17", "four"])
def test_the_number_of_streams_is_bounded(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    required = "--cluster c --node n --incarnation i --run-folder r --socket s --token-file t"
    with pytest.raises(SystemExit):
        _parse([*required.split(), "--address-file", "a", "--replica-streams", text])
    assert f"{text!r} is not a number of 1 to 16" in capsys.readouterr().err
