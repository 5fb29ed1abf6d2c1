"""One transformer layer: its sub-blocks one after the other, chosen per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megascale_job.blocks.layer import Block
from megascale_job.config import ModelConfig
from megascale_trainer.model.blocks.attention import attention_block
from megascale_trainer.model.blocks.mlp import mlp_block
from megascale_trainer.model.blocks.moe import moe_block
from megascale_trainer.model.blocks.parallel import parallel_block
from megascale_trainer.model.blocks.parts import Context, Input, Stream
from megascale_trainer.model.sharding import LayerSharding
from megascale_trainer.weights import Weights

_BLOCKS: dict[Block, Callable[..., Any]] = {
    "parallel": parallel_block,
    "attention": attention_block,
    "mlp": mlp_block,
    "moe": moe_block,
}


def layer(
    x: torch.Tensor,
    blocks: tuple[Block, ...],
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[S / tp, B, H] to [S / tp, B, H], and the auxiliary terms of :class:`Stream`.

    ``weights`` have their names inside the layer.
    """
    stream = Stream(x)
    for name in blocks:
        stream = _BLOCKS[name](stream, context, weights, model, sharding)
    assert stream.update is not None, "every sub-block leaves an update"
    return context.operators.add(stream.x, stream.update, stream.biases), stream.terms
