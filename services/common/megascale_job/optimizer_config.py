"""A job's section about its optimizer; :mod:`megascale_job.config` is the whole tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_job.stored import ADDED

# The optimizers that need no package; they take no options.
BUILT_IN = ("adamw", "lamb")


@dataclass(frozen=True, kw_only=True, slots=True)
class LambConfig:
    """Bounds of a parameter's norm in its trust ratio (the function phi of arXiv 1904.00962).

    ``max_weight_norm`` 0 is no upper bound. With both at 0 the ratio has the norm itself.
    """

    min_weight_norm: float = 0.0
    max_weight_norm: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer by name; ``beta1``, ``beta2`` and ``epsilon`` are AdamW's and LAMB's.

    Weight decay is not applied to norms and biases. ``clip_norm`` 0 turns clipping off. An update
    whose gradient norm, before clipping, is above ``skip_norm`` is skipped; 0: none is. ``options``
    are numbers for an optimizer of an installed package; ``lamb`` is about LAMB alone.
    """

    name: str = "adamw"
    options: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    lamb: LambConfig = field(default_factory=LambConfig, metadata=ADDED)
    skip_norm: float = field(default=0.0, metadata=ADDED)
