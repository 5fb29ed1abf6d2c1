"""The network: links of nodes, calls to nodes, cuts in one direction or both, delays.

A link is a stream, as over TCP: in order and without loss, until it breaks. A cut holds what is
sent; after KEEPALIVE_S each side detects it and the stream breaks. Whole heartbeats can be lost or
come twice, and calls can come twice, as when somebody in between repeats them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from tests.simulation.shell.loop import current_process

from megascale.v1 import link_pb2, types_pb2

if TYPE_CHECKING:
    from tests.simulation.shell.drivers import SimDriver
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.world import World

KEEPALIVE_S = 20.0
DELAY_GRID_S = 0.001  # of delays in large fleets: what arrives at one time is one turn of a driver


class Refused(Exception):
    """What a servicer's context raises from abort."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details, self.trailing = code, details, trailing


class Context:
    """The servicer context of one call."""

    def __init__(self, actor: str = "", write: Any = None) -> None:
        self._actor = actor
        self.write = write

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call with an error."""
        raise Refused(code, details, trailing_metadata)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the caller."""
        return (("megascale-actor", self._actor),) if self._actor else ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Nobody reads it."""

    def set_code(self, code: Any) -> None:
        """Nobody reads it."""

    def set_details(self, details: str) -> None:
        """Nobody reads it."""

    def peer(self) -> str:
        """The caller's address."""
        return "ipv4:10.0.0.1:1"


class Requests:
    """The requests of a stream, as the servicer iterates them."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def push(self, item: Any) -> None:
        """A request arrives."""
        self._items.append(item)
        self._arrived.set()

    def unread(self) -> int:
        """How many have arrived, and nobody has read them."""
        return len(self._items)

    def end(self) -> None:
        """No more requests come."""
        self._ended = True
        self._arrived.set()

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()


class Network:
    """Who reaches whom now; ``cuts`` holds (from, to) pairs, "*" stands for everybody."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cuts: dict[tuple[str, str], int] = {}
        self.links: dict[Link, None] = {}  # in the order of their dialling
        # Apart from the world's: how many messages there are must not change anything else.
        self.random = random.Random(f"network-{world.seed}")
        self.loss = self.duplication = 0.0
        self.slow_s = 0.0
        self._healed_at_s = float("-inf")

    def open(self, a: str, b: str) -> bool:
        """Whether both directions between the two are open."""
        return self.passes(a, b) and self.passes(b, a)

    def passes(self, source: str, target: str) -> bool:
        """Whether messages from one get to the other."""
        cuts = self.cuts
        if not cuts:
            return True
        pairs = ((source, target), (source, "*"), ("*", target))
        return not any(cuts.get(pair) for pair in pairs)

    def cut(self, source: str, target: str) -> None:
        """Hold everything from one to the other."""
        self.cuts[source, target] = self.cuts.get((source, target), 0) + 1
        for link in list(self.links):
            link.cut_changed()

    def heal(self, source: str, target: str) -> None:
        """Undo one :meth:`cut`."""
        self.cuts[source, target] -= 1
        self._healed_at_s = self.world.now_s
        if not self.cuts[source, target]:
            del self.cuts[source, target]
        for link in list(self.links):
            link.cut_changed()

    def cut_lately(self, seconds: float) -> bool:
        """Whether anybody is cut off now, or was in the last seconds."""
        return bool(self.cuts) or self.world.now_s - self._healed_at_s < seconds

    def loses(self, node: SimNode) -> bool:
        """Whether this message of a node is lost."""
        return self.loss > 0.0 and node.traffic.now.random() < self.loss

    def duplicates(self, node: SimNode) -> bool:
        """Whether this message of a node comes twice."""
        return self.duplication > 0.0 and node.traffic.now.random() < self.duplication

    def delay_s(self, node: SimNode) -> float:
        """How long a message of a call to the node takes."""
        return node.draw(0.0005, 0.004) + self.slowdown_s(node)

    def slowdown_s(self, node: SimNode) -> float:
        """How much longer than usual a message from or to the node takes now."""
        return self.slow_s * node.traffic.now.random() if self.slow_s else 0.0

    def quiet(self, link: Link) -> bool:
        """Whether nothing is lost, slow or cut on a link."""
        if self.loss or self.duplication or self.slow_s or not link.open:
            return False
        return not self.cuts or self.open(link.node.name, link.driver.name)


class Link:
    """One stream between a node and a driver's real link service."""

    def __init__(self, network: Network, node: SimNode, driver: SimDriver) -> None:
        self.network, self.node, self.driver = network, node, driver
        self.boots = node.boots
        self.term = driver.term_of
        self.greeted = False
        self.beat_waits = False  # one heartbeat brings all changes within its gap, as an agent's
        self.open = True
        self._requests = Requests()
        self._held: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])
        self._free_at_s = [0.0, 0.0]
        self._cut_since_s = 0.0
        # Constant: how many heartbeats a skipped stretch had must not change who is heard first.
        self.delay_s = node.draw(0.0005, 0.004)
        if network.world.large:
            self.delay_s = max(DELAY_GRID_S, self.delay_s // DELAY_GRID_S * DELAY_GRID_S)
        network.links[self] = None
        self._task = driver.process.spawn(self._serve())

    def send(self, request: link_pb2.ConnectRequest) -> None:
        """A message to the driver."""
        self._transport(0, lambda: self._to_driver(request))

    def _to_driver(self, request: link_pb2.ConnectRequest) -> None:
        if request.WhichOneof("message") == "heartbeat" and not self._task.done():
            self.network.world.invariants.bounds.heard(self, self.network.world.now_s)
        self._requests.push(request.SerializeToString())

    def believe(self, heard_s: float) -> None:
        """The driver has heard a node that rested, most lately at that time of the world."""
        driver, name = self.driver, self.node.name
        if not driver.alive or driver.term_of != self.term:
            return
        engine, clock = driver.engine, driver.clock
        self.network.world.invariants.bounds.heard(self, heard_s)
        engine.presence.lane.doubt(clock.now_s(), name, heard_s + clock.offset_s)
        seat = engine.links.get(name)
        if seat is not None:
            seat.received_at_s = max(seat.received_at_s, heard_s + clock.offset_s)
        engine.retimed.set()  # the next moment at which silence counts may be earlier now

    def report_steps(self, job: str, record: types_pb2.StepRecord) -> None:
        """A call with one step record."""

        async def call() -> None:
            requests = Requests()
            requests.push(link_pb2.ReportStepsRequest(job=job, records=[record]))
            requests.end()
            try:
                await self.driver.link_service.ReportSteps(requests, Context())
            except Refused:
                pass  # the next record brings what this one had

        def arrive() -> None:
            if self.driver.process.alive:
                self.driver.process.spawn(call())

        self._transport(0, arrive)

    def close_from_node(self) -> None:
        """The node's side is gone: the driver detects it, unless the way there is cut."""
        self._transport(0, self._end_call)
        self._forget()

    def break_off(self) -> None:
        """Both sides lose the stream."""
        if self.open:
            self._forget()
            self._end_call()
            self.network.world.later(0.0, self._notify_node)

    def cut_changed(self) -> None:
        """A cut was made or healed: hold or let through, and break after the keepalive."""
        up = self.network.passes(self.node.name, self.driver.name)
        down = self.network.passes(self.driver.name, self.node.name)
        if not (up and down):
            self.node.rest.end()
        for way, passes in ((0, up), (1, down)):
            if passes and self._held[way]:
                held = list(self._held[way])
                self._held[way].clear()
                for work in held:
                    self._transport(way, work)
        if up and down:
            self._cut_since_s = 0.0
        elif not self._cut_since_s:
            since_s = self._cut_since_s = self.network.world.loop.time()

            def still_cut() -> None:
                if self._cut_since_s == since_s:
                    self.break_off()

            self.network.world.later(KEEPALIVE_S, still_cut)

    def _transport(self, way: int, work: Callable[[], None]) -> None:
        """Deliver in order: way 0 is to the driver, 1 to the node."""
        source, target = self.node.name, self.driver.name
        if way:
            source, target = target, source
        if not self.network.passes(source, target):
            self._held[way].append(work)
            return
        now_s = self.network.world.loop.time()
        delay_s = self.delay_s + self.network.slowdown_s(self.node)
        self._free_at_s[way] = max(self._free_at_s[way] + 1e-6, now_s + delay_s)
        # In the link's own place: what a driver sends at one time does not arrive in an order that
        # depends on how many ticks it had.
        place = 3 * self.node.place + 1 + way
        self.network.world.later_in_place(self._free_at_s[way] - now_s, place, work)

    async def _serve(self) -> None:
        """The driver's side, in the driver's process."""
        try:
            context: Any = Context(write=self._write)
            await self.driver.link_service.Connect(self._requests, context)
        except Refused:
            pass
        finally:
            self._transport(1, self._closed_by_driver)

    async def _write(self, message: link_pb2.ConnectResponse) -> None:
        if message.HasField("heartbeat_ack") and self._acknowledged():
            return
        self._transport(1, lambda: self._to_node(message))

    def _acknowledged(self) -> bool:
        """Give the node an acknowledgement at once, where its delay and order change nothing."""
        network, node = self.network, self.node
        if node.paused or not network.passes(self.driver.name, node.name):
            return False
        if self.open and node.boots == self.boots:
            node.acknowledged(self)
        return True

    def _to_node(self, message: link_pb2.ConnectResponse) -> None:
        if self.open and self.node.boots == self.boots:
            self.node.receive(self, message)

    def _closed_by_driver(self) -> None:
        if self.open:
            self._forget()
            self._notify_node()

    def _notify_node(self) -> None:
        if self.node.boots == self.boots and self.node.up:
            self.node.link_closed(self)

    def _end_call(self) -> None:
        if self.driver.process.alive:
            # What a driver that stands still has not read is lost with the stream.
            self.network.world.invariants.bounds.unheard(self, self._requests.unread())
            self._task.cancel()

    def _forget(self) -> None:
        self.open = False
        self.network.links.pop(self, None)


class Channel:
    """A gRPC channel of the driver to one node, in place of the real one."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self._address = world, address

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Callable[..., Any]:
        """The callable of one method, as stubs take it."""
        caller = current_process()
        name = caller.name if caller is not None else ""

        async def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            return await self._world.services.call(
                name, self._address, method.rpartition("/")[2], request, timeout
            )

        return call

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., Any]:
        """The callable of a method that answers with several messages, all at once."""
        call = self.unary_unary(method)

        async def stream(request: Any, timeout: float | None = None, **_: Any) -> Any:
            for part in await call(request, timeout):
                yield part

        return stream

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Callable[..., Any]:
        """The callable of a method that nothing here serves."""

        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(method)

        return call

    stream_stream = stream_unary

    async def close(self) -> None:
        """Nothing to close."""
