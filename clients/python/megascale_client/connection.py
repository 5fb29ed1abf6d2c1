"""One logical connection to the leading driver: token, bounded retries, leader hints, addresses.

Every call of DriverService may be repeated: reads change nothing, and a mutation carries a request
id for which the driver returns the same answer again. So UNAVAILABLE is retried until
``retry_for_s`` has passed, at the address that a standby named as the leader's, or at the one that
the run folder holds by then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from megascale.v1 import driver_pb2
from megascale_client.errors import (
    CallFailed,
    ClusterNotFound,
    MegascaleError,
    NotAllowed,
    Unavailable,
    from_rpc,
)

if TYPE_CHECKING:  # loaded by the first connection: it would be a fifth of `megascale --help`
    import grpc.aio

FOLDER, CA_FILE = "tls", "ca.pem"  # in a run folder whose cluster has an authority
# Another identity than the operator of the run folder, such as a viewer's.
CERTIFICATE_VARIABLE, KEY_VARIABLE = "MEGASCALE_TLS_CERTIFICATE", "MEGASCALE_TLS_KEY"
_OPERATOR = "operator-operator"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The authority that is trusted and, where it asks for one, the client's own certificate."""

    root_certificate: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel connects with, from the files as they are now.

        Raises:
            NotAllowed: one of them cannot be read.
        """
        try:
            root = self.root_certificate.read_bytes()
            key = self.key.read_bytes() if self.key is not None else None
            chain = self.certificate.read_bytes() if self.certificate is not None else None
        except OSError as error:
            raise NotAllowed(
                f"{error.filename} cannot be read ({error.strerror}): give PEM files that this "
                f"user may read, in ${CERTIFICATE_VARIABLE} and ${KEY_VARIABLE} or as arguments"
            ) from None
        import grpc

        return grpc.ssl_channel_credentials(root, key, chain)


def given(
    root_certificate: Path | None, certificate: Path | None, key: Path | None
) -> TlsFiles | None:
    """The files as arguments.

    Raises:
        ValueError: a certificate without its key or without an authority, or the other way round.
    """
    if (certificate is None) != (key is None) or (certificate and not root_certificate):
        raise ValueError("give certificate and key together, and root_certificate with them")
    return TlsFiles(root_certificate, certificate, key) if root_certificate is not None else None


def of_run_folder(folder: Path) -> TlsFiles | None:
    """The files for the cluster of a run folder; None where its connections are not encrypted."""
    own = folder / FOLDER
    if not (own / CA_FILE).exists():
        return None
    certificate = os.environ.get(CERTIFICATE_VARIABLE) or own / f"{_OPERATOR}.pem"
    key = os.environ.get(KEY_VARIABLE) or own / f"{_OPERATOR}.key"
    return TlsFiles(own / CA_FILE, Path(certificate), Path(key))


FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
# A hint is followed without a wait, so two standbys that name each other would make a busy loop.
MAX_HINTS_IN_A_ROW = 3
MAX_MESSAGE_BYTES = 4 << 20
# With an answer, what the driver says about it: that it does not lead, and how old it is.
NOTE_KEY = "megascale-note"

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A watch may be silent for a long time; pings detect that its driver's host is gone.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, this limits how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A cluster is reached directly, whatever proxies the environment names.
    ("grpc.enable_http_proxy", 0),
]
# CANCELLED comes from a driver that stops and ends its streams. Our own cancellation arrives as an
# exception and not as a status.
_RETRIED = ("UNAVAILABLE", "CANCELLED")

Answer = TypeVar("Answer", bound=Message)
Page = TypeVar(
    "Page",
    driver_pb2.ListJobsResponse,
    driver_pb2.ListNodesResponse,
    driver_pb2.ListEventsResponse,
    driver_pb2.ListCheckpointsResponse,
)


class RetryTimer:
    """Waits between retries, doubling with jitter, until ``retry_for_s`` has passed."""

    def __init__(self, retry_for_s: float) -> None:
        self._retry_for_s = retry_for_s
        self._random = random.Random()
        self.reset()

    def reset(self) -> None:
        """Start over, after a success."""
        self._until_s: float | None = None
        self._next_s = FIRST_WAIT_S

    async def wait(self) -> bool:
        """Wait once; returns False, without a wait, when the time allowed has passed."""
        now = asyncio.get_running_loop().time()
        self._until_s = now + self._retry_for_s if self._until_s is None else self._until_s
        if now >= self._until_s:
            return False
        await asyncio.sleep(min(self._next_s * self._random.uniform(0.5, 1.0), self._until_s - now))
        self._next_s = min(self._next_s * 2, LONGEST_WAIT_S)
        return True


class Connection:
    """Calls of DriverService, on whichever driver leads."""

    def __init__(
        self,
        address: Callable[[], str],
        token: str,
        *,
        tls: TlsFiles | None,
        timeout_s: float,
        retry_for_s: float,
    ) -> None:
        # When none answers: what is down, and the remedy.
        self.fate: Callable[[], tuple[str, str]] = lambda: (
            "the cluster is down",
            "is a driver of the cluster running there?",
        )
        # Before the first answer: an error that makes repeating a call useless. Later a call is
        # repeated in any case, because a watch is to survive a restart of the whole cluster.
        self.ended: Callable[[], MegascaleError | None] = lambda: None
        self._answered = False
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._tls = tls
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._hint = ""
        self._hints_in_a_row = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.notes: list[str] = []  # of the newest answer

    async def unary(
        self, method: str, request: Message, answer: type[Answer], *, timeout_s: float | None = None
    ) -> Answer:
        """One call with retries.

        Args:
            answer: type of the answer.
            timeout_s: limit for a call that takes longer than the connection's default.

        Raises:
            MegascaleError: see :mod:`megascale_client.errors`.
        """
        retry = RetryTimer(self._retry_for_s)
        while True:
            try:
                with _failures():
                    call = self._call(method)(
                        request, metadata=self._metadata, timeout=timeout_s or self._timeout_s
                    )
                    result = await call
                    said = await call.trailing_metadata() or ()
                self.notes[:] = [str(value) for key, value in said if key == NOTE_KEY]
            except (CallFailed, ClusterNotFound) as error:
                await self.recover(error, retry)
                continue
            self._note_answer()
            assert isinstance(result, answer)
            return result

    async def pages(self, method: str, request: Any, answer: type[Page]) -> AsyncIterator[Page]:
        """The pages of a list, each fetched when the caller takes it."""
        while True:
            page = await self.unary(method, request, answer)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    async def stream(
        self, method: str, request: Message, answer: type[Answer]
    ) -> AsyncIterator[Answer]:
        """One streaming call, without retries: only the caller can resume where it was.

        Raises:
            CallFailed, ClusterNotFound: to be passed to :meth:`recover`.
        """
        call = self._call(method)(request, metadata=self._metadata)
        try:
            with _failures():
                async for result in call:
                    self._note_answer()
                    assert isinstance(result, answer)
                    yield result
        finally:
            call.cancel()

    async def stream_once(
        self, method: str, request: Message, answer: type[Answer], retry: RetryTimer
    ) -> AsyncIterator[Answer]:
        """One streaming call that cannot be resumed: retried until its first answer has arrived."""
        begun = False
        while True:
            try:
                async for result in self.stream(method, request, answer):
                    begun = True
                    yield result
                return
            except (CallFailed, ClusterNotFound) as error:
                if isinstance(error, CallFailed) and error.details.from_a_node:
                    raise from_rpc(error) from None
                await self.recover(error, RetryTimer(0) if begun else retry)

    async def recover(self, error: CallFailed | MegascaleError, retry: RetryTimer) -> None:
        """After a failed call: return when it can be repeated, else raise the matching error."""
        if isinstance(error, CallFailed) and error.code not in _RETRIED:
            raise from_rpc(error) from None
        if not self._answered and not _is_of_a_driver(error):
            gone = self.ended()
            if gone is not None:
                raise gone from None
        if isinstance(error, MegascaleError):
            if not await retry.wait():
                raise error
            return
        # A hint is followed at once. Without one, or after too many, the next call goes to the
        # address of the run folder, after a wait.
        leader = error.details.leader
        self._hint = leader if self._hints_in_a_row < MAX_HINTS_IN_A_ROW else ""
        if self._hint:
            self._hints_in_a_row += 1
            return
        self._hints_in_a_row = 0
        if not await retry.wait():
            raise self._unavailable(from_rpc(error)) from None

    def _note_answer(self) -> None:
        self._answered = True
        self._hints_in_a_row = 0

    def _unavailable(self, cause: MegascaleError) -> Unavailable:
        if cause.reason == "NODE_UNREACHABLE":
            return Unavailable(str(cause), reason=cause.reason)
        tried = ", ".join(self._channels) or "any address"
        missing = f"no driver answered within {self._retry_for_s:g} s at {tried}"
        if cause.reason:  # a driver answered, and cannot serve the call
            return Unavailable(f"{missing}: {cause}", reason=cause.reason)
        what, remedy = self.fate()
        return Unavailable(f"{what}: {missing}; {remedy}")

    async def close(self) -> None:
        """Close every channel."""
        channels = self._channels
        self._channels = {}
        for channel in channels.values():
            await channel.close()

    def _call(self, method: str) -> Any:
        from megascale.v1 import driver_pb2_grpc

        address = self._hint or self._address()
        if address not in self._channels:
            self._channels[address] = self._open(address)
        return getattr(driver_pb2_grpc.DriverServiceStub(self._channels[address]), method)

    def _open(self, address: str) -> grpc.aio.Channel:
        import grpc.aio

        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._tls.credentials(), options=_OPTIONS)


def _is_of_a_driver(error: CallFailed | MegascaleError) -> bool:
    """Whether a driver answered, if only that it cannot serve the call."""
    return isinstance(error, CallFailed) and bool(error.details.reason or error.details.leader)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raises a failed call as CallFailed."""
    import grpc.aio

    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CallFailed(error) from error
