"""Many senders to one receiver, and a victim beside them: one bottleneck, packet by packet.

    senders ─▶ ToR A ═══ one link up ═══▶ ToR B ─▶ the receiver of all senders
    victim  ─▶                                  ─▶ the receiver of the victim

The link up carries twice what a NIC sends, so it is not the bottleneck; but where ToR B's queue for
the one receiver is long, priority flow control (PFC) pauses the link, and with it the victim's
packets, which go elsewhere. How often that happens is what congestion control is for (MegaScale
section 3.6). Every figure is simulated; a setup gives the same figures each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megascale_planner.network.congestion.control import PACKET_BITS, PACKET_BYTES, Control
from megascale_planner.network.congestion.switch import (
    Events,
    Ingress,
    Marking,
    Marks,
    Packet,
    Port,
)

MOST_PACKETS = 2_000_000  # about a minute of processor time
_ENDLESS = 1 << 60
_STAGES = 4  # parts of the base round trip: three links and the way back of an acknowledgement


@dataclass(frozen=True, slots=True)
class Setup:
    """One incast. Rates in bits per second, times in seconds.

    Attributes:
        total_bytes: of all senders together.
        rtt_s: base round trip.
        xoff_bytes: of one port in; above it who sends to it is paused.
        xon: share of ``xoff_bytes`` below which it goes on.
        marking: of ports to hosts; the link up has queues as much longer as it is faster.
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
        """How long the bytes take on the receiver's link alone."""
        return self.total_bytes * 8 / self.nic_bps


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it.

    Attributes:
        done_s: when the last byte of the incast arrived; ``most_s`` where it did not.
        victim_bps: the victim's rate until then.
        paused: share of that time for which PFC stopped the link up.
        queue_mean_bytes: of ToR B's queue for the one receiver, over time.
        fairness: Jain's index of the bytes that the senders had delivered half-way.
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
    """A flow: what is left of it, what is on its way, and its control."""

    def __init__(self, run: _Run, flow: int, packets: int, control: Control) -> None:
        self._run, self._flow, self._left, self._control = run, flow, packets, control
        self.delivered = 0
        self._on_way, self._free_s = 0, 0.0
        self._asleep, self._stopped = True, False
        run.events.later(control.timer_s, self._timer, None)

    def wake(self, _: Any = None) -> None:
        """Send the next packet when it is due, if it may be sent."""
        if self._asleep and self._may_send():
            self._asleep = False
            events = self._run.events
            events.later(max(0.0, self._free_s - events.now_s), self._send, None)

    def acknowledged(self, packet: Packet) -> None:
        """A packet has arrived, and the sender hears of it."""
        self._on_way -= 1
        self.delivered += 1
        now_s = self._run.events.now_s
        self._control.acknowledged(now_s, now_s - packet[1], marked=packet[2])
        self.wake()

    def pause(self, _: Any) -> None:
        """PFC of ToR A."""
        self._stopped = True

    def go_on(self, _: Any) -> None:
        """PFC of ToR A."""
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
        self._left, self._on_way = self._left - 1, self._on_way + 1
        self._free_s = now_s + PACKET_BITS / min(self._control.rate_bps, run.setup.nic_bps)
        run.sent += 1
        wire_s = PACKET_BITS / run.setup.nic_bps + run.hop_s
        run.events.later(wire_s, run.at_first, (self._flow, now_s, False))
        self.wake()

    def _timer(self, _: Any) -> None:
        events, control = self._run.events, self._control
        if events.now_s >= control.timer_s - 1e-12:
            control.timer(events.now_s)
        if control.timer_s < self._run.setup.most_s:
            events.later(max(0.0, control.timer_s - events.now_s), self._timer, None)


class _Run:
    """The two switches and their hosts; the victim is the flow after the senders."""

    def __init__(self, setup: Setup, make: MakeControl) -> None:
        self.setup, self.events, self.sent = setup, Events(), 0
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
        self._at_b.pause, self._at_b.go_on = self.up.pause, self.up.go_on
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
            ingress.pause, ingress.go_on = sender.pause, sender.go_on
        self.missing, self.done_s = packets, setup.most_s
        self.half: list[int] = []
        events.later(setup.ideal_s / 2, self._half_way, None)

    def run(self) -> Outcome:
        """To the last packet of the senders."""
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
        """A packet has reached ToR A."""
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
    """One incast under one congestion control, which ``make`` gives to each sender."""
    return _Run(setup, make).run()
