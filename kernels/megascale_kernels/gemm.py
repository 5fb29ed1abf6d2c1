"""GEMMs in FP8, bf16 or float32, each by the fastest algorithm that was measured for its shape.

All GEMMs of a linear layer are ``left @ right^T``, written, or added to a float32 gradient in
place:

    forward            y  = x  @ w^T      x over columns, w over columns
    input gradient     dx = dy @ w        dy over columns, w over rows
    weight gradient    dw += dy^T @ x     dy over rows, x over rows

The library (:mod:`megascale_kernels.cublas_lt`) proposes algorithms. The first time that a problem
occurs, each is timed on the problem's own tensors, and the fastest is kept, in memory and in a
file. Each runs for so long that the clock falls to what the power limit allows: in training the
algorithm that takes the fewest joules is the fastest, in a short burst it may be another one.

If the library cannot be used, or has no algorithm for a problem, torch's own operators compute it,
and the log gives the cause once. Sums have a fixed order: one algorithm repeats bit for bit, but
another one rounds differently. So a job that must repeat keeps its file, or sets ``timed`` to
False, which takes the library's first proposal.
"""

from __future__ import annotations

import functools
import logging
import statistics
import threading
from pathlib import Path
from typing import Any

import torch

from megascale_kernels.cublas_lt import (
    WORKSPACE_BYTES,
    Algorithm,
    CublasLtError,
    GemmPlan,
    Library,
    Problem,
    alignment_of,
    current_stream,
    loaded_library,
    problem_of,
)
from megascale_kernels.gemm_choices import Choices
from megascale_kernels.quantize import Factor, dequantize
from megascale_kernels.torch_calls import cuda_event

PROPOSALS = 8  # algorithms that are timed for a problem
DURATION_S = 0.2  # for each; half of it lets the clock settle
_ROUNDS = 5  # rounds of a timing, whose median counts
# A later proposal replaces an earlier one only if it is faster by more than the times of one
# algorithm differ from run to run.
_MARGIN = 0.98


class Gemm:
    """GEMMs on CUDA devices; a CPU computes them in float32, for tests and dry runs.

    Args:
        file: choices of earlier runs, read and written; None: kept in memory alone.
        timed: False: take the library's first proposal instead of a measurement, without a file.
        duration_s: the time for which each of the PROPOSALS algorithms of a problem runs.
    """

    def __init__(
        self, file: Path | None = None, *, timed: bool = True, duration_s: float = DURATION_S
    ) -> None:
        self._timed = timed
        self._duration_s = duration_s
        self._choices = Choices(file if timed else None)
        self._plans: dict[tuple[Problem, torch.device], tuple[GemmPlan, Algorithm] | None] = {}
        # The same plans by the properties of a call's tensors, a key that is quicker to make than a
        # Problem: the host makes one for each GEMM.
        self._seen: dict[Any, tuple[GemmPlan, Algorithm] | None] = {}
        self._workspaces: dict[tuple[int, int], torch.Tensor] = {}
        # Autograd runs backward on a thread of its own, and a plan's descriptors hold the scales of
        # one call at a time.
        self._lock = threading.Lock()

    def multiply(
        self,
        left: Factor,
        right: Factor,
        out: torch.Tensor,
        *,
        accumulate: bool = False,
        fast: bool = True,
    ) -> None:
        """out = left @ right^T, or ``out`` += that, on the current stream.

        The first call of a problem times algorithms and waits for the device; later calls do not.

        Args:
            left: [rows, depth].
            right: [columns, depth].
            out: [rows, columns], bf16 or float32, rows of a matrix; float32 with ``accumulate``.
            fast: tensor cores sum FP8 with fewer bits than float32 has.

        Raises:
            ValueError: shapes or layouts do not fit.
        """
        if not out.is_cuda:
            problem_of(left, right, out, accumulate=accumulate, fast=fast)
            multiply_by_torch(left, right, out, accumulate=accumulate)
            return
        if _scales(left) + _scales(right) > 2:
            left, right = _by_row(left), _by_row(right)
        with self._lock:
            key = _seen_key(left, right, out, accumulate, fast)
            if key not in self._seen:
                self._seen[key] = self._plan(
                    problem_of(left, right, out, accumulate=accumulate, fast=fast), left, right, out
                )
            planned = self._seen[key]  # None: the library refused it, and torch computes it
            if planned is not None:
                plan, algorithm = planned
                stream = current_stream(out.get_device())
                try:
                    plan.run(algorithm, left, right, out, self._workspace(out, stream), stream)
                    return
                except CublasLtError as obstacle:
                    _log_once(
                        f"{obstacle} for {plan.problem.key}: torch's own operators compute such "
                        "GEMMs"
                    )
                    self._seen[key] = None
        multiply_by_torch(left, right, out, accumulate=accumulate, fast=fast)

    def _plan(
        self, problem: Problem, left: Factor, right: Factor, out: torch.Tensor
    ) -> tuple[GemmPlan, Algorithm] | None:
        """The plan of ``problem`` on the device of ``out``; made once."""
        key = problem, out.device
        if key not in self._plans:
            with torch.cuda.device(out.device):
                self._plans[key] = self._planned(problem, left, right, out)
        return self._plans[key]

    def _planned(
        self, problem: Problem, left: Factor, right: Factor, out: torch.Tensor
    ) -> tuple[GemmPlan, Algorithm] | None:
        """The plan of ``problem`` and its algorithm; None: torch's own operators compute it."""
        try:
            library = loaded_library()
            plan = GemmPlan(library, problem, out.device)
            return plan, self._choose(library, plan, left, right, out)
        except CublasLtError as obstacle:
            _log_once(f"{obstacle}: torch's own operators compute such GEMMs")
            return None

    def _choose(
        self, library: Library, plan: GemmPlan, left: Factor, right: Factor, out: torch.Tensor
    ) -> Algorithm:
        name = torch.cuda.get_device_name(out.device)
        key = f"{name}, cuBLASLt {library.version}, {plan.problem.key}"
        known = self._choices.get(key)
        if known is not None and plan.accepts(known):
            return known
        proposed = plan.algorithms(PROPOSALS)
        # A stream that captures a graph cannot be timed: its kernels only run later.
        if not self._timed or len(proposed) == 1 or torch.cuda.is_current_stream_capturing():
            return proposed[0]
        # The runs write into scratch memory: repeated accumulation would change the gradient.
        scratch = torch.zeros_like(out)
        workspace = self._workspace(out, current_stream(out.get_device()))
        times_ms = [
            time_algorithm(plan, one, left, right, scratch, workspace, duration_s=self._duration_s)
            for one in proposed
        ]
        best = 0
        for number, time_ms in enumerate(times_ms):
            if time_ms < _MARGIN * times_ms[best]:
                best = number
        self._choices.put(key, proposed[best], times_ms)
        return proposed[best]

    def _workspace(self, out: torch.Tensor, stream: int) -> torch.Tensor:
        """The workspace of ``stream``: GEMMs of two streams can run at the same time."""
        key = out.get_device(), stream
        found = self._workspaces.get(key)
        if found is None:
            found = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=out.device)
            self._workspaces[key] = found
        return found


def time_algorithm(
    plan: GemmPlan,
    algorithm: Algorithm,
    left: Factor,
    right: Factor,
    scratch: torch.Tensor,
    workspace: torch.Tensor,
    *,
    duration_s: float,
) -> float:
    """Milliseconds of one run, measured over ``duration_s``; infinite if the library refuses.

    It waits for the device. ``scratch`` is like the result and is overwritten.
    """

    stream = current_stream(scratch.get_device())

    def run(number: int) -> float:
        begin, end = cuda_event(timed=True), cuda_event(timed=True)
        begin.record()
        for _ in range(number):
            plan.run(algorithm, left, right, scratch, workspace, stream)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / number

    try:
        run(1)  # loads the kernel
        each = max(1, round(500.0 * duration_s / _ROUNDS / run(2)))
        # Half of the time: the clock falls to what the power limit allows.
        run(_ROUNDS * each)
        return statistics.median(run(each) for _ in range(_ROUNDS))
    except CublasLtError:
        return float("inf")


def _seen_key(
    left: Factor, right: Factor, out: torch.Tensor, accumulate: bool, fast: bool
) -> tuple[Any, ...]:
    a, b = left.data, right.data
    return (
        *(a.shape, b.shape, a.stride(), b.stride(), out.stride(), a.dtype, b.dtype, out.dtype),
        *(_scales(left), _scales(right), accumulate, fast, alignment_of(a, b, out)),
        out.get_device(),
    )


def _scales(factor: Factor) -> int:
    return 0 if factor.scale is None else factor.scale.numel()


def multiply_by_torch(
    left: Factor, right: Factor, out: torch.Tensor, *, accumulate: bool = False, fast: bool = True
) -> None:
    """:meth:`Gemm.multiply` by torch's own operators.

    An FP8 GEMM with ``accumulate`` writes a tensor of its own first, which is then added. A CPU
    multiplies the values of the FP8 numbers in float32.
    """
    if not out.is_cuda:
        product = dequantize(left) @ dequantize(right).t()
        out.copy_(out + product if accumulate else product)
        return
    if left.scale is None or right.scale is None:
        if not accumulate:
            _write(left.data, right.data, out)
        elif left.data.dtype == out.dtype:
            out.addmm_(left.data, right.data.t())
        else:
            torch.addmm(out, left.data, right.data.t(), out_dtype=out.dtype, out=out)
        return
    wanted, scales = out.dtype, (left.scale, right.scale)
    if left.scale.numel() + right.scale.numel() > 2:  # one for each row
        wanted = torch.bfloat16  # the only result that torch offers with scales of rows
        scales = _row_scale(left).view(-1, 1), _row_scale(right).view(1, -1)
    product = torch._scaled_mm(
        left.data, right.data.t(), *scales, out_dtype=wanted, use_fast_accum=fast
    )
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def _write(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    if left.dtype == out.dtype:
        torch.mm(left, right.t(), out=out)
    else:
        torch.mm(left, right.t(), out_dtype=out.dtype, out=out)


def _by_row(factor: Factor) -> Factor:
    """``factor`` with one scale per row: cuBLAS and torch take them on both sides or on none."""
    return Factor(factor.data, _row_scale(factor))


def _row_scale(factor: Factor) -> torch.Tensor:
    assert factor.scale is not None
    rows = factor.data.shape[0]
    return factor.scale if factor.scale.numel() == rows else factor.scale.expand(rows).contiguous()


@functools.cache
def _log_once(line: str) -> None:
    logging.getLogger(__name__).warning(line)
