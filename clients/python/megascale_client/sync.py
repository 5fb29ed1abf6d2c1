"""The synchronous client for scripts and notebooks, with the methods of :class:`AsyncClient`.

    with Client.from_run_folder("runs/current") as client:
        client.submit(load_job("job.yaml"))
        for update in client.watch("example"):
            ...

Its methods are generated from those of the asynchronous client and have no logic of their own: each
call runs on an :class:`AsyncClient` in a private event-loop thread. So it works where the caller's
own thread runs a loop (a notebook) and from several threads at once, and Ctrl-C stops the call in
progress. An iterator that is left early (``break``, ``close()``, Ctrl-C) ends its stream at the
driver.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client.client import DEFAULT_RETRY_FOR_S, DEFAULT_TIMEOUT_S, AsyncClient
from megascale_client.fetch import FetchedCheckpoint, Progress

STOP_TIMEOUT_S = 5.0

Result = TypeVar("Result")


class Client:
    """A connection to one cluster; arguments and errors are those of :class:`AsyncClient`."""

    def __init__(
        self,
        address: str | Callable[[], str],
        token: str,
        *,
        root_certificate: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_for_s: float = DEFAULT_RETRY_FOR_S,
    ) -> None:
        self._drive(
            AsyncClient(
                address,
                token,
                root_certificate=root_certificate,
                timeout_s=timeout_s,
                retry_for_s=retry_for_s,
            )
        )

    @classmethod
    def from_run_folder(
        cls, folder: str | Path | None = None, *, retry_for_s: float = DEFAULT_RETRY_FOR_S
    ) -> Client:
        """See :meth:`AsyncClient.from_run_folder`."""
        client = cls.__new__(cls)
        client._drive(AsyncClient.from_run_folder(folder, retry_for_s=retry_for_s))
        return client

    def _drive(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = _LoopThread(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread.

        Calls in progress in other threads raise RuntimeError.
        """
        self._loop.stop()

    # Begin of the generated part: change AsyncClient, then run `make docs`.

    def submit(self, spec: job_pb2.JobSpec, *, validate_only: bool = False) -> driver_pb2.Job:
        """See :meth:`AsyncClient.submit`."""
        return self._loop.run(self._client.submit(spec, validate_only=validate_only))

    def get(self, name: str) -> driver_pb2.Job:
        """See :meth:`AsyncClient.get`."""
        return self._loop.run(self._client.get(name))

    def jobs(self) -> Iterator[driver_pb2.Job]:
        """See :meth:`AsyncClient.jobs`."""
        return self._loop.iterate(self._client.jobs())

    def watch(self, name: str, *, resume_token: str = "") -> Iterator[driver_pb2.WatchJobResponse]:
        """See :meth:`AsyncClient.watch`."""
        return self._loop.iterate(self._client.watch(name, resume_token=resume_token))

    def cancel(self, name: str, *, reason: str) -> driver_pb2.Job:
        """See :meth:`AsyncClient.cancel`."""
        return self._loop.run(self._client.cancel(name, reason=reason))

    def profile(
        self,
        name: str,
        *,
        steps: int,
        first_step: int = 0,
        ranks: Sequence[int] = (),
        reason: str = "",
    ) -> driver_pb2.Profile:
        """See :meth:`AsyncClient.profile`."""
        return self._loop.run(
            self._client.profile(
                name, steps=steps, first_step=first_step, ranks=ranks, reason=reason
            )
        )

    def profiled(self, name: str, profile_id: str) -> driver_pb2.Profile:
        """See :meth:`AsyncClient.profiled`."""
        return self._loop.run(self._client.profiled(name, profile_id))

    def explain(self, name: str) -> driver_pb2.ExplainJobResponse:
        """See :meth:`AsyncClient.explain`."""
        return self._loop.run(self._client.explain(name))

    def nodes(self) -> Iterator[driver_pb2.Node]:
        """See :meth:`AsyncClient.nodes`."""
        return self._loop.iterate(self._client.nodes())

    def evict(
        self, node: str, *, reason: str, validate_only: bool = False
    ) -> driver_pb2.EvictNodeResponse:
        """See :meth:`AsyncClient.evict`."""
        return self._loop.run(self._client.evict(node, reason=reason, validate_only=validate_only))

    def cordon(
        self, node: str, *, reason: str, validate_only: bool = False
    ) -> driver_pb2.CordonNodeResponse:
        """See :meth:`AsyncClient.cordon`."""
        return self._loop.run(self._client.cordon(node, reason=reason, validate_only=validate_only))

    def uncordon(
        self, node: str, *, reason: str, validate_only: bool = False
    ) -> driver_pb2.UncordonNodeResponse:
        """See :meth:`AsyncClient.uncordon`."""
        return self._loop.run(
            self._client.uncordon(node, reason=reason, validate_only=validate_only)
        )

    def diagnose(self, node: str, *, checks: Sequence[str] = ()) -> list[types_pb2.CheckResult]:
        """See :meth:`AsyncClient.diagnose`."""
        return self._loop.run(self._client.diagnose(node, checks=checks))

    def events(self, subject: str = "") -> Iterator[types_pb2.Event]:
        """See :meth:`AsyncClient.events`."""
        return self._loop.iterate(self._client.events(subject))

    def watch_events(
        self, subject: str = "", *, resume_token: str = ""
    ) -> Iterator[driver_pb2.WatchEventsResponse]:
        """See :meth:`AsyncClient.watch_events`."""
        return self._loop.iterate(self._client.watch_events(subject, resume_token=resume_token))

    def logs(
        self, job: str, *, rank: int, attempt: int = 0, lines: int = 100, follow: bool = False
    ) -> Iterator[str]:
        """See :meth:`AsyncClient.logs`."""
        return self._loop.iterate(
            self._client.logs(job, rank=rank, attempt=attempt, lines=lines, follow=follow)
        )

    def checkpoints(self, job: str) -> Iterator[driver_pb2.Checkpoint]:
        """See :meth:`AsyncClient.checkpoints`."""
        return self._loop.iterate(self._client.checkpoints(job))

    def fetch_checkpoint(
        self, job: str, step: int | None = None, *, to: str | Path, progress: Progress | None = None
    ) -> FetchedCheckpoint:
        """See :meth:`AsyncClient.fetch_checkpoint`."""
        return self._loop.run(self._client.fetch_checkpoint(job, step, to=to, progress=progress))

    def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        """See :meth:`AsyncClient.cluster_info`."""
        return self._loop.run(self._client.cluster_info())

    # End of the generated part.


class _LoopThread:
    """An event loop on its own thread, which runs a coroutine or iterates asynchronously."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        # Held while a call is handed over, so none is handed to a loop that has ended and would
        # never answer. Reentrant, because the garbage collector may run at any point in this thread
        # and end an iterator, which takes the lock again.
        self._lock = threading.RLock()
        self._open = True
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="megascale-client", daemon=True
        )
        self._thread.start()
        # Before the interpreter freezes the thread at its own end: an iterator that is collected
        # after that must not wait for it.
        atexit.register(self.stop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result; if the caller is interrupted, the coroutine is cancelled."""
        future = self._hand_over(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("this Client was closed while the call was in progress") from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncIterator[Result]) -> Iterator[Result]:
        """The items of ``source``, each fetched when the caller takes the next one."""
        assert isinstance(source, AsyncGenerator)
        try:
            while item := self.run(_next(source)):
                yield item[0]
        finally:
            self._abandon(source)

    def stop(self) -> None:
        """Cancel calls in progress, close the client and end the thread."""
        atexit.unregister(self.stop)
        with self._lock:
            if not self._usable:
                return
            self._open = False
            ending = asyncio.run_coroutine_threadsafe(_end(self._client), self._loop)
        try:
            ending.result(STOP_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()

    @property
    def _usable(self) -> bool:
        # A forked child has a copy of the loop, but not the thread that runs it.
        return self._open and self._process == os.getpid()

    def _hand_over(
        self, coroutine: Coroutine[Any, Any, Result]
    ) -> concurrent.futures.Future[Result]:
        with self._lock:
            if self._usable:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError("this Client is closed, or was made before a fork: create a new one")

    def _abandon(self, source: AsyncGenerator[Any, None]) -> None:
        """End an iterator that was left early, and with it its stream at the driver."""
        # The garbage collector may run on the loop's own thread, which must not wait for itself.
        if threading.current_thread() is self._thread:
            self._loop.create_task(_finish(source))
            return
        try:
            self.run(_finish(source))
        except RuntimeError:  # closed: the end of the loop has ended the iterator
            return


async def _next(source: AsyncGenerator[Result, None]) -> tuple[Result] | None:
    try:
        return (await anext(source),)
    except StopAsyncIteration:
        return None


async def _finish(source: AsyncGenerator[Any, None]) -> None:
    await source.aclose()


async def _end(client: AsyncClient) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    # Before the channel closes: calls would take that for a driver that stops, and would retry.
    await asyncio.gather(*others, return_exceptions=True)
    await client.close()
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
