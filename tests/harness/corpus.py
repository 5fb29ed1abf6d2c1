"""Small corpora and jobs that read them, for tests of the data path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale_job.config import (
    DataConfig,
    DataSource,
    JobConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from megascale_trainer.data.indexed import IndexedWriter, token_dtype


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int = 257) -> Path:
    """Write ``documents`` (token ids) as a ``.bin``/``.idx`` pair; returns ``prefix``."""
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.int64))
    return prefix


def random_documents(seed: int, count: int, longest: int, vocab_size: int = 257) -> list[list[int]]:
    """``count`` documents of 1 to ``longest`` random tokens."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, vocab_size, generator.integers(1, longest + 1)).tolist()
        for _ in range(count)
    ]


def data_job(
    sources: Sequence[DataSource],
    *,
    sequence_length: int = 16,
    vocab_size: int = 257,
    global_batch_size: int = 8,
    micro_batch_size: int = 1,
    dp: int = 1,
    seed: int = 1234,
    document_attention: bool = True,
) -> JobConfig:
    """A job that differs from others only in what the data path reads."""
    return JobConfig(
        name="data-test",
        model=ModelConfig(
            layers=1, hidden_size=8, heads=1, vocab_size=vocab_size, sequence_length=sequence_length
        ),
        training=TrainingConfig(
            steps=1, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
        ),
        parallelism=ParallelismConfig(dp=dp),
        data=DataConfig(sources=tuple(sources), seed=seed, document_attention=document_attention),
    )
