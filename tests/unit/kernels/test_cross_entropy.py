"""Vocabulary-parallel cross entropy, plain and fused, against float64, over 1 to 4 ranks."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.kernels import COMPILED_ROWS, DEVICE, blank
from tests.harness.properties import examples
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_kernels.cross_entropy import CrossEntropy, Reduce, cross_entropy

TOKENS = 11


def _compile(tokens: int, width: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
    from megascale_kernels.fused import cross_entropy as fused

    logits, target = blank(tokens, width, dtype=dtype), blank(tokens, dtype=torch.int64)
    maximum, sums = fused._statistics(logits, target, columns)
    fused._gradient(logits, target, columns, maximum, sums[0], maximum, maximum)


COMPILED = {
    "cross entropy": lambda: _compile(math.prod(COMPILED_ROWS), 25600, 25599),
    "small cross entropy": lambda: _compile(16, 300, 300, torch.float32),
}


@pytest.fixture(params=["torch", "triton"])
def kernel(request: pytest.FixtureRequest) -> CrossEntropy:
    """Each implementation; they promise the same."""
    return _kernel(request.param)


def _kernel(name: str) -> CrossEntropy:
    if name == "torch":
        return cross_entropy
    pytest.importorskip("triton")
    from megascale_kernels.fused import cross_entropy as fused

    return fused.cross_entropy


class _Lockstep:
    """Reductions over threads that stand for ranks.

    One of them runs at a time, because Triton's interpreter keeps its state in module variables.
    """

    def __init__(self, ranks: int) -> None:
        self._barrier, self._parts = (
            threading.Barrier(ranks, timeout=CALL_TIMEOUT_S),
            [torch.empty(0)] * ranks,
        )
        self.turn = threading.Lock()

    def reducer(self, rank: int, *, maximum: bool) -> Reduce:
        def reduce(tensor: torch.Tensor) -> None:
            self._parts[rank] = tensor.clone()
            self._meet()
            stacked = torch.stack(self._parts)
            tensor.copy_(stacked.amax(0) if maximum else stacked.sum(0))
            self._meet()

        return reduce

    def _meet(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()


def _alone(tensor: torch.Tensor) -> None:
    """The reduction of one rank."""


def _logits(
    tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    logits = (20 * torch.randn(tokens, vocabulary, generator=generator)).to(dtype)
    return logits.to(DEVICE), torch.randint(0, vocabulary, (tokens,), generator=generator).to(
        DEVICE
    )


def _exact(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """Loss, log Z and the gradient of sum(weights[0] loss + weights[1] log Z^2), in float64."""
    exact = logits.double().requires_grad_()
    log_z = exact.logsumexp(-1)
    loss = log_z - exact.gather(1, targets[:, None])[:, 0]
    [wanted] = torch.autograd.grad((weights[0] * loss + weights[1] * log_z.square()).sum(), exact)
    return [loss.detach(), log_z.detach(), wanted]


@pytest.mark.parametrize(
    ("vocabulary", "ranks"),
    [
        (37, 1),
        (37, 2),
        pytest.param(37, 4, marks=pytest.mark.slow),
        pytest.param(9001, 1, marks=pytest.mark.slow),
        (9001, 2),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_cross_entropy(
    vocabulary: int, ranks: int, dtype: torch.dtype, tolerance: float, kernel: CrossEntropy
) -> None:
    # With 4 ranks the last one holds padding alone.
    width = 16 if ranks == 4 else -(-vocabulary // ranks) + 3
    logits, targets = _logits(TOKENS, vocabulary, dtype)
    weights = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    loss, log_z, wanted = _exact(logits, targets, weights)
    lockstep = _Lockstep(ranks)

    def rank_part(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = min(rank * width, vocabulary)
        columns = max(0, min(width, vocabulary - first))
        # Padding is larger than any logit.
        local = torch.full((TOKENS, width), 50.0, dtype=dtype, device=DEVICE)
        local[:, :columns] = logits[:, first : first + columns]
        local.requires_grad_()
        reduce_max, reduce_sum = (
            lockstep.reducer(rank, maximum=maximum) for maximum in (True, False)
        )
        with lockstep.turn:
            found_loss, found_z = kernel(
                local, targets, rank * width, columns, reduce_max, reduce_sum
            )
            objective = (weights[0] * found_loss + weights[1] * found_z.square()).sum()
            [gradient] = torch.autograd.grad(objective, local)
        assert not gradient[:, columns:].any(), "padding must have no gradient"
        return found_loss, found_z, gradient[:, :columns]

    with ThreadPoolExecutor(ranks) as pool:
        parts = list(pool.map(rank_part, range(ranks)))
    for found_loss, found_z, _ in parts:
        torch.testing.assert_close(found_loss.double(), loss, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found_z.double(), log_z, atol=2e-5, rtol=1e-5)
        assert torch.equal(found_loss, parts[0][0]), "every rank has the same loss"
    gradient = torch.cat([part for *_, part in parts], dim=1)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(
        gradient.double() / scale, wanted / scale, atol=tolerance, rtol=tolerance
    )


@examples(25)
@given(st.integers(1, 6), st.integers(1, 70), st.integers(0, 9), st.data())
def test_fused_is_plain_for_any_shape(
    tokens: int, columns: int, padding: int, data: st.DataObject
) -> None:
    fused = _kernel("triton")
    logits, _ = _logits(tokens, columns + padding)
    drawn = data.draw(st.lists(st.integers(0, columns - 1), min_size=tokens, max_size=tokens))
    targets = torch.tensor(drawn, device=DEVICE)
    found = []
    for kernel in (cross_entropy, fused):
        local = logits.clone().requires_grad_()
        loss, log_z = kernel(local, targets, 0, columns, _alone, _alone)
        found.append(
            [loss, log_z, *torch.autograd.grad(loss.sum() + 0.1 * log_z.square().sum(), local)]
        )
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-5)


def test_the_gradient_takes_the_place_of_the_logits_and_reaches_the_gemm(
    kernel: CrossEntropy,
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, table = (torch.randn(rows, 5, generator=generator).to(DEVICE) for rows in (7, 23))
    _, targets = _logits(7, 23)
    found: list[Any] = []

    def gradient_of(x: torch.Tensor, table: torch.Tensor, *, ours: bool) -> torch.Tensor:
        logits = (x @ table.t()).unflatten(0, (7, 1)).flatten(0, 1)  # a view, as in the head
        if ours:
            logits.register_hook(
                lambda gradient: found.append((logits.data_ptr(), gradient.data_ptr()))
            )
            loss, _ = kernel(logits, targets, 0, 23, _alone, _alone)
        else:
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        gradient: torch.Tensor = torch.autograd.grad(loss.sum(), table)[0]
        return gradient

    ours = gradient_of(x, table.requires_grad_(), ours=True)
    wanted = gradient_of(x.double(), table.detach().double().requires_grad_(), ours=False)
    torch.testing.assert_close(ours.double(), wanted, atol=1e-5, rtol=1e-5)
    assert found[0][0] == found[0][1], "backward made a second tensor of the size of the logits"


def test_forward_keeps_nothing_of_the_size_of_the_logits_but_the_logits(
    kernel: CrossEntropy,
) -> None:
    logits, targets = _logits(TOKENS, 370, torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kernel(logits.requires_grad_(), targets, 0, 370, _alone, _alone)
    assert kept.pop(logits.untyped_storage().data_ptr()) == logits.nbytes
    assert sum(kept.values()) < logits.nbytes / 10


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient(kernel: CrossEntropy) -> None:
    logits, targets = _logits(TOKENS, 37)
    loss, _ = kernel(logits.requires_grad_(), targets, 0, 37, _alone, _alone)
    torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss.sum(), logits)


def test_evaluation_leaves_the_logits_alone(kernel: CrossEntropy) -> None:
    logits, targets = _logits(TOKENS, 37)
    before = logits.clone()
    with torch.no_grad():
        loss, log_z = kernel(logits.requires_grad_(), targets, 0, 37, _alone, _alone)
    assert not loss.requires_grad
    assert not log_z.requires_grad
    assert torch.equal(logits, before)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_logit_breaks_the_loss_of_its_row_alone(
    broken: float, kernel: CrossEntropy
) -> None:
    logits, targets = _logits(TOKENS, 37)
    logits[4, 5] = broken
    loss, _ = kernel(logits, targets, 0, 37, _alone, _alone)
    assert loss.isfinite().logical_not().nonzero().flatten().tolist() == [4]


def test_a_whole_block_of_masked_logits_has_no_weight(kernel: CrossEntropy) -> None:
    logits, targets = _logits(TOKENS, 2500)
    logits[:, :2400], targets = float("-inf"), 2400 + targets % 100
    expected = logits.double()[:, 2400:].logsumexp(1)
    loss, log_z = kernel(logits, targets, 0, 2500, _alone, _alone)
    torch.testing.assert_close(log_z.double(), expected, atol=1e-5, rtol=1e-6)
    picked = logits.double().gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(loss.double(), expected - picked, atol=1e-5, rtol=1e-6)
