"""Direct calls of the cuBLASLt that torch has loaded: GEMMs with scales and accumulation.

torch's own operators cannot add an FP8 GEMM to a float32 gradient in place, and offer no choice of
the algorithm. A :class:`Problem` describes a GEMM. A :class:`GemmPlan` keeps its descriptors, lists
the library's algorithms for it and runs one. Numbers of enumerations are those of cublasLt.h
(cuBLAS 12 and 13).

Rows and columns are those of row-major matrices, as torch has them. cuBLAS counts columns first, so
it computes out^T = right @ left^T: its A is ``right``, its B ``left``.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megascale_kernels.quantize import E4M3, E5M2, Factor

Scaling = Literal["none", "tensor", "row"]
WORKSPACE_BYTES = 32 * 2**20  # what torch gives cuBLASLt on Hopper
CODE_BYTES = 64  # of an algorithm
ROW_SCALES_SINCE = 120900  # the first version with one scale for each row

# cudaDataType_t, cublasComputeType_t, cublasLtMatmulDescAttributes_t, ...PreferenceAttributes_t
_TYPES = {torch.float32: 0, torch.bfloat16: 14, E4M3: 28, E5M2: 29}
_COMPUTE_FLOAT32 = 68
_TRANS_A, _TRANS_B = 3, 4
_A_SCALE, _B_SCALE = 17, 18
_FAST_ACCUMULATION = 25
_A_SCALE_MODE, _B_SCALE_MODE = 31, 32
_OUTER_VECTOR = 3
_PREFERENCE_WORKSPACE, _PREFERENCE_REDUCTION = 1, 3
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D
_ADDRESS_BYTES = 8
ALIGNMENT_BYTES = 256  # no algorithm needs more
# A sum over the depth may be split only with partial sums in the workspace, which are added in
# order: results repeat bit for bit.
_REDUCTION_IN_WORKSPACE = 2


class CublasLtError(RuntimeError):
    """The library is missing, refused a call, or has no algorithm for a problem."""


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", ctypes.c_uint64 * (CODE_BYTES // 8))]


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Algorithm:
    """One way of the library to compute a problem.

    ``code`` is the library's own description, 64 bytes that only the same version understands.
    """

    code: bytes
    workspace_bytes: int


class Problem(NamedTuple):
    """out [rows, columns] = left [rows, depth] @ right [columns, depth]^T, or ``out`` += that.

    Strides count elements from row to row. A factor that is ``upright`` is contiguous down its rows
    instead (a transposed view), and its stride is from column to column. ``fast``: tensor cores sum
    FP8 with fewer bits, which takes less time. ``alignment``: all addresses are multiples of it, in
    bytes.
    """

    rows: int
    columns: int
    depth: int
    left_dtype: torch.dtype
    right_dtype: torch.dtype
    out_dtype: torch.dtype
    left_stride: int
    right_stride: int
    out_stride: int
    left_upright: bool
    right_upright: bool
    scaling: Scaling
    accumulate: bool
    fast: bool
    alignment: int

    @property
    def key(self) -> str:
        """All fields in one line, for a file."""
        names = [
            str(t).removeprefix("torch.")
            for t in (self.left_dtype, self.right_dtype, self.out_dtype)
        ]
        flags = f"{'T' if self.left_upright else 'N'}{'T' if self.right_upright else 'N'}"
        strides = f"{self.left_stride},{self.right_stride},{self.out_stride}"
        shape = f"{self.rows}x{self.columns}x{self.depth}"
        modes = f"{self.scaling} accumulate={self.accumulate:d} fast={self.fast:d}"
        return f"{shape} {' '.join(names)} {flags} {strides} {modes} align={self.alignment}"


def problem_of(
    left: Factor, right: Factor, out: torch.Tensor, *, accumulate: bool, fast: bool
) -> Problem:
    """The problem of these tensors.

    Raises:
        ValueError: shapes do not match, or cuBLAS has no such layout.
    """
    (rows, depth), (columns, other) = left.data.shape, right.data.shape
    if depth != other or tuple(out.shape) != (rows, columns):
        raise ValueError(
            f"out {tuple(out.shape)} is not {(rows, depth)} times {(columns, other)} transposed"
        )
    if out.stride(1) != 1:
        raise ValueError("the result is written row by row: its columns must be contiguous")
    left_stride, left_upright = _layout(left.data)
    right_stride, right_upright = _layout(right.data)
    return Problem(
        rows=rows,
        columns=columns,
        depth=depth,
        left_dtype=left.data.dtype,
        right_dtype=right.data.dtype,
        out_dtype=out.dtype,
        left_stride=left_stride,
        right_stride=right_stride,
        out_stride=out.stride(0),
        left_upright=left_upright,
        right_upright=right_upright,
        scaling=_scaling(left, right),
        accumulate=accumulate,
        fast=fast,
        alignment=alignment_of(left.data, right.data, out),
    )


def current_stream(device_index: int) -> int:
    """The address of the current CUDA stream; torch.cuda.current_stream takes 5 us."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


def alignment_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
    """The largest power of two up to ALIGNMENT_BYTES that divides all addresses."""
    addresses = a.data_ptr() | b.data_ptr() | out.data_ptr() | ALIGNMENT_BYTES
    return addresses & -addresses  # the lowest bit that is set in any of them


def _layout(x: torch.Tensor) -> tuple[int, bool]:
    """(stride, upright) of a matrix."""
    if x.stride(1) == 1:
        return x.stride(0), False
    if x.stride(0) == 1:
        return x.stride(1), True
    raise ValueError(
        f"a factor must be contiguous along one dimension, its strides are {x.stride()}"
    )


def _scaling(left: Factor, right: Factor) -> Scaling:
    if left.scale is None and right.scale is None:
        return "none"
    if left.scale is None or right.scale is None:
        raise ValueError("either both factors of a GEMM have a scale or none")
    return "tensor" if left.scale.numel() == 1 and right.scale.numel() == 1 else "row"


class Library:
    """The loaded library, with one handle for each device; ``version`` is 130100 for 13.1.0."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        self._functions.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._functions.cublasLtGetVersion())
        self._handles: dict[int, ctypes.c_void_p] = {}
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        # With argument types, ctypes takes addresses as plain ints: no object for each of them. A
        # small GEMM takes less time on the device than such objects take on the host.
        self._functions.cublasLtMatmul.argtypes = (
            *(pointer, pointer, pointer, pointer, pointer, pointer, pointer),
            *(pointer, pointer, pointer, pointer, pointer, ctypes.c_char_p, pointer, size, pointer),
        )
        # From a second handle of the library, since argument types hold for all calls through one.
        self._set = ctypes.CDLL(str(path)).cublasLtMatmulDescSetAttribute
        self._set.argtypes = (pointer, ctypes.c_int, pointer, size)

    def matmul(self, *arguments: Any) -> None:
        """``cublasLtMatmul``, with addresses as plain numbers. Called for each GEMM.

        Raises:
            CublasLtError: with the status that it returned.
        """
        status = self._functions.cublasLtMatmul(*arguments)
        if status:
            raise CublasLtError(f"cublasLtMatmul returned status {status}")

    def set_address(self, descriptor: int, name: int, holder: int) -> None:
        """Set an attribute to an address, which is read from the address ``holder``."""
        if status := self._set(descriptor, name, holder, _ADDRESS_BYTES):
            raise CublasLtError(f"cublasLtMatmulDescSetAttribute returned status {status}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``cublasLt<name>``.

        Raises:
            CublasLtError: with the status that it returned.
        """
        status = getattr(self._functions, f"cublasLt{name}")(*arguments)
        if status:
            raise CublasLtError(f"cublasLt{name} returned status {status}")

    def handle(self, device: torch.device) -> ctypes.c_void_p:
        """The handle of ``device``, which must be the current one in the first call."""
        index = device.index or 0
        if index not in self._handles:
            handle = ctypes.c_void_p()
            self.call("Create", ctypes.byref(handle))
            self._handles[index] = handle
        return self._handles[index]


@functools.cache
def loaded_library() -> Library:
    """The library that this process has loaded with torch.

    Raises:
        CublasLtError: there is none (torch without CUDA), or it cannot be opened.
    """
    # The same file that torch has loaded: another copy has a version and a state of its own.
    found = re.search(r"\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    if found is None:
        raise CublasLtError("torch has loaded no libcublasLt")
    try:
        return Library(Path(found[0]))
    except (OSError, AttributeError) as problem:
        raise CublasLtError(f"{found[0]} cannot be used: {problem}") from problem


class GemmPlan:
    """The descriptors of ``problem`` on ``device``, kept for the process; one thread at a time."""

    def __init__(self, library: Library, problem: Problem, device: torch.device) -> None:
        if problem.scaling == "row" and library.version < ROW_SCALES_SINCE:
            raise CublasLtError(f"cuBLASLt {library.version} has no scales for each row")
        self.problem = problem
        self._library = library
        self._handle = library.handle(device)
        self._one, self._beta = (
            ctypes.byref(ctypes.c_float(value)) for value in (1.0, float(problem.accumulate))
        )
        # The library reads the address of a scale from memory: a holder each for A's and B's, and
        # the addresses of the holders.
        self._scales = tuple((ctypes.c_uint64(), name) for name in (_A_SCALE, _B_SCALE))
        self._holders = tuple(ctypes.addressof(holder) for holder, _ in self._scales)
        self._operation = ctypes.c_void_p()
        library.call(
            "MatmulDescCreate",
            ctypes.byref(self._operation),
            _COMPUTE_FLOAT32,
            _TYPES[torch.float32],
        )
        self._descriptor = int(self._operation.value or 0)
        # cuBLAS reads a row-major matrix as its transpose: A, the right factor, is transposed back,
        # and B, the left one, is not. For an upright factor it is the opposite.
        self._set(_TRANS_A, ctypes.c_int32(not problem.right_upright))
        self._set(_TRANS_B, ctypes.c_int32(problem.left_upright))
        if problem.scaling != "none":
            self._set(_FAST_ACCUMULATION, ctypes.c_int8(problem.fast))
        if problem.scaling == "row":
            for mode, scale in ((_A_SCALE_MODE, _A_SCALE), (_B_SCALE_MODE, _B_SCALE)):
                self._set(mode, ctypes.c_int32(_OUTER_VECTOR))
                # In this mode the search for algorithms requires addresses of scales, but reads
                # nothing from them: any aligned number will do.
                self._set(scale, ctypes.c_void_p(ALIGNMENT_BYTES))
        rows, columns, depth = problem.rows, problem.columns, problem.depth
        self._a = self._matrix(
            problem.right_dtype, columns, depth, problem.right_stride, problem.right_upright
        )
        self._b = self._matrix(
            problem.left_dtype, rows, depth, problem.left_stride, problem.left_upright
        )
        self._d = self._matrix(problem.out_dtype, rows, columns, problem.out_stride, upright=False)

    def algorithms(self, limit: int) -> list[Algorithm]:
        """Up to ``limit`` algorithms for the problem, the library's own choice first.

        Raises:
            CublasLtError: there is none.
        """
        preference = ctypes.c_void_p()
        self._library.call("MatmulPreferenceCreate", ctypes.byref(preference))
        alignment = ctypes.c_uint32(self.problem.alignment)
        choices: dict[int, Any] = {
            _PREFERENCE_WORKSPACE: ctypes.c_uint64(WORKSPACE_BYTES),
            _PREFERENCE_REDUCTION: ctypes.c_uint32(_REDUCTION_IN_WORKSPACE),
            **dict.fromkeys(_PREFERENCE_ALIGNMENTS, alignment),
        }
        for name, value in choices.items():
            self._library.call(
                "MatmulPreferenceSetAttribute",
                preference,
                name,
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
            )
        found, count = (_Result * limit)(), ctypes.c_int()
        try:
            self._library.call(
                "MatmulAlgoGetHeuristic",
                self._handle,
                self._operation,
                self._a,
                self._b,
                self._d,
                self._d,
                preference,
                ctypes.c_int(limit),
                found,
                ctypes.byref(count),
            )
        finally:
            self._library.call("MatmulPreferenceDestroy", preference)
        results = [found[number] for number in range(count.value) if found[number].state == 0]
        if not results:
            raise CublasLtError(f"cuBLASLt has no algorithm for {self.problem.key}")
        return [Algorithm(bytes(result.algorithm), result.workspace_bytes) for result in results]

    def accepts(self, algorithm: Algorithm) -> bool:
        """Whether the library accepts ``algorithm``, read from a file, for this problem."""
        code, result = _Algorithm.from_buffer_copy(algorithm.code), _Result()
        try:
            self._library.call(
                "MatmulAlgoCheck",
                self._handle,
                self._operation,
                self._a,
                self._b,
                self._d,
                self._d,
                ctypes.byref(code),
                ctypes.byref(result),
            )
        except CublasLtError:
            return False
        return int(result.workspace_bytes) <= WORKSPACE_BYTES

    def run(
        self,
        algorithm: Algorithm,
        left: Factor,
        right: Factor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        stream: int,
    ) -> None:
        """Compute on ``stream`` (:func:`current_stream`).

        ``workspace`` is that stream's own, of WORKSPACE_BYTES.

        Raises:
            CublasLtError: the library refused; nothing was computed.
        """
        if left.scale is not None and right.scale is not None:
            # The device reads the scales from these addresses. The descriptor is only set if an
            # address has changed, which spares two calls into the library for most GEMMs.
            for (holder, name), place, scale in zip(
                self._scales, self._holders, (right.scale, left.scale), strict=True
            ):
                address = scale.data_ptr()
                if holder.value != address:
                    holder.value = address
                    self._library.set_address(self._descriptor, name, place)
        result = out.data_ptr()
        self._library.matmul(
            self._handle,
            self._operation,
            self._one,
            right.data.data_ptr(),
            self._a,
            left.data.data_ptr(),
            self._b,
            self._beta,
            result,
            self._d,
            result,
            self._d,
            algorithm.code,
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            stream,
        )

    def _set(self, name: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._library.call(
            "MatmulDescSetAttribute", self._operation, name, ctypes.byref(value), size
        )

    def _matrix(
        self, dtype: torch.dtype, rows: int, columns: int, stride: int, upright: bool
    ) -> ctypes.c_void_p:
        """The layout of a row-major matrix: [columns, rows], or [rows, columns] if upright."""
        layout = ctypes.c_void_p()
        sizes = (rows, columns) if upright else (columns, rows)
        self._library.call(
            "MatrixLayoutCreate",
            ctypes.byref(layout),
            _TYPES[dtype],
            *map(ctypes.c_uint64, sizes),
            ctypes.c_int64(stride),
        )
        return layout
