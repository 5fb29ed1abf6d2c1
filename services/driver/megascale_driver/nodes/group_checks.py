"""One check of a group of nodes: the driver calls all of them, and they all-reduce together.

The first node answers at once where its store listens; with that the others are called. Each call
is a stream that the node holds open until it has its results, so a call that breaks ends the check
on its node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from megascale.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from megascale_driver.analysis.group_search import Answer
from megascale_driver.core.values.group_events import CheckGroup, GroupMember

# For the whole call: a template that starts, a fork per device, and the collective's own limit,
# which the node sets. Below Policy.group_check_timeout_s, so that the core gets every answer.
CALL_TIMEOUT_S = 100.0
MAX_DETAIL = 600
# The node cannot be checked now, which is no fault of it: it is busy, or of an older build.
_SKIPPED = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
Open = Callable[[str], grpc.aio.Channel]


@dataclass(frozen=True, slots=True)
class Found:
    """What one node answered, and in which words."""

    answer: Answer
    detail: str


async def check_group(wanted: CheckGroup, open_channel: Open) -> dict[str, Found]:
    """The answer of every member; none is left out."""
    loop = asyncio.get_running_loop()
    where: asyncio.Future[str] = loop.create_future()
    world = sum(len(member.devices) for member in wanted.members)
    first, *others = wanted.members
    rank, rest = len(first.devices), []
    leader = asyncio.create_task(_call(first, 0, world, "", open_channel, where))
    try:
        await asyncio.wait((leader, where), return_when=asyncio.FIRST_COMPLETED)
        if where.done():
            for member in others:
                work = _call(member, rank, world, where.result(), open_channel, None)
                rest.append(asyncio.create_task(work))
                rank += len(member.devices)
        found = await asyncio.gather(leader, *rest)
    finally:
        for task in (leader, *rest):
            task.cancel()
    answers = dict(zip((first.node, *(m.node for m in others)), found, strict=False))
    not_called = Found(Answer.FAIL, f"not called: {first.node} gave no address to meet at")
    return {member.node: answers.get(member.node, not_called) for member in wanted.members}


async def _call(
    member: GroupMember,
    first_rank: int,
    world_size: int,
    store: str,
    open_channel: Open,
    where: asyncio.Future[str] | None,
) -> Found:
    request = executor_pb2.CheckGroupRequest(
        first_rank=first_rank,
        world_size=world_size,
        devices=member.devices,
        store_endpoint=store,
        incarnation=member.incarnation,
    )
    channel = open_channel(member.endpoint)
    try:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        async for part in stub.CheckGroup(request, timeout=CALL_TIMEOUT_S):
            if part.store_endpoint and where is not None and not where.done():
                where.set_result(part.store_endpoint)
            if part.checks:
                return _verdict(part)
    except grpc.aio.AioRpcError as error:
        answer = Answer.SKIPPED if error.code() in _SKIPPED else Answer.SILENT
        return Found(answer, f"{error.code().name}: {error.details()}"[:MAX_DETAIL])
    finally:
        await channel.close()
    return Found(Answer.SILENT, "the call ended without results")


def _verdict(part: executor_pb2.CheckGroupResponse) -> Found:
    bad = [check for check in part.checks if check.verdict == types_pb2.CHECK_VERDICT_FAIL]
    if bad:
        return Found(Answer.FAIL, f"{bad[0].target}: {bad[0].detail}"[:MAX_DETAIL])
    if any(check.verdict == types_pb2.CHECK_VERDICT_PASS for check in part.checks):
        return Found(Answer.PASS, "")
    return Found(Answer.SKIPPED, part.checks[0].detail[:MAX_DETAIL])
