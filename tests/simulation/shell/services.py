"""The services of nodes that drivers call: status, opening an attempt, reaching the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from tests.harness.fake_etcd_store import rpc_error
from tests.simulation.shell.loop import current_process
from tests.simulation.shell.nodes import IDLE

from megascale.v1 import checkpoint_pb2, driver_pb2, executor_pb2, link_pb2, types_pb2

if TYPE_CHECKING:
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.world import World

_SOURCES = {
    "none": types_pb2.RESTORE_SOURCE_NONE,
    "memory": types_pb2.RESTORE_SOURCE_MEMORY,
    "storage": types_pb2.RESTORE_SOURCE_STORAGE,
}


class Services:
    """Calls from drivers to nodes, with what the network and the nodes do to them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[str, list[str]] = {}  # nodes that check each other, by where they meet
        self._handlers: dict[str, Callable[[SimNode, Any], Any]] = {
            "GetNodeStatus": self._status,
            "OpenAttempt": self._open_attempt,
            "CheckGroup": self._check_group,
            "ListCommits": self._list_commits,
            "CheckStorage": lambda node, request: checkpoint_pb2.CheckStorageResponse(),
        }

    async def call(
        self, caller: str, address: str, method: str, request: Any, timeout_s: float | None
    ) -> Any:
        """One call; it may take effect although no reply comes."""
        world = self._world
        reply: asyncio.Future[Any] = world.loop.create_future()
        node, boots = world.node_at(address)

        def arrive(again: bool) -> None:
            if node.paused:
                world.later(1.0, arrive, again)
                return
            if not world.network.passes(caller, node.name):
                return
            if not node.up or node.boots != boots:
                answer: Any = rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused")
            else:
                try:
                    answer = self._handlers[method](node, request)
                except grpc.aio.AioRpcError as error:
                    answer = error
            if again and world.network.duplicates(node):
                world.later(world.draw(0.0, 5.0), arrive, False)
            world.later(world.network.delay_s(node), back, answer)

        def back(answer: Any) -> None:
            if reply.done() or not world.network.passes(node.name, caller):
                return
            if isinstance(answer, Exception):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)

        world.later(world.network.delay_s(node), arrive, True)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer") from None

    async def connect(self, make: Callable[[], Any], host: str, port: int, **_: Any) -> Any:
        """Open a connection to a node's port, as a probe does."""
        world = self._world
        caller = current_process()
        node, boots = world.node_at(f"{host}:{port}")
        name = caller.name if caller is not None else ""
        if not world.network.open(name, node.name):
            await asyncio.sleep(3600.0)
        await asyncio.sleep(world.network.delay_s(node))
        if not node.up or node.boots != boots:
            raise ConnectionRefusedError("nobody listens there")
        protocol = make()
        transport = _Transport(world, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def _status(
        self, node: SimNode, request: executor_pb2.GetNodeStatusRequest
    ) -> executor_pb2.GetNodeStatusResponse:
        beat = link_pb2.Heartbeat(job=node.job, attempt=node.attempt, phase=node.phase)
        return executor_pb2.GetNodeStatusResponse(hello=node.hello(), heartbeat=beat)

    def _check_group(
        self, node: SimNode, request: executor_pb2.CheckGroupRequest
    ) -> list[executor_pb2.CheckGroupResponse]:
        """What a node streams: where rank 0 listens, then the result; a lost GPU fails it."""
        if node.phase != IDLE:
            raise rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "the node has an attempt")
        if request.incarnation != node.incarnation:
            raise rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "the agent was restarted")
        # All nodes of a group meet at the first one; each fails with those who came before it.
        where = request.store_endpoint if request.first_rank else node.endpoint
        group = self._groups.setdefault(where, [])
        if not request.first_rank:
            group.clear()
        bad = node.gpu_lost or self._world.invariants.hidden.fails(node.name, group)
        group.append(node.name)
        verdict = types_pb2.CHECK_VERDICT_FAIL if bad else types_pb2.CHECK_VERDICT_PASS
        found = types_pb2.CheckResult(name="group_all_reduce", target="cuda:0", verdict=verdict)
        parts = [executor_pb2.CheckGroupResponse(checks=[found])]
        if not request.first_rank:
            parts.insert(0, executor_pb2.CheckGroupResponse(store_endpoint=node.endpoint))
        return parts

    def _list_commits(
        self, node: SimNode, request: checkpoint_pb2.ListCommitsRequest
    ) -> checkpoint_pb2.ListCommitsResponse:
        commits = reversed(self._world.storage_of(request.job).commits)
        return checkpoint_pb2.ListCommitsResponse(
            checkpoints=[
                driver_pb2.Checkpoint(job=request.job, step=step, attempt=by)
                for step, by in commits
            ]
        )

    def _open_attempt(
        self, node: SimNode, request: checkpoint_pb2.OpenAttemptRequest
    ) -> checkpoint_pb2.OpenAttemptResponse:
        """Append OPEN, which fences all earlier attempts, and choose what to restore."""
        world = self._world
        if world.random.random() < world.open_failures:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the storage is away")
        storage = world.storage_of(request.job)
        if request.attempt < storage.opened:
            raise rpc_error(
                grpc.StatusCode.FAILED_PRECONDITION, f"attempt {storage.opened} is open"
            )
        if request.attempt not in storage.answers:
            for gang in world.gangs_of(request.job):
                gang.settle()
            storage.opened = request.attempt
            refused = frozenset(request.refused_steps)
            sealed = request.sealed_step if request.sealed_step not in refused else 0
            step, by = storage.newest(sealed, refused)
            plan = ("storage", step, by) if step else ("none", 0, 0)
            if sealed and not step:
                plan = ("memory", sealed, request.sealed_by_attempt)
            storage.answers[request.attempt] = plan
            world.invariants.opened(request, plan)
        source, step, by = storage.answers[request.attempt]
        restore = link_pb2.RestorePlan(source=_SOURCES[source], step=step, written_by_attempt=by)
        return checkpoint_pb2.OpenAttemptResponse(restore=restore, log_seq=request.attempt)


class _Transport(asyncio.Transport):
    """A connection on which nothing is sent."""

    def __init__(self, world: World, protocol: Any) -> None:
        super().__init__()
        self._world, self._protocol = world, protocol
        self._closing = False

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self._closing

    def close(self) -> None:
        """End the connection."""
        if not self._closing:
            self._closing = True
            self._world.loop.call_soon(self._protocol.connection_lost, None)
