"""The controls that are compared, by name, each with where its parameters come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megascale_planner.network.congestion.control import (
    Control,
    Dcqcn,
    DcqcnParameters,
    Swift,
    SwiftParameters,
)
from megascale_planner.network.congestion.incast import Setup
from megascale_planner.network.congestion.switch import Marking

_HPCC = "HPCC's simulation (alibaba-edu/High-Precision-Congestion-Control), scaled to 200 Gb/s"
_FAST = replace(DcqcnParameters(), increase_s=55e-6, additive_bps=1e9, hyper_bps=5e9)
_PAPER = replace(_FAST, alpha_s=50e-6, decrease_s=50e-6)
_SWIFT = SwiftParameters()


@dataclass(frozen=True, slots=True)
class Arm:
    """One control, and where it needs other switches than the rest.

    Attributes:
        source: of the parameters; "ours" where nobody published them.
    """

    make: Callable[[float, float], Control]
    source: str
    marking: Marking | None = None
    xoff_bytes: int = 0

    def setup(self, base: Setup) -> Setup:
        """The incast with this arm's switches."""
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
