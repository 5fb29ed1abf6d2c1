"""Figures of experts in records and spans: how evenly a router spreads its choices.

A record has a bounded number of them, however many layers and experts there are: the largest and
the smallest load, and the hottest expert of each of the layers with the hottest ones. They are of
the pipeline stage of the rank that reports. Each rank passes on its own share of the rows with its
spans, so that the driver can tell a rank with hot experts from a slow one
(megascale_driver.analysis.spans.routing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megascale_common.node.spans.ops import EXPERT_SHARE, HOT_EXPERT
from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_table import model_chunks

if TYPE_CHECKING:  # the output of a run by hand begins before torch is loaded
    from megascale_trainer.telemetry.timer import StepTimer
    from megascale_trainer.trainer import StepRecord

MAX_HOT_LAYERS = 8  # in a record
MAX_HOT_OF_RANK = 3  # passed on with a step
# The share of the rows from which a rank's hottest experts are passed on: they explain its time.
HOT_SHARE = 1.05


@dataclass(frozen=True, slots=True, order=True)
class ExpertLoad:
    """An expert's share of its layer's choices, times the number of experts: 1 is even."""

    load: float
    layer: int
    expert: int


class ExpertLoads:
    """Reads the records of one rank. ``layers``: those of its stage that have experts."""

    def __init__(self, config: JobConfig, rank: int) -> None:
        layout, count = config.layout, config.model.experts.count
        at = layout.coordinates(rank)
        self.layers = tuple(
            layer
            for chunk in model_chunks(config, at.pp)
            for layer in chunk.layers
            if config.model.has_experts(layer)
        )
        each, index = count // layout.ep, layout.index_in(at, "ep")
        self._all = range(count)
        self._own = range(index * each, (index + 1) * each)

    def values(self, record: StepRecord) -> dict[str, Any]:
        """The fields of megascale.v1.StepRecord about experts; none for a dense model.

        While there are no loads (of a step before the first one, on a stage of dense layers) only
        the losses.
        """
        if not self._all:
            return {}
        found: dict[str, Any] = {"balance": record.balance, "router_z": record.router_z}
        hottest = self._hottest(record, self._all)
        if hottest:
            found["expert_load_max"] = hottest[0].load
            found["expert_load_min"] = min(map(min, filter(_is_known, record.expert_loads)))
            found["hot_experts"] = [
                {"layer": one.layer, "expert": one.expert, "load": one.load}
                for one in hottest[:MAX_HOT_LAYERS]
            ]
        return found

    def pass_on(self, record: StepRecord, timer: StepTimer) -> None:
        """Add this rank's share, and its hottest experts where it is a hot one, to the spans.

        A record has the figures of the step before it.
        """
        step, share = record.step - 1, record.expert_share
        if step < 1 or not (math.isfinite(share) and share > 0):
            return
        timer.figure(EXPERT_SHARE, step, share)
        if share >= HOT_SHARE:
            for one in self._hottest(record, self._own)[:MAX_HOT_OF_RANK]:
                timer.figure(HOT_EXPERT, step, one.load, micro_batch=one.expert, seq=one.layer)

    def _hottest(self, record: StepRecord, experts: range) -> list[ExpertLoad]:
        """The hottest of these experts in each layer, the hottest first."""
        if not record.expert_loads:
            return []
        found = []
        for layer, loads in zip(self.layers, record.expert_loads, strict=True):
            if _is_known(loads):
                chosen = loads[experts.start : experts.stop]
                load = max(chosen)
                found.append(ExpertLoad(load, layer, experts.start + chosen.index(load)))
        return sorted(found, reverse=True)


def _is_known(loads: tuple[float, ...]) -> bool:
    """False where no token has chosen an expert: all are zero before a run's first step."""
    total = sum(loads)
    return math.isfinite(total) and total > 0


def in_words(values: Mapping[str, Any]) -> list[str]:
    """The balance loss and the largest load of a record for a line; none for a dense model."""
    if "balance" not in values:
        return []
    parts = [f"balance {values['balance']:.4f}"]
    if "expert_load_max" in values:
        parts.append(f"largest expert load {values['expert_load_max']:.2f}")
    return parts
