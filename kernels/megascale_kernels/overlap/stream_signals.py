"""Signals between devices that streams write and await without a kernel.

A kernel that signals after a GEMM that fills every multiprocessor starts only when the GEMM ends,
and a kernel that waits occupies a multiprocessor. The device's front end executes the driver's
memory operations of streams (CUDA driver API, "Stream Memory Operations"): a stream writes a word
of a peer's memory, or waits until a word of its own has a value, while kernels of other streams
run. They are called in libcuda itself through ctypes, since torch has none that waits.
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


def set_word(address: int, stream: torch.cuda.Stream) -> None:
    """Set the 32-bit word at ``address``, of this device or a peer's, to 1.

    A reader of the 1 sees the results of all work that ``stream`` got before.

    Raises:
        RuntimeError: the driver refuses it.
    """
    _enqueue([_Operation(_WRITE, address, 1, 0)], stream)


def await_word(address: int, stream: torch.cuda.Stream) -> None:
    """Make ``stream`` wait until the word at ``address``, of this device, is 1; then set it to 0.

    Raises:
        RuntimeError: the driver refuses it.
    """
    waits = _Operation(_WAIT, address, 1, _WAIT_EQUAL)
    _enqueue([waits, _Operation(_WRITE, address, 0, 0)], stream)


def _enqueue(operations: Sequence[_Operation], stream: torch.cuda.Stream) -> None:
    array = (_Operation * len(operations))(*operations)
    if status := _batch()(stream.cuda_stream, len(operations), array, 0):
        raise RuntimeError(f"cuStreamBatchMemOp failed with CUDA driver error {status}")


@functools.cache
def _batch() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
