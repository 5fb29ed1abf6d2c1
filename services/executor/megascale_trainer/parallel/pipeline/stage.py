"""A virtual pipeline stage: some layers, with the embedding before the first and the head last."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from megascale_common.job.config import JobConfig
from megascale_common.sizes.parameter_slices import ModelChunk
from megascale_kernels.operators import Operators
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.embedding import embed
from megascale_trainer.model.head import loss_sums
from megascale_trainer.model.layer import batch_context, layer
from megascale_trainer.parallel.data.buffers import FlatBuffers
from megascale_trainer.parallel.tensor.sharding import TensorParallel
from megascale_trainer.weights import Weights, subset


class Stage:
    """The stage's forward; autograd's backward adds to the weights' ``main_grad``.

    ``last``: the stage ends the model, and its forward is followed by :meth:`loss`. Units
    (embedding, layers, head) are entered through ``buffers``, which hold their parameters.
    """

    def __init__(
        self,
        config: JobConfig,
        chunk: ModelChunk,
        weights: Weights,
        tp: TensorParallel,
        buffers: FlatBuffers,
        operators: Operators,
    ) -> None:
        self._config, self._weights, self._tp = config, weights, tp
        self._buffers, self._operators = buffers, operators
        self.last = chunk.last
        self._layers = [
            (f"layers.{index}", config.model.window_of(index), subset(weights, f"layers.{index}."))
            for index in chunk.layers
        ]

    def forward(self, received: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Hidden states [S / tp, B, H] from those of the stage before (None: first stage)."""
        model, tp = self._config.model, self._tp
        if received is None:
            self._buffers.await_parameters("embedding")
            received = embed(batch, self._weights, model, tp)
        hidden = received
        # Masks and rotary tables are made once per micro-batch and window, not once per layer.
        windows = {window for _, window, _ in self._layers}
        contexts = {
            window: batch_context(batch, self._config, window, self._operators)
            for window in windows
        }
        for unit, window, weights in self._layers:
            # Outside the checkpoint: recomputation must not wait for parameters again or count the
            # unit's backward twice.
            hidden = self._buffers.enter(unit, hidden)
            run = partial(
                layer, context=contexts[window], weights=weights, model=model, sharding=tp
            )
            if self._config.parallelism.recompute == "full":
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden)
        return hidden

    def loss(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Objective and sums of :func:`megascale_trainer.model.head.loss_sums`; last stage only."""
        hidden = self._buffers.enter("head", hidden)
        return loss_sums(hidden, batch, self._weights, self._config, self._tp, self._operators)
