"""The event-loop thread behind the synchronous client."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from megascale_client.client import AsyncClient

STOP_TIMEOUT_S = 5.0

Result = TypeVar("Result")


class LoopThread:
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
