"""The synchronous client for scripts and notebooks, with the methods of :class:`AsyncClient`.

    with Client.from_run_folder("runs/current") as client:
        client.submit(load_job("job.yaml"))
        for update in client.watch("example"):
            ...

Its methods have the arguments, types and docstrings of those of the asynchronous client and no
logic of their own: each call runs on an :class:`AsyncClient` in a private event-loop thread. So it
works where the caller's own thread runs a loop (a notebook) and from several threads at once, and
Ctrl-C stops the call in progress. An iterator that is left early (``break``, ``close()``, Ctrl-C)
ends its stream at the driver.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import GenericAlias, TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args, get_type_hints

from megascale_client.client import DEFAULT_RETRY_FOR_S, DEFAULT_TIMEOUT_S, AsyncClient

Given = ParamSpec("Given")
Result = TypeVar("Result")

STOP_TIMEOUT_S = 5.0


class LoopThread:
    """An event loop on its own thread, which runs a coroutine or iterates asynchronously.

    Note [Loop thread]: three things have to end well. A call whose caller is interrupted is
    cancelled on the loop, or it would continue unseen. An iterator that is left early is closed on
    the loop, where its stream lives; the garbage collector can do that in any thread, even in the
    loop's own, which must not wait for itself. And no call is handed to a loop that has ended, or
    that a fork has left without its thread: it would never be answered, hence the lock.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        # Held while a call is handed over. Reentrant, because the garbage collector can run at any
        # point in this thread and end an iterator, which takes the lock again.
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
            return future.result()  # Ctrl-C raises here, in the caller's thread
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
        # See Note [Loop thread].
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


def _call(
    method: Callable[Concatenate[AsyncClient, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client, Given], Result]:
    """The same call, which returns when it is done."""

    @functools.wraps(method)
    def call(self: Client, /, *arguments: Given.args, **named: Given.kwargs) -> Result:
        return self._loop.run(method(self._client, *arguments, **named))

    return call


def _stream(
    method: Callable[Concatenate[AsyncClient, Given], AsyncIterator[Result]],
) -> Callable[Concatenate[Client, Given], Iterator[Result]]:
    """The same call; each item is fetched when the caller takes it."""

    @functools.wraps(method)
    def stream(self: Client, /, *arguments: Given.args, **named: Given.kwargs) -> Iterator[Result]:
        return self._loop.iterate(method(self._client, *arguments, **named))

    hints = get_type_hints(method)
    returned = GenericAlias(Iterator, get_args(hints["return"]))
    stream.__annotations__ = {**hints, "return": returned}
    # The signature that help() shows.
    vars(stream)["__signature__"] = inspect.signature(method).replace(return_annotation=returned)
    return stream


class Client:
    """A connection to one cluster; arguments and errors are those of :class:`AsyncClient`."""

    def __init__(
        self,
        address: str | Callable[[], str],
        token: str,
        *,
        root_certificate: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_for_s: float = DEFAULT_RETRY_FOR_S,
    ) -> None:
        self._drive(
            AsyncClient(
                address,
                token,
                root_certificate=root_certificate,
                certificate=certificate,
                key=key,
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
        self._loop = LoopThread(client)

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

    submit = _call(AsyncClient.submit)
    get = _call(AsyncClient.get)
    jobs = _stream(AsyncClient.jobs)
    watch = _stream(AsyncClient.watch)
    wait = _call(AsyncClient.wait)
    profile = _call(AsyncClient.profile)
    profiled = _call(AsyncClient.profiled)
    cancel_profile = _call(AsyncClient.cancel_profile)
    explain = _call(AsyncClient.explain)
    heat_map = _call(AsyncClient.heat_map)
    topology = _call(AsyncClient.topology)
    mfu_decline = _call(AsyncClient.mfu_decline)
    timeline = _stream(AsyncClient.timeline)
    nodes = _stream(AsyncClient.nodes)
    diagnose = _call(AsyncClient.diagnose)
    events = _stream(AsyncClient.events)
    watch_events = _stream(AsyncClient.watch_events)
    logs = _stream(AsyncClient.logs)
    checkpoints = _stream(AsyncClient.checkpoints)
    fetch_checkpoint = _call(AsyncClient.fetch_checkpoint)
    cluster_info = _call(AsyncClient.cluster_info)
    cancel = _call(AsyncClient.cancel)
    suspend = _call(AsyncClient.suspend)
    resume = _call(AsyncClient.resume)
    delete = _call(AsyncClient.delete)
    restart = _call(AsyncClient.restart)
    update = _call(AsyncClient.update)
    evict = _call(AsyncClient.evict)
    cordon = _call(AsyncClient.cordon)
    uncordon = _call(AsyncClient.uncordon)
    report_unreachable = _call(AsyncClient.report_unreachable)
    drain = _call(AsyncClient.drain)
    set_policy = _call(AsyncClient.set_policy)
    set_quota = _call(AsyncClient.set_quota)
    reset_breaker = _call(AsyncClient.reset_breaker)
