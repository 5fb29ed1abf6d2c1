"""Which weights of a rank are multiplied in FP8, and which buckets of parameters travel as bytes.

With ``fp8.parameter_gather: fp8`` the FP8 weights of a bucket travel as e4m3, one byte a value. The
*rest* of the bucket (biases of column-parallel projections; an embedding, a head or a layer in bf16
that shares it) arrives in bf16 by a sum over the data-parallel ranks, each of which adds what it
owns. In passes of a ring that moves 4 bytes a value, and an all-gather in bf16 moves 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_slices import Bucket, ParameterTable, StoredTensor, align

_MATRICES = "in.weight", "out.weight"
# In bytes: for other operands cuBLAS has fewer algorithms (megascale_kernels.cublas_lt).
OPERAND_ALIGNMENT = 256
_BF16_BYTES, _REST_BYTES = 2, 4  # moved of a value, in passes of a ring


@dataclass(frozen=True, slots=True)
class Fp8Bucket:
    """A bucket that travels as bytes: what it stores, in the order of their offsets."""

    buffer: str
    bucket: Bucket
    weights: tuple[StoredTensor, ...]
    rest: tuple[StoredTensor, ...]

    @property
    def elements(self) -> int:
        """Size of the bucket, padding included."""
        return self.bucket.stop - self.bucket.start

    @property
    def copied_elements(self) -> int:
        """Values of weights that do not arrive aligned, of which the operand is a copy."""
        return elements_of(
            tensor
            for tensor in self.weights
            if (tensor.offset - self.bucket.start) % OPERAND_ALIGNMENT
        )

    @property
    def rest_elements(self) -> int:
        """Size of the rest where each tensor of it begins aligned."""
        return sum(aligned(math.prod(tensor.shape)) for tensor in self.rest)


def fp8_weights(layers: Iterable[int], table: ParameterTable) -> tuple[StoredTensor, ...]:
    """The rank's matrices in ``layers``, which are in FP8."""
    prefixes = tuple(f"layers.{index}." for index in layers)
    return tuple(
        tensor
        for tensor in table.tensors
        if tensor.name.startswith(prefixes) and tensor.name.endswith(_MATRICES)
    )


def fp8_buckets(config: JobConfig, table: ParameterTable) -> tuple[Fp8Bucket, ...]:
    """The buckets that travel as bytes: those of which that way moves fewer.

    In the order of the buffers. Nothing without ``parameter_gather: fp8``.
    """
    if not config.gathers_fp8:
        return ()
    weights = {*fp8_weights(config.fp8_layers, table)}
    found = []
    for plan in table.buffers:
        for bucket in plan.buckets:
            stored = table.stored_in(plan.name, bucket)
            travelling = Fp8Bucket(
                plan.name,
                bucket,
                tuple(tensor for tensor in stored if tensor in weights),
                tuple(tensor for tensor in stored if tensor not in weights),
            )
            moved = travelling.elements + _REST_BYTES * travelling.rest_elements
            if moved < _BF16_BYTES * travelling.elements:
                found.append(travelling)
    return tuple(found)


def elements_of(tensors: Iterable[StoredTensor]) -> int:
    """Values of all of them."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def aligned(elements: int) -> int:
    """``elements`` of the rest, up to the next place where a tensor begins."""
    return align(elements, OPERAND_ALIGNMENT // _BF16_BYTES)
