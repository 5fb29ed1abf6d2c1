"""Many configurations at once, as arrays of one length: what the model of a step computes with.

One configuration alone is numbers in their place (float64, the same arithmetic): an operation on an
array of one element takes several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NONE, SELECTIVE, FULL = 0.0, 1.0, 2.0
RECOMPUTE = {"none": NONE, "selective": SELECTIVE, "full": FULL}


def where(condition: Any, yes: Any, no: Any) -> Array:
    """``np.where``, which for one configuration chooses without making an array."""
    one = not isinstance(condition, np.ndarray)
    found: Array = (yes if condition else no) if one else np.where(condition, yes, no)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Configurations, each field an array [n] of float64, or one number each.

    ``vpp`` are chunks of a rank, ``window`` tokens (0: none), ``recompute`` a value of RECOMPUTE;
    ``parallel_block``, ``swiglu`` and ``zero_bubble`` are 0 or 1, ``fp8`` is the share of the
    layers that are in FP8, taken to be the same on every stage; batches are in sequences.
    ``first_layers``, ``middle_layers`` and ``last_layers`` are those of the first, the fullest of
    the middle (0: there is none) and the last pipeline stage; one stage is all of them.
    """

    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    ffn: Array
    sequence: Array
    vocabulary: Array
    tp: Array
    pp: Array
    vpp: Array
    dp: Array
    micro_batch: Array
    global_batch: Array
    recompute: Array
    window: Array
    parallel_block: Array
    swiglu: Array
    fp8: Array
    zero_bubble: Array
    first_layers: Array
    middle_layers: Array
    last_layers: Array

    @property
    def devices(self) -> Array:
        """Devices of each configuration."""
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> Array:
        """Micro-batches of a replica in a step."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def kv_width(self) -> Array:
        """Width of the keys, and of the values."""
        return self.hidden * self.kv_heads / self.heads

    @property
    def layer_weights(self) -> Array:
        """Weights of one layer's matrices."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + self.hidden * self.ffn * (2 + self.swiglu)

    @property
    def most_layers(self) -> Array:
        """Layers of the pipeline stage with most."""
        ends = np.maximum(self.first_layers, self.last_layers)
        most: Array = np.maximum(ends, self.middle_layers)
        return most

    @property
    def stage_parameters(self) -> Array:
        """Parameters of the fullest rank: a stage's layers and one embedding, split over tp.

        The first stage has the embedding and the last the head; where the middle has more layers
        than both, it counts as if it had one too.
        """
        layers = self.most_layers * (self.layer_weights + 13 * self.hidden)
        return (layers + self.vocabulary * self.hidden) / self.tp

    def norm_split(self, sequence_parallel: bool, selective_splits: bool) -> Array:
        """Ranks that norms, residuals and dropout of a micro-batch are split over."""
        split = sequence_parallel | (selective_splits & (self.recompute == SELECTIVE))
        return where(split, self.tp, 1.0)
