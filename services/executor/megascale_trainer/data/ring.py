"""The shared memory between loader and workers of a data-parallel rank: a ring of step batches.

A slot holds one step's micro-batches: five arrays [micro_batches, micro_batch_size,
sequence_length] of four-byte items, one after the other. The memory is a memfd: it has no name and
disappears with the last process that maps it. Signals are messages over the socket
(:mod:`megascale_trainer.data.loader`), and they also order accesses to the memory: a worker reads
a slot after the message that announces it, and the loader refills it after all its releases.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_job.config import JobConfig
from megascale_trainer.data.indexed import DataError

SLOTS = 3  # one step being read, the next one ready, and one being filled
_ITEM_BYTES = 4
# Token ids fit int32, the widest type that corpora commonly have; workers widen them in their copy,
# so the ring has half the size.
_RING_DTYPES: Mapping[str, str] = {
    "tokens": "<i4",
    "targets": "<i4",
    "loss_weight": "<f4",
    "position": "<i4",
    "document_start": "<i4",
}
# Dtypes of the arrays that a worker gets.
BATCH_DTYPES: Mapping[str, str] = {
    "tokens": "<i8",
    "targets": "<i8",
    "loss_weight": "<f4",
    "position": "<i8",
    "document_start": "<i4",
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the batches of one data-parallel rank; loader and worker must agree on it."""

    micro_batches: int
    micro_batch_size: int
    sequence_length: int
    dp: int
    slots: int = SLOTS

    @classmethod
    def of(cls, config: JobConfig) -> Geometry:
        """The geometry of a job.

        Raises:
            DataError: training.global_batch_size is not a multiple of micro_batch_size * dp.
        """
        rows, dp = config.training.micro_batch_size, config.parallelism.dp
        if (
            rows < 1
            or config.training.global_batch_size < 1
            or config.training.global_batch_size % (rows * dp)
        ):
            raise DataError(
                f"trainer.training.global_batch_size={config.training.global_batch_size} is not a "
                "multiple "
                f"of micro_batch_size * dp = {rows} * {dp}; choose one that is"
            )
        return cls(config.micro_batches, rows, config.model.sequence_length, dp)

    @property
    def samples_per_step(self) -> int:
        """Samples of a whole global batch."""
        return self.micro_batches * self.micro_batch_size * self.dp

    @property
    def slot_bytes(self) -> int:
        """Bytes of one step batch."""
        items = self.micro_batches * self.micro_batch_size * self.sequence_length
        return items * _ITEM_BYTES * len(_RING_DTYPES)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the whole ring."""
        return self.slots * self.slot_bytes

    def to_message(self) -> dict[str, int]:
        """Plain values, for the wire."""
        return asdict(self)

    def views(self, memory: mmap.mmap, slot: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of ``slot``, [micro_batches, micro_batch_size, sequence_length]: views."""
        shape = (self.micro_batches, self.micro_batch_size, self.sequence_length)
        field_bytes = self.slot_bytes // len(_RING_DTYPES)
        return {
            name: np.ndarray(shape, dtype, memory, slot * self.slot_bytes + number * field_bytes)
            for number, (name, dtype) in enumerate(_RING_DTYPES.items())
        }


def create_memory(geometry: Geometry, name: str) -> tuple[int, mmap.mmap]:
    """A new ring: its descriptor, to hand to readers, and its mapping.

    Raises:
        DataError: there is not enough memory; nothing is left behind.
    """
    descriptor = os.memfd_create(f"megascale-{name}", os.MFD_CLOEXEC)
    try:
        # Reserve all pages now: a page that cannot be had later is a bus error in a step.
        os.posix_fallocate(descriptor, 0, geometry.ring_bytes)
        return descriptor, mmap.mmap(descriptor, geometry.ring_bytes)
    except OSError as error:
        os.close(descriptor)
        raise DataError(
            f"no memory for a data ring of {geometry.ring_bytes} bytes: {error.strerror}; "
            "lower trainer.training.global_batch_size or trainer.model.sequence_length"
        ) from error


def map_for_reading(geometry: Geometry, descriptor: int) -> mmap.mmap:
    """Map a ring that was received from the loader, read only; closes ``descriptor``.

    Raises:
        DataError: the descriptor is not a ring of this geometry.
    """
    try:
        return mmap.mmap(descriptor, geometry.ring_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise DataError(f"the loader's ring cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
