"""Signals between devices that streams write and wait for without a kernel.

A barrier kernel needs a multiprocessor: behind a GEMM that fills them all it would start only when
the GEMM ends, so the GEMM had to wait for the barrier, and with it for the slowest rank. The
driver's memory operations of streams (CUDA driver API, "Stream Memory Operations") are executed by
the device's front end: a stream writes a word of a peer's memory, or stands still until a word of
its own has a value, and kernels of other streams run beside it.

They are called in libcuda itself through ctypes, since torch has no waiting one. They can be
captured: a graph repeats them with the values that they had.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

# CUstreamBatchMemOpType of cuda.h
_WAIT, _WRITE = 1, 2
_WAIT_EQUAL = 0x1  # CU_STREAM_WAIT_VALUE_EQ; a write's default flag orders all work before it


class _Operation(ctypes.Structure):
    """A CUstreamBatchMemOpParams: a union of 48 bytes, whose members begin alike."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class SignalSequence:
    """Operations that a stream does one after the other.

    Args:
        writes: addresses of 32-bit words, of this device or a peer's, that become 1: what the
            stream was given before is visible to whoever sees that.
        waits: addresses of words of this device that are waited for to be 1, and then become 0.
    """

    def __init__(self, writes: Sequence[int], waits: Sequence[int]) -> None:
        operations = [
            *(_Operation(_WRITE, address, 1, 0) for address in writes),
            *(_Operation(_WAIT, address, 1, _WAIT_EQUAL) for address in waits),
            *(_Operation(_WRITE, address, 0, 0) for address in waits),
        ]
        self._count = len(operations)
        self._operations = (_Operation * self._count)(*operations)

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        """Give the operations to ``stream``, without the host waiting.

        Raises:
            RuntimeError: the driver refuses them.
        """
        status = _batch()(stream.cuda_stream, self._count, self._operations, 0)
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp failed with CUDA driver error {status}")


@functools.cache
def _batch() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
