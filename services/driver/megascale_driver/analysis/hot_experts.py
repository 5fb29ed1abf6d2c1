"""A rank whose experts are hot: the verdict in words, without the arithmetic of spans.

Such a rank computes longer because the router sends its experts more rows than those of other
ranks. It does more work, and it does that work as fast as they would: the cause is routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from megascale_job.visible import agreed

# For uneven loads. A coefficient can change while a job runs; a bias is part of the model.
REMEDY: Final = (
    "to even the loads, raise trainer.loss.global_balance or trainer.loss.sequence_balance, or "
    "trainer.model.experts.bias_rate if its router has a bias"
)


class HotExpert(NamedTuple):
    """An expert, and its share of the layer's choices times the number of experts (1: even)."""

    layer: int
    expert: int
    load: float

    def __str__(self) -> str:
        return f"expert {self.expert} of layer {self.layer} ({self.load:.1f} times an even load)"


@dataclass(frozen=True, slots=True)
class HotRank:
    """A verdict: the rows of the experts of ``rank`` make it slower than the other ranks.

    ``share``: those rows over the mean of its ep group. In spans of ``op`` they take ``ratio``
    times as long with them, ``lost_ns`` more per step, in windows from ``since_step`` on.
    ``experts``: its hottest ones, the hottest first; empty if they are not known.
    """

    rank: int
    node: str
    share: float
    op: str
    ratio: float
    lost_ns: float
    since_step: int
    last_step: int
    experts: tuple[HotExpert, ...] = ()

    @property
    def sentence(self) -> str:
        """The verdict as a sentence for people."""
        text = (
            f"rank {self.rank} on node {self.node} has hot experts ({self.share:.1f} times the "
            f"mean rows of its ep group): the cause is routing, which makes its {self.op} spans "
            f"take {100 * (self.ratio - 1):.1f} % longer ({self.lost_ns / 1e6:.2f} ms a step) "
            f"from step {self.since_step} on"
        )
        if not self.experts:
            return text
        count = len(self.experts)
        return f"{text}; the hottest {agreed(count, 'are')} {', '.join(map(str, self.experts))}"
