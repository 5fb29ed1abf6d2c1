"""Runs the checkpoint daemon in its own container, for an agent in another container of the pod.

``python -m megascale_checkpoint.serve.sidecar --socket PATH --tls-key ... ``

The agent's side (:mod:`megascale_executor.agent.checks.remote_daemon`) connects to the socket, in a
folder that both containers share, and sends the daemon's options. The daemon lives as long as that
connection, so it ends with the agent, just as a child process of the agent would. Certificates are
given here, so the agent's container, where a team's code runs, needs none.

Framed messages: from the agent ``start`` (options) and ``signal`` (number), to the agent ``ended``
(status, as a parent sees it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from megascale_common.node import framing
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death, child_environment
from megascale_common.node.unix_sockets import listen
from megascale_common.service import logs
from megascale_common.service.errors import OptionError
from megascale_common.service.identity import certificates
from megascale_common.service.start import ends_with_a_sentence

STOP_TIMEOUT_S = 10.0  # for the daemon to finish what it persists
HELLO_TIMEOUT_S = 10.0  # for an agent to send the daemon's options
MAX_CONNECTIONS = 16  # that wait; there is one agent, but connections of earlier ones may remain
_READ_BYTES = 65536
_log = logs.get("sidecar")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m megascale_checkpoint.serve.sidecar",
        description="Run the checkpoint daemon for an agent in another container of this pod.",
    )
    made.add_argument(
        "--socket", type=Path, required=True, help="unix socket for the agent, in a shared folder"
    )
    certificates.add_options(made)
    return made


def main() -> None:
    """Serve until SIGTERM or SIGINT; exit status 0 then, 2 for an option that cannot work."""
    if PARENT_PID_VARIABLE in os.environ:
        arm_parent_death()
    options = parser().parse_args()
    logs.configure("sidecar")
    with ends_with_a_sentence("megascale checkpoint sidecar"):
        tls = certificates.of_options(options)
        asyncio.run(Sidecar(options.socket, tls.options() if tls is not None else []).run())


class Sidecar:
    """One daemon at a time; a connection that comes while one runs waits for its end."""

    def __init__(self, path: Path, extra: list[str]) -> None:
        self._path = path
        self._extra = extra
        self._busy = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, and stop the daemon then."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        try:
            listener = listen(self._path, "sidecar", MAX_CONNECTIONS)
            server = await asyncio.start_unix_server(self._serve, sock=listener)
        except OSError as error:
            raise OptionError(
                f"--socket: {self._path} cannot be used ({error.strerror or error}): give a short "
                "path in a folder that exists and that you may write to"
            ) from None
        _log.info("the sidecar serves", socket=str(self._path))
        await self._stopping.wait()
        server.close()
        async with self._busy:  # until the daemon has ended
            pass

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._busy:
                if not self._stopping.is_set():
                    await self._live(reader, writer)
        except (OSError, ConnectionError, ValueError, KeyError) as error:
            _log.warning("a connection of an agent ended", error=str(error))
        finally:
            writer.close()

    async def _live(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One daemon, from its start to its end."""
        decoder = framing.Decoder()
        messages: list[framing.Message] = []
        async with asyncio.timeout(HELLO_TIMEOUT_S):  # other connections wait for this one's end
            while not messages:
                data = await reader.read(_READ_BYTES)
                if not data:
                    return
                messages = decoder.feed(data)
        options = [str(word) for word in messages[0]["options"]]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megascale_checkpoint",
            *options,
            *self._extra,
            env=child_environment(),
        )
        _log.info("the daemon starts", pid=process.pid)
        ended = asyncio.create_task(process.wait())
        ordered = asyncio.create_task(_pass_signals(reader, decoder, process))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, ordered, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and stopped.done():
                process.terminate()
                await asyncio.wait({ended}, timeout=STOP_TIMEOUT_S)
        finally:
            for task in (ordered, stopped):
                task.cancel()
            # If it has not ended by itself: its agent is gone, or it did not stop in time.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            status = await ended
            _log.info("the daemon has ended", pid=process.pid, status=status)
        writer.write(framing.encode({"kind": "ended", "status": status}))
        with contextlib.suppress(ConnectionError):
            await writer.drain()


async def _pass_signals(
    reader: asyncio.StreamReader, decoder: framing.Decoder, process: asyncio.subprocess.Process
) -> None:
    """Pass the agent's signals to the daemon; return when the agent is gone."""
    while data := await reader.read(_READ_BYTES):
        for message in decoder.feed(data):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(int(message["number"]))


if __name__ == "__main__":
    main()
