"""A Service of Kubernetes for tests: each connection goes to one of its ready pods, by chance."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

from megascale_common.node.addresses import split


class Service:
    """Forwards connections; ``pods`` gives the host:port of those that are ready."""

    def __init__(self, pods: Callable[[], list[str]]) -> None:
        self._pods = pods
        self.address = ""
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen on a port of loopback."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            there, to_there = await asyncio.open_connection(*split(random.choice(self._pods())))
            try:
                both = (_pump(reader, to_there), _pump(there, writer))
                await asyncio.gather(*both)
            finally:
                to_there.close()
        except (OSError, IndexError, asyncio.CancelledError):
            pass  # no pod, or one that has ended: the client sees a broken connection
        finally:
            self._connections.discard(task)
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    raise ConnectionError("closed by one side")  # which closes the other
