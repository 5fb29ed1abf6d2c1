"""Micro-batches of a bare step: random tokens, or samples of a corpus in the order of training.

Random steps lie on the device and repeat after a number of steps that is the same in all layouts.
With one step again and again a model learns it by heart within minutes, and its device then draws
less power than one that trains on a corpus.
"""

from __future__ import annotations

import numpy as np
import torch

from megascale_job.config import JobConfig
from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.packing import Arrays, SampleStream, sample_numbers

DOCUMENT_TOKENS = 512  # mean length of random documents
_MOST_RANDOM_STEPS = 64
_RANDOM_TOKENS = 1 << 23  # of all random steps and ranks together, 32 bytes each


class Batches:
    """The micro-batches of one rank's replica.

    Raises:
        DataError: the corpus is missing, damaged, or of another vocabulary.
    """

    def __init__(self, config: JobConfig, rank: int, device: torch.device) -> None:
        self._config, self._device = config, device
        self._dp_rank = config.layout.coordinates(rank).dp
        self._stream = SampleStream.open(config) if config.data.sources else None
        self._random = [] if self._stream else self._random_steps()

    def step(self, number: int) -> list[MicroBatch]:
        """The micro-batches of the step after ``number`` completed ones, on the device.

        It never waits for the device.
        """
        if self._stream is None:
            return self._random[number % len(self._random)]
        first = number * self._config.training.global_batch_size
        rows = [[self._stream.sample(sample) for sample in row] for row in self._numbers(first)]
        return [self._to_device(_stack(samples)) for samples in rows]

    def _random_steps(self) -> list[list[MicroBatch]]:
        samples = self._config.training.global_batch_size
        tokens = samples * self._config.model.sequence_length
        steps = max(1, min(_MOST_RANDOM_STEPS, _RANDOM_TOKENS // tokens))
        return [self._random_step(step * samples) for step in range(steps)]

    def _random_step(self, first: int) -> list[MicroBatch]:
        rows = [
            [_random_sample(self._config, number) for number in row] for row in self._numbers(first)
        ]
        return [self._to_device(_stack(samples)) for samples in rows]

    def _numbers(self, first: int) -> list[list[int]]:
        """The samples of this replica, by micro-batch, in the step that starts at sample ``first``.

        The step has the same samples for any dp.
        """
        config, size = self._config, self._config.training.micro_batch_size
        found = sample_numbers(
            first, config.micro_batches, size, config.parallelism.dp, self._dp_rank
        )
        return [[int(number) for number in row] for row in found]

    def _to_device(self, arrays: Arrays) -> MicroBatch:
        batch = MicroBatch.from_numpy(arrays)
        return batch.pin().to(self._device) if self._device.type == "cuda" else batch


def _stack(samples: list[Arrays]) -> Arrays:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _random_sample(config: JobConfig, number: int) -> Arrays:
    length, generator = config.model.sequence_length, np.random.default_rng(number)
    tokens = generator.integers(0, config.model.vocab_size, length + 1)
    start = np.zeros(length, np.int64)
    if config.data.document_attention:
        begins = np.flatnonzero(generator.random(length) < 1 / DOCUMENT_TOKENS)
        start[begins] = begins
        np.maximum.accumulate(start, out=start)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "loss_weight": np.ones(length, np.float32),
        "position": np.arange(length) - start,
        "document_start": start,
    }
