"""Checks of nodes: their figures compared with the fleet's, and checks of a group together.

The figures are in the memory of the leader. Each node keeps its own figures and sends them in its
hello, so a new leader has them when the fleet has linked. How often a target failed in a row is
stored with the node (:mod:`megascale_driver.core.nodes.nodes`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from megascale.v1 import executor_pb2, executor_pb2_grpc, link_pb2, types_pb2
from megascale_common.service.wire_text import enum_name
from megascale_driver.analysis.baselines import (
    MAX_NODES,
    REPEATS,
    Comparison,
    FleetBaselines,
    Key,
    Verdict,
    odd_versions,
)
from megascale_driver.analysis.group_search import Answer
from megascale_driver.core.values.events import CheckGroup, GroupMember
from megascale_job.visible import counted

VERSIONS = "versions"
MAX_LEARNED = 64  # figures taken from one hello
_VERDICTS = {
    Verdict.DEGRADED: types_pb2.CHECK_VERDICT_DEGRADED,
    Verdict.FAIL: types_pb2.CHECK_VERDICT_FAIL,
}
# Not compared: the server of a clock sets its maximum error, not the node.
_NOT_COMPARED = frozenset({"clock"})
# Number of failures in a row by comparison, by (check, target) as in Outcome.
Slow = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A target that FAILED by comparison, or one that did before and passes again."""

    check: str
    target: str
    failed: bool
    detail: str


def outcomes(found: Sequence[types_pb2.CheckResult], slow: Slow) -> list[Outcome]:
    """Changes of ``slow`` that follow from results of :meth:`FleetFigures.annotated`."""
    found_out = []
    for check in found:
        target = _target(check)
        failed = check.verdict == types_pb2.CHECK_VERDICT_FAIL
        if check.baseline_source and (failed or (check.name, target) in slow):
            found_out.append(Outcome(check.name, target, failed, check.detail))
    return found_out


def _target(check: types_pb2.CheckResult) -> str:
    return f"{check.target_class} {check.target}".strip()


class FleetFigures:
    """Baselines and versions of the fleet."""

    def __init__(self) -> None:
        self._baselines = FleetBaselines()
        self._versions: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._newest: OrderedDict[str, list[types_pb2.CheckResult]] = OrderedDict()

    def annotated(
        self, node: str, model: str, checks: Sequence[types_pb2.CheckResult], slow: Slow
    ) -> list[types_pb2.CheckResult]:
        """The results of ``node`` with baseline, z and the verdict that follows.

        ``slow``: the targets of the node that failed before.
        """
        return [self._one(node, model, check, slow) for check in checks]

    def compare(
        self, node: str, model: str, checks: Sequence[types_pb2.CheckResult], slow: Slow
    ) -> list[types_pb2.CheckResult]:
        """:meth:`annotated` for diagnostics on demand, which become the newest of the node."""
        found = self.annotated(node, model, checks, slow)
        self._newest[node] = found
        self._newest.move_to_end(node)
        while len(self._newest) > MAX_NODES:
            self._newest.popitem(last=False)
        return found

    def learn(self, node: str, model: str, measured: Sequence[link_pb2.MeasuredFigure]) -> None:
        """Take in figures that the node has measured under an earlier leader; newer ones stay."""
        for one in measured[:MAX_LEARNED]:
            if one.check not in _NOT_COMPARED and math.isfinite(one.value) and one.value > 0:
                self._baselines.learn(
                    node, Key(model, one.check, one.target_class, one.unit), one.value
                )

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of targets by (test, verdict) in the newest diagnostics of all nodes."""
        return Counter(
            (check.name, enum_name(types_pb2.CheckVerdict, check.verdict, "CHECK_VERDICT_"))
            for checks in self._newest.values()
            for check in checks
        )

    def medians(self) -> dict[tuple[str, str, str], float]:
        """Median of all values in the newest diagnostics by (test, class, unit)."""
        values: dict[tuple[str, str, str], list[float]] = {}
        for check in (each for checks in self._newest.values() for each in checks):
            if check.HasField("value"):
                key = (check.name, check.target_class, check.unit)
                values.setdefault(key, []).append(check.value)
        return {key: statistics.median(found) for key, found in values.items()}

    def forget(self, node: str) -> None:
        """The node is new or repaired."""
        self._baselines.forget(node)
        self._versions.pop(node, None)
        self._newest.pop(node, None)

    def _one(
        self, node: str, model: str, check: types_pb2.CheckResult, slow: Slow
    ) -> types_pb2.CheckResult:
        found = types_pb2.CheckResult()
        found.CopyFrom(check)
        if check.verdict != types_pb2.CHECK_VERDICT_PASS:
            return found
        if check.name == VERSIONS:
            self._compare_versions(node, found)
        elif check.HasField("value") and check.name not in _NOT_COMPARED:
            key = Key(model, check.name, check.target_class, check.unit)
            times = slow.get((check.name, _target(check)), 0) + 1
            _annotate(found, self._baselines.measured(node, check.target, key, check.value), times)
        return found

    def _compare_versions(self, node: str, found: types_pb2.CheckResult) -> None:
        self._versions[node] = dict(found.tools)
        self._versions.move_to_end(node)
        while len(self._versions) > MAX_NODES:
            self._versions.popitem(last=False)
        if odd := odd_versions(node, self._versions):
            found.verdict = types_pb2.CHECK_VERDICT_DEGRADED
            found.detail = "; ".join(
                f"{name} {version}, most nodes have {most}" for name, version, most in odd
            )


def _annotate(found: types_pb2.CheckResult, comparison: Comparison, times: int) -> None:
    """Add the comparison to a result; ``times``: FAILs in a row, if this is one."""
    found.baseline_source = comparison.source
    if comparison.baseline is not None:
        found.baseline = comparison.baseline
    if comparison.z is not None:
        found.z = comparison.z
    if comparison.verdict not in _VERDICTS or comparison.baseline is None:
        return
    found.verdict = _VERDICTS[comparison.verdict]
    share = found.value / comparison.baseline
    found.detail += f"; {share:.0%} of the {comparison.source} figure"
    if comparison.verdict is Verdict.FAIL:
        found.detail += (
            f", {counted(times, 'time')} in a row: evict the node"
            if times >= REPEATS
            else "; run it again: one result alone condemns no node"
        )


# One check of a group of nodes: the driver calls all of them, and they all-reduce together.
#
# The first node answers at once with the address of its store; with that the other nodes are
# called. Each call is a stream that the node keeps open until it has its results, so a broken call
# ends the check on its node.


# For the whole call: starting a template, a fork per device, and the limit of the collective, which
# the node sets. Below Policy.group_check_timeout_s, so that the core gets every answer.
CALL_TIMEOUT_S = 100.0
MAX_DETAIL = 600
# The node cannot be checked now, which is not its fault: it is busy, or of an older build.
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
    """The answer of one node, and its text."""

    answer: Answer
    detail: str


async def check_group(wanted: CheckGroup, open_channel: Open) -> dict[str, Found]:
    """The answers of all members, including those that could not be called."""
    loop = asyncio.get_running_loop()
    where: asyncio.Future[str] = loop.create_future()
    world = sum(len(member.devices) for member in wanted.members)
    first, *others = wanted.members
    rank, rest = len(first.devices), []
    leader = asyncio.create_task(_call(first, 0, world, "", open_channel, where))
    try:
        # The first node may end without an address; then the others are never called.
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
