"""Last lines, following, and classes of trouble in the ranks' logs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import executor_pb2, executor_pb2_grpc
from megascale_common.service import status
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import LimitError
from megascale_common.service.server import RpcServer
from megascale_executor.agent.link import service
from megascale_executor.agent.processes import folders
from megascale_executor.agent.reports.logs import between, ending, follow


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=20)),
    st.integers(0, 30),
)
def test_tail_is_the_end_of_the_file(tmp_path: Path, lines: list[str], count: int) -> None:
    path = tmp_path / "rank.log"
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text + "unfinished")
    begin, offset = ending(path, count)
    assert asyncio.run(_lines(path, begin, offset)) == (lines[-count:] if count else [])
    assert offset == len(text)


async def _lines(path: Path, begin: int, end: int) -> list[str]:
    return [line async for line in between(path, begin, end)]


async def test_tail_reads_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_text("".join(f"line {number:06d} {'x' * 50}\n" for number in range(20_000)))
    found = await _lines(path, *ending(path, 5_000))
    assert (
        len(found) == 5_000
        and found[0].startswith("line 015000")
        and found[-1].startswith("line 019999")
    )


async def test_follow_gives_what_is_written_up_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_text("old\nha")
    over = False

    async def write() -> None:
        nonlocal over
        with path.open("a") as log:
            for text in ("lf\n", "next\n", "last without newline"):
                log.write(text)
                log.flush()
                await asyncio.sleep(0.05)
        over = True

    writer = asyncio.create_task(write())
    _, offset = ending(path, 1)
    lines = [line async for line in follow(path, offset, lambda: over)]
    await writer
    assert lines == ["half", "next", "last without newline"]


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[executor_pb2_grpc.ExecutorServiceAsyncStub]:
    """The service of a node alone, with a log of 15 MB of rank 0 of a job."""
    log = folders.attempt_folder(folder, "job", 1).log(0)
    log.parent.mkdir(parents=True)
    log.write_bytes((b"x" * 167 + b"\n") * 90_000)
    none: Any = cast(Any, None)
    served = service.ExecutorService(folder, none, lambda key: False, lambda: None, none, none)
    server = RpcServer("token-of-the-tests")
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(served, server.server)
    address = await server.start("127.0.0.1:0", [service.SERVICE_NAME])
    try:
        async with open_channel(address, "token-of-the-tests") as channel:
            yield executor_pb2_grpc.ExecutorServiceStub(channel)
    finally:
        await server.stop(0)


REQUEST = executor_pb2.TailWorkerLogsRequest(job="job", rank=0, lines=100_000)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def test_readers_that_take_nothing_cost_the_agent_a_block_each(tmp_path: Path) -> None:
    """The lines of one are 20 MiB."""
    async with agent(tmp_path) as stub:
        before = resident_mib()
        calls = [stub.TailWorkerLogs(REQUEST, timeout=CALL_TIMEOUT_S) for _ in range(20)]
        for call in calls:
            assert cast(executor_pb2.TailWorkerLogsResponse, await call.read()).line == "x" * 167
        assert resident_mib() - before < 100
        for _ in range(1_000):
            line = cast(executor_pb2.TailWorkerLogsResponse, await calls[0].read()).line
            assert line == "x" * 167
        for call in calls:
            call.cancel()


async def test_readers_of_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_LOG_STREAMS_OF_ONE", 3)
    async with agent(tmp_path) as stub:
        calls = [stub.TailWorkerLogs(REQUEST, timeout=CALL_TIMEOUT_S) for _ in range(3)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.TailWorkerLogs(REQUEST, timeout=CALL_TIMEOUT_S).read()
        refusal = status.read(caught.value)
        assert isinstance(refusal, LimitError) and refusal.reason == "TOO_MANY_STREAMS"
        calls[0].cancel()

        async def taken() -> bool:
            try:
                await stub.TailWorkerLogs(REQUEST, timeout=CALL_TIMEOUT_S).read()
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(taken, "one more is served when another has ended")
        for call in calls:
            call.cancel()
