"""Congestion control of one sender: DCQCN, Swift, and a hybrid of the two.

The paper says that its algorithm "combines the principles of Swift and DCQCN" (section 3.6), but
gives neither its form nor its parameters. The hybrid here is our own: Swift's target delay, and
DCQCN's cut by the smoothed share of ECN marks. Sources of the parameters: docs/network.md.

A control sets the sender's rate (``rate_bps``) and the number of packets in flight (``window``). It
is called for each acknowledgement, with the round-trip time and the mark of the packet, and for its
timers. It has no clock: each call passes the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

PACKET_BYTES = 4096
PACKET_BITS = 8 * PACKET_BYTES


class Control(Protocol):
    """The interface of a sender to its control; times in seconds."""

    rate_bps: float
    window: float
    timer_s: float  # time of the next call of `timer`; infinite: never

    def acknowledged(self, now_s: float, rtt_s: float, *, marked: bool) -> None:
        """A packet was acknowledged."""

    def timer(self, now_s: float) -> None:
        """The time of ``timer_s`` has come."""


@dataclass(frozen=True, slots=True)
class DcqcnParameters:
    """Timers and steps of DCQCN (Zhu et al., SIGCOMM 2015), named as in HPCC's simulation."""

    alpha_s: float = 1e-6
    decrease_s: float = 4e-6
    increase_s: float = 300e-6
    gain: float = 1 / 256
    additive_bps: float = 40e6
    hyper_bps: float = 400e6
    fast_stages: int = 1
    least_bps: float = 1e9
    windowed: bool = False  # at most a bandwidth-delay product in flight, as HPCC's dcqcn_vwin


class Dcqcn:
    """Rate control by marks: cuts at most once per ``decrease_s``, raises by a timer, in stages."""

    def __init__(self, given: DcqcnParameters, line_bps: float, base_rtt_s: float) -> None:
        self._given = given
        self._line = line_bps
        self.rate_bps = self._target = line_bps
        self.window = max(1.0, line_bps * base_rtt_s / PACKET_BITS) if given.windowed else math.inf
        self.timer_s = given.increase_s
        self._alpha = 1.0
        self._stage = 0
        self._first = True  # the first mark cuts at once, whatever the time
        self._decayed_s = self._cut_s = 0.0
        self._marked = False

    def acknowledged(self, now_s: float, rtt_s: float, *, marked: bool) -> None:
        """Cut the rate on a mark, if the last cut was at least ``decrease_s`` ago."""
        if not marked:
            return
        self._decay(now_s)
        self._marked = True
        if now_s - self._cut_s < self._given.decrease_s and not self._first:
            return
        self._first = False
        self._target = self.rate_bps
        self._stage = 0
        self._cut_s = now_s
        self.rate_bps = max(self._given.least_bps, self.rate_bps * (1 - self._alpha / 2))
        self.timer_s = now_s + self._given.increase_s

    def timer(self, now_s: float) -> None:
        """Raise the rate: halfway back to that before the cut, then by small, then large steps."""
        self._stage += 1
        if self._stage == self._given.fast_stages + 1:
            self._target += self._given.additive_bps
        elif self._stage > self._given.fast_stages + 1:
            self._target += self._given.hyper_bps
        self._target = min(self._target, self._line)
        self.rate_bps = min(self._line, (self.rate_bps + self._target) / 2)
        self.timer_s = now_s + self._given.increase_s

    def _decay(self, now_s: float) -> None:
        """Update alpha for all periods since the last call; only the first can have had marks."""
        periods = int((now_s - self._decayed_s) / self._given.alpha_s)
        if periods < 1:
            return
        gain = self._given.gain
        self._alpha = (1 - gain) * self._alpha + gain * self._marked
        self._alpha *= (1 - gain) ** (periods - 1)
        self._decayed_s += periods * self._given.alpha_s
        self._marked = False


@dataclass(frozen=True, slots=True)
class SwiftParameters:
    """Parameters of Swift (Kumar et al., SIGCOMM 2020): a window that keeps the delay at a target.

    ``margin_s``: target delay beyond the base round trip. ``mark_gain`` 0: marks are ignored.
    """

    margin_s: float = 10e-6
    additive: float = 1.0  # rise in packets per round trip
    beta: float = 0.8
    most_cut: float = 0.5
    scaling_s: float = 0.0  # largest addition to the target for small windows
    least_window: float = 0.001
    mark_gain: float = 0.0


class Swift:
    """Window control by delay; with ``mark_gain`` also by marks (our hybrid)."""

    def __init__(self, given: SwiftParameters, line_bps: float, base_rtt_s: float) -> None:
        self._given = given
        self._line = line_bps
        self._base_s = base_rtt_s
        self._most = max(1.0, line_bps * base_rtt_s / PACKET_BITS)
        self.window = self._most
        self.rate_bps = line_bps
        self.timer_s = math.inf
        self._cut_s = -math.inf
        self._share = 0.0
        self._rtt_s = base_rtt_s

    def acknowledged(self, now_s: float, rtt_s: float, *, marked: bool) -> None:
        """Grow the window below the target delay; above it or on a mark, cut it.

        The window is cut at most once per round trip.
        """
        given = self._given
        self._rtt_s = rtt_s
        if given.mark_gain:
            self._share += given.mark_gain * (marked - self._share)
        target_s = self._base_s + given.margin_s + self._scaling_s()
        marked_now = marked and given.mark_gain > 0
        if rtt_s < target_s and not marked_now:
            self.window += given.additive / max(self.window, 1.0)
        elif now_s - self._cut_s >= rtt_s:
            keep = 1.0
            if rtt_s >= target_s:
                keep = max(1 - given.beta * (rtt_s - target_s) / rtt_s, 1 - given.most_cut)
            if marked_now:
                keep = min(keep, 1 - self._share / 2)
            self.window *= keep
            self._cut_s = now_s
        self.window = min(max(self.window, given.least_window), 4 * self._most)
        # A window below one packet per round trip is paced.
        paced_bps = self.window * PACKET_BITS / self._rtt_s
        self.rate_bps = self._line if self.window >= 1 else min(self._line, paced_bps)

    def timer(self, now_s: float) -> None:
        """Do nothing: Swift has no timer."""

    def _scaling_s(self) -> float:
        """Addition to the target for small windows, which helps many senders to share fairly."""
        most = self._given.scaling_s
        if not most:
            return 0.0
        small, large = 0.1, 100.0
        low, high = 1 / math.sqrt(large), 1 / math.sqrt(small)
        at = 1 / math.sqrt(max(self.window, 1e-9))
        return most * min(1.0, max(0.0, (at - low) / (high - low)))
