"""A layer as the operators of its sub-blocks, chosen per layer."""

from __future__ import annotations

from typing import Literal

from megascale_job.blocks.attention import attention_block
from megascale_job.blocks.mlp import mlp_block
from megascale_job.blocks.moe import moe_block
from megascale_job.blocks.parallel import parallel_block
from megascale_job.blocks.parts import Unit
from megascale_job.config import ModelConfig

Block = Literal["parallel", "attention", "mlp", "moe"]
_UNITS = {
    "parallel": parallel_block,
    "attention": attention_block,
    "mlp": mlp_block,
    "moe": moe_block,
}


def blocks_of(model: ModelConfig, layer: int) -> tuple[Block, ...]:
    """The sub-blocks of a layer in the order of forward; each has a module of its name here."""
    if model.block == "parallel":
        return ("parallel",)
    return ("attention", "moe" if model.has_experts(layer) else "mlp")


def layer_unit(model: ModelConfig, blocks: tuple[Block, ...]) -> Unit:
    """A layer of these sub-blocks; its names follow the prefix ``layers.N.``."""
    return tuple(operator for block in blocks for operator in _UNITS[block](model))


def layer_units(model: ModelConfig) -> tuple[Unit, ...]:
    """The units of all layers."""
    kinds = [blocks_of(model, layer) for layer in range(model.layers)]
    units = {blocks: layer_unit(model, blocks) for blocks in dict.fromkeys(kinds)}
    return tuple(units[blocks] for blocks in kinds)
