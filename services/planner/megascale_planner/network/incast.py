"""Simulation of an incast, packet by packet: many senders, one receiver, and a victim flow.

    senders ─▶ ToR A ═══ one link up ═══▶ ToR B ─▶ the receiver of all senders
    victim  ─▶                                  ─▶ the receiver of the victim

The link up carries twice the rate of a NIC, so it is not the bottleneck. But if ToR B's queue for
the one receiver is long, priority flow control (PFC) pauses the link up, and with it the victim's
packets, which go elsewhere. Congestion control must keep this rare (MegaScale section 3.6). All
figures are simulated; equal setups give equal figures.

Switches have queues with links, ECN marks and PFC. :data:`ARMS` are the compared controls by name,
each with the source of its parameters.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from megascale_planner.network.congestion_control import (
    PACKET_BITS,
    PACKET_BYTES,
    Control,
    Dcqcn,
    DcqcnParameters,
    Swift,
    SwiftParameters,
)

Packet = tuple[int, float, bool]  # flow, time at which it was sent, True if marked


class Events:
    """Virtual time: runs calls in the order of their times, then of their registration."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def later(self, delay_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Register a call after ``delay_s``."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, call, argument))

    def run(self, until_s: float, ended: Callable[[], bool]) -> None:
        """Run calls until ``ended`` is true, no call is left, or time ``until_s``."""
        heap, pop = self._heap, heapq.heappop
        while heap and not ended():
            self.now_s, _, call, argument = pop(heap)
            if self.now_s > until_s:
                self.now_s = until_s
                return
            call(argument)


@dataclass(frozen=True, slots=True)
class Marking:
    """ECN marking by the length of the queue (RED).

    From ``least_bytes`` on, packets are marked with a probability that grows to ``most`` at
    ``all_bytes``; beyond that, every packet is marked.
    """

    least_bytes: int
    all_bytes: int
    most: float

    def times(self, factor: float) -> Marking:
        """The marking of a link that is ``factor`` times as fast."""
        return Marking(int(self.least_bytes * factor), int(self.all_bytes * factor), self.most)


class Marks:
    """Draws marks from a seeded generator, so that a run can be repeated."""

    def __init__(self, marking: Marking, seed: int) -> None:
        self._marking = marking
        self._state = (seed * 2 + 1) & 0xFFFFFFFF
        self.count = 0

    def draw(self, queue_bytes: int) -> bool:
        """True if a packet that finds a queue of this length is marked."""
        given = self._marking
        if queue_bytes <= given.least_bytes:
            return False
        chance = 1.0
        if queue_bytes < given.all_bytes:
            span = given.all_bytes - given.least_bytes
            chance = given.most * (queue_bytes - given.least_bytes) / span
        # A linear congruential generator (Numerical Recipes): good enough for marks.
        self._state = (1664525 * self._state + 1013904223) & 0xFFFFFFFF
        marked = self._state < chance * 4294967296.0
        self.count += marked
        return marked


class Ingress:
    """PFC of one input port: pauses its sender while the switch holds too many of its bytes."""

    def __init__(self, events: Events, delay_s: float, xoff_bytes: int, xon_bytes: float) -> None:
        self._events = events
        self._delay_s = delay_s
        self._xoff = xoff_bytes
        self._xon = xon_bytes
        self._bytes = 0
        self._stopped = False
        self.pause: Callable[[Any], None] = lambda _: None
        self.resume: Callable[[Any], None] = lambda _: None

    def came(self) -> None:
        """A packet arrived through this port."""
        self._bytes += PACKET_BYTES
        if not self._stopped and self._bytes > self._xoff:
            self._stopped = True
            self._events.later(self._delay_s, self.pause, None)

    def went(self) -> None:
        """One of its packets left the switch."""
        self._bytes -= PACKET_BYTES
        if self._stopped and self._bytes < self._xon:
            self._stopped = False
            self._events.later(self._delay_s, self.resume, None)


class Port:
    """An output port: a queue, its link, and the receiver at the end of the link.

    Attributes:
        lengths: seconds for which the queue had each length, by length in packets.
    """

    def __init__(
        self,
        events: Events,
        marks: Marks,
        bps: float,
        delay_s: float,
        sink: Callable[[Packet], None],
        left: Callable[[Packet], None],
    ) -> None:
        self._events = events
        self._marks = marks
        self._packet_s = PACKET_BITS / bps
        self._delay_s = delay_s
        self._sink = sink
        self._left = left
        self._queue: deque[Packet] = deque()
        self._busy = False
        self._stopped_s = -1.0
        self._paused_s = 0.0
        self._changed_s = 0.0
        self.lengths: dict[int, float] = {}

    def push(self, packet: Packet) -> None:
        """Queue a packet, which can get a mark."""
        # A mark is never removed: the receiver must see congestion anywhere on the path.
        if not packet[2] and self._marks.draw(len(self._queue) * PACKET_BYTES):
            packet = (packet[0], packet[1], True)
        self._count()
        self._queue.append(packet)
        if not self._busy:
            self._next()

    def pause(self, _: Any) -> None:
        """PFC: finish the packet that is being sent, and send no other."""
        if self._stopped_s < 0:
            self._stopped_s = self._events.now_s

    def resume(self, _: Any) -> None:
        """PFC: send again."""
        if self._stopped_s >= 0:
            self._paused_s += self._events.now_s - self._stopped_s
            self._stopped_s = -1.0
            if not self._busy:
                self._next()

    @property
    def paused_s(self) -> float:
        """Seconds for which the port has been paused so far."""
        since_s = self._events.now_s - self._stopped_s if self._stopped_s >= 0 else 0.0
        return self._paused_s + since_s

    def queue_bytes(self) -> tuple[float, float]:
        """Length of the queue: mean over time, and 99th percentile."""
        self._count()
        total_s = sum(self.lengths.values())
        if not total_s:
            return 0.0, 0.0
        mean = sum(length * held_s for length, held_s in self.lengths.items()) / total_s
        left_s, longest = 0.99 * total_s, 0
        for length, held_s in sorted(self.lengths.items()):
            longest, left_s = length, left_s - held_s
            if left_s <= 0:
                break
        return mean * PACKET_BYTES, float(longest * PACKET_BYTES)

    def _next(self) -> None:
        if self._stopped_s >= 0 or not self._queue:
            return
        self._count()
        packet = self._queue.popleft()
        self._left(packet)
        self._busy = True
        self._events.later(self._packet_s, self._sent, packet)

    def _sent(self, packet: Packet) -> None:
        self._busy = False
        self._events.later(self._delay_s, self._sink, packet)
        self._next()

    def _count(self) -> None:
        length, now_s = len(self._queue), self._events.now_s
        self.lengths[length] = self.lengths.get(length, 0.0) + now_s - self._changed_s
        self._changed_s = now_s


MOST_PACKETS = 2_000_000  # about a minute of processor time
_ENDLESS = 1 << 60
_STAGES = 4  # parts of the base round trip: three links, and the way back of the acknowledgement


@dataclass(frozen=True, slots=True)
class Setup:
    """One incast. Rates in bits per second, times in seconds.

    Attributes:
        total_bytes: of all senders together.
        rtt_s: base round trip.
        xoff_bytes: bytes of one input port above which its sender is paused.
        xon: share of ``xoff_bytes`` below which the sender resumes.
        marking: of ports to hosts; for the link up it is scaled with the link's speed.
        most_s: virtual time after which the run ends.
    """

    senders: int = 32
    total_bytes: int = 128_000_000
    nic_bps: float = 200e9
    up_bps: float = 400e9
    rtt_s: float = 8e-6
    xoff_bytes: int = 1_000_000
    xon: float = 0.95
    marking: Marking = field(default_factory=lambda: Marking(800_000, 3_200_000, 0.2))
    most_s: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        packets = self.total_bytes // PACKET_BYTES
        if not 1 <= self.senders <= 4096 or packets < self.senders:
            raise ValueError(f"senders is {self.senders}: give 1 to 4,096, each at least a packet")
        if packets > MOST_PACKETS:
            raise ValueError(f"total_bytes is {self.total_bytes:,}: 8 GB at most")

    @property
    def ideal_s(self) -> float:
        """Time of the bytes on the receiver's link alone."""
        return self.total_bytes * 8 / self.nic_bps


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an incast.

    Attributes:
        done_s: time at which the last byte arrived; ``most_s`` if it did not.
        victim_bps: the victim's rate until then.
        paused: share of that time for which PFC paused the link up.
        queue_mean_bytes: mean over time of ToR B's queue for the one receiver.
        fairness: Jain's index of the bytes delivered by each sender at half of the ideal time.
        marked: share of the packets that were marked.
    """

    done_s: float
    victim_bps: float
    paused: float
    queue_mean_bytes: float
    queue_p99_bytes: float
    fairness: float
    marked: float


MakeControl: TypeAlias = Callable[[float, float], Control]  # of line rate and base round trip


class _Sender:
    """A flow: packets that are left, packets in flight, and its control."""

    def __init__(self, run: _Run, flow: int, packets: int, control: Control) -> None:
        self._run = run
        self._flow = flow
        self._left = packets
        self._control = control
        self.delivered = 0
        self._on_way = 0
        self._free_s = 0.0
        self._asleep = True
        self._stopped = False
        run.events.later(control.timer_s, self._timer, None)

    def wake(self, _: Any = None) -> None:
        """Schedule the next packet, if one can be sent now."""
        if self._asleep and self._may_send():
            self._asleep = False
            events = self._run.events
            events.later(max(0.0, self._free_s - events.now_s), self._send, None)

    def acknowledged(self, packet: Packet) -> None:
        """The sender receives the acknowledgement of a packet."""
        self._on_way -= 1
        self.delivered += 1
        now_s = self._run.events.now_s
        self._control.acknowledged(now_s, now_s - packet[1], marked=packet[2])
        self.wake()

    def pause(self, _: Any) -> None:
        """PFC of ToR A: stop sending."""
        self._stopped = True

    def resume(self, _: Any) -> None:
        """PFC of ToR A: send again."""
        self._stopped = False
        self.wake()

    def _may_send(self) -> bool:
        room = self._on_way < max(1.0, self._control.window)
        return room and self._left > 0 and not self._stopped

    def _send(self, _: Any) -> None:
        self._asleep = True
        if not self._may_send():
            return
        run, now_s = self._run, self._run.events.now_s
        self._left = self._left - 1
        self._on_way = self._on_way + 1
        self._free_s = now_s + PACKET_BITS / min(self._control.rate_bps, run.setup.nic_bps)
        run.sent += 1
        wire_s = PACKET_BITS / run.setup.nic_bps + run.hop_s
        run.events.later(wire_s, run.at_first, (self._flow, now_s, False))
        self.wake()

    def _timer(self, _: Any) -> None:
        events, control = self._run.events, self._control
        # The control can have postponed its timer since this call was registered.
        if events.now_s >= control.timer_s - 1e-12:
            control.timer(events.now_s)
        if control.timer_s < self._run.setup.most_s:
            events.later(max(0.0, control.timer_s - events.now_s), self._timer, None)


class _Run:
    """The two switches and their hosts; the victim is the flow after the senders."""

    def __init__(self, setup: Setup, make: MakeControl) -> None:
        self.setup = setup
        self.events = Events()
        self.sent = 0
        self.hop_s = setup.rtt_s / _STAGES
        events, xon_bytes = self.events, setup.xon * setup.xoff_bytes
        faster = setup.up_bps / setup.nic_bps
        self._marks = Marks(setup.marking, setup.seed)
        self._marks_up = Marks(setup.marking.times(faster), setup.seed + 1)
        self._at_b = Ingress(events, self.hop_s, setup.xoff_bytes, xon_bytes)
        self._at_a = [
            Ingress(events, self.hop_s, setup.xoff_bytes, xon_bytes)
            for _ in range(setup.senders + 1)
        ]
        self.up = self._port(
            setup.up_bps, self._at_second, lambda packet: self._at_a[packet[0]].went()
        )
        self._at_b.pause = self.up.pause
        self._at_b.resume = self.up.resume
        self.bottleneck = self._port(setup.nic_bps, self._arrived, lambda _: self._at_b.went())
        self._beside = self._port(setup.nic_bps, self._arrived, lambda _: self._at_b.went())
        packets = -(-setup.total_bytes // PACKET_BYTES)
        shares = [
            packets // setup.senders + (n < packets % setup.senders) for n in range(setup.senders)
        ]
        self.senders = [
            _Sender(self, flow, count, make(setup.nic_bps, setup.rtt_s))
            for flow, count in enumerate([*shares, _ENDLESS])
        ]
        for ingress, sender in zip(self._at_a, self.senders, strict=True):
            ingress.pause = sender.pause
            ingress.resume = sender.resume
        self.missing = packets
        self.done_s = setup.most_s
        self.half: list[int] = []
        events.later(setup.ideal_s / 2, self._half_way, None)

    def run(self) -> Outcome:
        """Run until the last packet of the senders has arrived."""
        for sender in self.senders:
            sender.wake()
        self.events.run(self.setup.most_s, lambda: self.missing == 0)
        at_s = self.events.now_s
        mean, p99 = self.bottleneck.queue_bytes()
        shares = self.half or [sender.delivered for sender in self.senders[:-1]]
        squares = sum(share * share for share in shares)
        return Outcome(
            at_s if self.missing == 0 else self.setup.most_s,
            self.senders[-1].delivered * PACKET_BITS / at_s,
            self.up.paused_s / at_s,
            mean,
            p99,
            sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0,
            (self._marks.count + self._marks_up.count) / max(1, self.sent),
        )

    def at_first(self, packet: Packet) -> None:
        """A packet arrives at ToR A."""
        self._at_a[packet[0]].came()
        self.up.push(packet)

    def _at_second(self, packet: Packet) -> None:
        self._at_b.came()
        (self.bottleneck if packet[0] < self.setup.senders else self._beside).push(packet)

    def _arrived(self, packet: Packet) -> None:
        if packet[0] < self.setup.senders:
            self.missing -= 1
        self.events.later(self.hop_s, self.senders[packet[0]].acknowledged, packet)

    def _half_way(self, _: Any) -> None:
        self.half = [sender.delivered for sender in self.senders[:-1]]

    def _port(
        self, bps: float, sink: Callable[[Packet], None], left: Callable[[Packet], None]
    ) -> Port:
        marks = self._marks if bps == self.setup.nic_bps else self._marks_up
        return Port(self.events, marks, bps, self.hop_s, sink, left)


def simulate(setup: Setup, make: MakeControl) -> Outcome:
    """Simulate one incast; ``make`` creates the congestion control of each sender."""
    return _Run(setup, make).run()


_HPCC = "HPCC's simulation (alibaba-edu/High-Precision-Congestion-Control), scaled to 200 Gb/s"
_FAST = replace(DcqcnParameters(), increase_s=55e-6, additive_bps=1e9, hyper_bps=5e9)
_PAPER = replace(_FAST, alpha_s=50e-6, decrease_s=50e-6)
_SWIFT = SwiftParameters()


@dataclass(frozen=True, slots=True)
class Arm:
    """One control to compare, with its own settings of switches if it needs some.

    Attributes:
        source: source of the parameters; "ours" if none are published.
    """

    make: Callable[[float, float], Control]
    source: str
    marking: Marking | None = None
    xoff_bytes: int = 0

    def setup(self, base: Setup) -> Setup:
        """The incast with this arm's settings of switches."""
        return replace(
            base,
            marking=self.marking or base.marking,
            xoff_bytes=self.xoff_bytes or base.xoff_bytes,
        )


def _dcqcn(given: DcqcnParameters) -> Callable[[float, float], Control]:
    return lambda line_bps, rtt_s: Dcqcn(given, line_bps, rtt_s)


def _swift(given: SwiftParameters) -> Callable[[float, float], Control]:
    return lambda line_bps, rtt_s: Swift(given, line_bps, rtt_s)


ARMS: dict[str, Arm] = {
    "dcqcn": Arm(_dcqcn(DcqcnParameters()), f"Mellanox's timers in {_HPCC}"),
    "dcqcn-fast": Arm(_dcqcn(_FAST), "the same, rising every 55 us by 1 and 5 Gb/s: ours"),
    "dcqcn-paper": Arm(_dcqcn(_PAPER), f"the paper's timers in {_HPCC}; steps: ours"),
    "dcqcn-window": Arm(
        _dcqcn(replace(DcqcnParameters(), windowed=True)),
        "dcqcn with a window of one bandwidth-delay product (dcqcn_vwin there)",
    ),
    "dcqcn-deep": Arm(
        _dcqcn(_FAST),
        "dcqcn-fast, marks from 100 KB on, PFC from 4 MB on: ours",
        Marking(100_000, 400_000, 0.01),
        4_000_000,
    ),
    "swift": Arm(
        _swift(_SWIFT),
        "beta 0.8, largest cut 0.5, one packet a round trip (csg-htsim, whose authors call them a "
        "guess); target: 10 us beyond the round trip, ours",
    ),
    "hybrid": Arm(
        _swift(replace(_SWIFT, mark_gain=1 / 16)),
        "swift, and a cut by the share of marks (gain 1/16), marks from 100 KB on: ours",
        Marking(100_000, 400_000, 0.2),
    ),
    "hybrid-eager": Arm(
        _swift(replace(_SWIFT, mark_gain=1 / 16, margin_s=20e-6)),
        "hybrid, marks from 50 KB on, all from 200 KB on, target 20 us: ours",
        Marking(50_000, 200_000, 1.0),
    ),
}
