"""The experts of a layer over the ep group: rows out, two products, rows back, and the gradients.

Each choice of a token is a row. Rows go to the rank of their expert, are multiplied there, and come
back to be summed in the order of the token's choices. The router's weight of a row is applied in
the activation between the products (:mod:`megascale_kernels.expert_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from megascale_common.node.spans.ops import COMBINE, DISPATCH, EXPERTS, ROUTER, Op
from megascale_kernels import router
from megascale_kernels.expert_operators import ExpertOperators
from megascale_kernels.expert_rows import RowPlan
from megascale_kernels.grouped_gemm import ExpertGroups
from megascale_kernels.quantize import Factor
from megascale_kernels.router import RouterSettings, Routing
from megascale_kernels.torch_calls import apply
from megascale_trainer.parallel.expert.exchange import (
    Exchange,
    RowExchange,
    row_exchange,
    token_exchange,
)
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.linear import Product
from megascale_trainer.parallel.tensor.sharding import TensorParallel
from megascale_trainer.weights import Weight

Rows = TypeVar("Rows")  # rows as the products read them: a tensor, or FP8 with scales


class ExpertArithmetic(Protocol[Rows]):
    """A number format of the experts' products."""

    def spread(self, x: torch.Tensor, plan: RowPlan) -> Rows:
        """Each row a copy of its token in ``x`` [tokens, columns]."""
        ...

    def activate(self, h: torch.Tensor, weights: torch.Tensor) -> Rows:
        """[rows, width] of ``h`` [rows, 2 width] and the rows' weights, float32 [rows]."""
        ...

    def activation_gradient(
        self, d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Rows, torch.Tensor]:
        """The gradients of ``h`` and of ``weights``."""
        ...

    def forward(
        self, rows: Rows, weight: Weight, groups: ExpertGroups, product: Product
    ) -> torch.Tensor:
        """Rows [rows, in] times their experts' ``weight`` [experts, out, in]: [rows, out].

        ``product``: the first of the two products is like a column-parallel one, the second like a
        row-parallel one.
        """
        ...

    def input_gradient(self, d_rows: Rows, weight: Weight, groups: ExpertGroups) -> torch.Tensor:
        """Rows [rows, out] times their experts' ``weight`` over its rows: [rows, in]."""
        ...

    def accumulate(
        self, main_grad: torch.Tensor, d_rows: Rows, rows: Rows, groups: ExpertGroups
    ) -> None:
        """``main_grad`` [experts, out, in] += each expert's d_rows^T @ rows."""
        ...

    def tensors(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """The tensors of ``rows``, whose first dimension is that of the rows."""
        ...

    def rows(self, tensors: Sequence[torch.Tensor]) -> Rows:
        """The reverse of :meth:`tensors`."""
        ...


class UnscaledExperts:
    """bf16 or float32: see :class:`ExpertArithmetic`."""

    def __init__(self, operators: ExpertOperators) -> None:
        self._operators = operators
        self.spread = operators.spread
        self.activate = operators.activate

    def activation_gradient(
        self, d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d_h, d_weights = self._operators.activation_gradient(d_result, h, weights)
        assert d_weights is not None, "weights were given"
        return d_h, d_weights

    def forward(
        self, rows: torch.Tensor, weight: Weight, groups: ExpertGroups, product: Product
    ) -> torch.Tensor:
        value = weight.value.detach()
        out = rows.new_empty((rows.shape[0], value.shape[1]))
        self._operators.multiply(Factor(rows), Factor(value), groups, out)
        return out

    def input_gradient(
        self, d_rows: torch.Tensor, weight: Weight, groups: ExpertGroups
    ) -> torch.Tensor:
        value = weight.value.detach()
        out = d_rows.new_empty((d_rows.shape[0], value.shape[2]))
        self._operators.multiply(Factor(d_rows), Factor(value), groups, out, over_rows=True)
        return out

    def accumulate(
        self,
        main_grad: torch.Tensor,
        d_rows: torch.Tensor,
        rows: torch.Tensor,
        groups: ExpertGroups,
    ) -> None:
        self._operators.add_weight_gradients(d_rows, rows, groups, main_grad)

    def tensors(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,)

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        [rows] = tensors
        return rows


@dataclass(frozen=True)
class ExpertParallel(Generic[Rows]):
    """The experts over an ep group: see :class:`megascale_trainer.model.sharding.ExpertSharding`.

    Args:
        group: the ep ranks, each with a part of the experts.
        tp, cp: the ranks that share a sequence.
        arithmetic: the number format of the products.
        operators: those outside of the products.
        by_token: the ranks gather tokens instead of exchanging rows.
    """

    group: Group
    tp: TensorParallel
    cp: Group
    arithmetic: ExpertArithmetic[Rows]
    operators: ExpertOperators
    by_token: bool = False

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device in a layer: then no CUDA graph can hold it."""
        return self.operators.waits or (self.group.size > 1 and not self.by_token)

    def route(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        sequences: int,
        settings: RouterSettings,
        *,
        by_turn: bool,
    ) -> Routing:
        """See :class:`megascale_trainer.model.sharding.ExpertSharding`."""
        with self.group.timer.span(ROUTER):
            logits = self.tp.whole(x, weight)
            if by_turn:
                logits = router.by_turn(logits, settings.top_k)
            return self.operators.route(logits, bias, sequences, settings)

    def sum_over_sequence(self, counts: torch.Tensor) -> torch.Tensor:
        """See :class:`megascale_trainer.model.sharding.ExpertSharding`."""
        self.tp.all_reduce(counts)
        self.cp.all_reduce(counts)
        return counts

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        plan: RowPlan,
        into: Weight,
        out_of: Weight,
        *,
        keep_rows: bool,
    ) -> torch.Tensor:
        """See :class:`megascale_trainer.model.sharding.ExpertSharding`."""
        with self._measured(DISPATCH):  # here a rank first waits for the others
            exchange = self._exchange(routing, plan, into)
        call = _Call(self, exchange, into, out_of, keep_rows)
        y: torch.Tensor = apply(_Experts, x, routing.weights, into.value, out_of.value, call)
        return y

    def _exchange(self, routing: Routing, plan: RowPlan, into: Weight) -> Exchange:
        if self.by_token and self.group.size > 1:
            return token_exchange(routing.chosen, into.value.shape[0], self.group)
        return row_exchange(plan, self.group)

    def rows_of(self, x: torch.Tensor, exchange: Exchange) -> Rows:
        """The rows of this rank's experts, of all tokens of the group."""
        arithmetic = self.arithmetic
        with self._measured(DISPATCH):
            spread = arithmetic.spread(exchange.gathered(x), exchange.plan)
            return arithmetic.rows([exchange.there(part) for part in arithmetic.tensors(spread)])

    def weights_of(self, weights: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """float32 [rows]: the router's ``weights`` [tokens, top_k] of these rows."""
        with self._measured(DISPATCH):
            return exchange.there(exchange.gathered(weights).flatten()[exchange.plan.choice])

    def joined(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """The sum of each token's rows, which come back from the ranks of their experts."""
        with self._measured(COMBINE):
            return exchange.reduced(self.operators.join(exchange.back(rows), exchange.plan))

    def of_choices(self, values: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """[tokens, top_k] of this rank from a value for each row: the reverse of weights_of."""
        plan = exchange.plan
        with self._measured(COMBINE):
            own = torch.where(plan.here, exchange.back(values)[plan.place], 0.0)
            return exchange.reduced(own)

    def _measured(self, op: Op) -> AbstractContextManager[None]:
        """A span of the exchange; with one rank the rows stay where they are."""
        return self.group.timer.span(op if self.group.size > 1 else EXPERTS)

    def accumulate(
        self, main_grad: torch.Tensor, d_rows: Rows, rows: Rows, exchange: Exchange
    ) -> None:
        """Add the gradient of each expert, or of each rank's rows apart if there is room for it."""
        if main_grad.dim() == 3:
            self.arithmetic.accumulate(main_grad, d_rows, rows, exchange.groups)
            return
        ranks, experts = main_grad.shape[:2]
        apart = torch.zeros(
            (experts * ranks, *main_grad.shape[2:]), dtype=main_grad.dtype, device=main_grad.device
        )
        assert isinstance(exchange, RowExchange), "with all tokens the ranks have one order"
        self.arithmetic.accumulate(apart, d_rows, rows, exchange.by_rank())
        main_grad += apart.view(experts, ranks, *main_grad.shape[2:]).transpose(0, 1)


@dataclass(frozen=True)
class _Call:
    """Shared by forward and backward of one layer and micro-batch."""

    parallel: ExpertParallel[Any]
    exchange: Exchange
    into: Weight
    out_of: Weight
    keep_rows: bool


class _Experts(torch.autograd.Function):
    # The stored weights are arguments only for their edges in autograd's graph, as in
    # megascale_trainer.parallel.tensor.linear.
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        into: torch.Tensor,
        out_of: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        parallel, exchange = call.parallel, call.exchange
        arithmetic, groups = parallel.arithmetic, exchange.groups
        rows = parallel.rows_of(x, exchange)
        own = parallel.weights_of(weights, exchange)
        with parallel.group.timer.span(EXPERTS):
            h = arithmetic.forward(rows, call.into, groups, "column")
            out = arithmetic.forward(arithmetic.activate(h, own), call.out_of, groups, "row")
        ctx.call = call
        if any(ctx.needs_input_grad):
            kept = arithmetic.tensors(rows) if call.keep_rows else (x,)
            ctx.save_for_backward(h, own, *kept)
        return parallel.joined(out, exchange)

    @staticmethod
    def backward(
        ctx: Any, d_y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        call: _Call = ctx.call
        parallel, exchange = call.parallel, call.exchange
        arithmetic, groups = parallel.arithmetic, exchange.groups
        run = parallel.tp.weight_gradients.run
        h, own, *kept = ctx.saved_tensors
        d_out = parallel.rows_of(d_y.contiguous(), exchange)
        with parallel.group.timer.span(EXPERTS):
            d_a = arithmetic.input_gradient(d_out, call.out_of, groups)
            a = arithmetic.activate(h, own)
            run(partial(parallel.accumulate, call.out_of.main_grad, d_out, a, exchange))
            d_h, d_own = arithmetic.activation_gradient(d_a, h, own)
            d_rows = arithmetic.input_gradient(d_h, call.into, groups)
        d_x = parallel.joined(d_rows, exchange)
        rows = arithmetic.rows(kept) if call.keep_rows else parallel.rows_of(kept[0], exchange)
        with parallel.group.timer.span(EXPERTS):
            run(partial(parallel.accumulate, call.into.main_grad, d_h, rows, exchange))
        return d_x, parallel.of_choices(d_own, exchange), None, None, None
