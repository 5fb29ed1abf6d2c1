"""The probe behind the checks ``compute``, ``all_reduce`` and ``group_all_reduce``.

One process per device, forked from the template, checks its device and its path to the other
devices of the node or of a group of nodes.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node import framing
from megascale_common.node.messages import Accepted, SelfCheck, SelfChecked
from megascale_common.service.errors import TemplateError
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.processes.template import ForkedProcess, TemplateProcess
from megascale_executor.diagnostics import rank_checks
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.finding import Finding

# Counted from the last fork. CPU ranks need a fraction of a second; CUDA and NCCL need several
# seconds for their first start.
PROBE_TIMEOUT_S = {"cpu": 15.0, "cuda": 60.0}
_ANSWERS = Accepted("the agent", SelfChecked)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of a check's ranks; ``listener`` is the store's socket on the node of rank 0."""

    first_rank: int
    world_size: int
    host: str
    port: int
    listener: socket.socket | None = None


async def probe(
    devices: Sequence[DeviceFacts], template: TemplateProcess, log_path: Path
) -> list[Finding]:
    """Findings of ``compute`` for every device, and of ``all_reduce`` among them."""
    with socket.create_server(("127.0.0.1", 0), backlog=len(devices) + 8) as store:
        port = store.getsockname()[1]
        meeting = Meeting(0, len(devices), "127.0.0.1", port, store)
        return await probe_at(meeting, devices, template, log_path)


async def probe_at(
    meeting: Meeting, devices: Sequence[DeviceFacts], template: TemplateProcess, log_path: Path
) -> list[Finding]:
    """Findings of ``compute`` for every device, and of ``all_reduce`` among all ranks."""
    begin = time.monotonic()
    kind = devices[0].kind
    requests = [
        SelfCheck(
            rank=rank,
            world_size=meeting.world_size,
            store_host=meeting.host,
            store_port=meeting.port,
            device_kind=kind,
            device_index=device.index,
            timeout_s=PROBE_TIMEOUT_S[kind],
        )
        for rank, device in enumerate(devices, meeting.first_rank)
    ]
    several = meeting.listener is not None and meeting.world_size > 1
    listen_fd = meeting.listener.fileno() if several and meeting.listener is not None else None
    answers = await asyncio.gather(
        *(_ask(request, template, log_path, listen_fd) for request in requests)
    )
    targets = [f"{kind}:{device.index}" for device in devices]
    return rank_checks.evaluate(
        targets, dict(enumerate(answers)), time.monotonic() - begin, meeting.world_size
    )


async def _ask(
    request: SelfCheck, template: TemplateProcess, log_path: Path, listen_fd: int | None
) -> SelfChecked | str:
    """Fork one process and return its answer, or why there is none. Leaves no process behind."""
    channel, theirs = MessageChannel.pair()
    process: ForkedProcess | None = None
    try:
        channel.send(request, [listen_fd] if request.rank == 0 and listen_fd is not None else [])
        with theirs, log_path.open("ab") as log:
            process = await template.fork(request.rank, theirs.fileno(), log.fileno())
        timeout_s = PROBE_TIMEOUT_S[request.device_kind]
        async with asyncio.timeout(timeout_s + 1.0):
            return await _answer(channel, process)
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT_S[request.device_kind]:.0f} s"
    except (TemplateError, framing.FramingError, OSError) as error:
        return str(error)
    finally:
        channel.close()
        theirs.close()
        if process is not None:
            process.kill()


async def _answer(channel: MessageChannel, process: ForkedProcess) -> SelfChecked | str:
    async for message in channel.messages():
        return _ANSWERS.read(message)
    status = await process.exited
    return (
        f"the probe ended with status {status} before it answered; see self-check.log of the node"
    )
