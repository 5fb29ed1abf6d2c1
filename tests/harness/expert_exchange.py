"""Programs of a rank: rows of experts over an ep group, under any routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.harness.training import CPU, _groups, tiny_job

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_kernels.expert_operators import expert_operators
from megascale_kernels.expert_rows import RowPlan, row_plan
from megascale_kernels.router import Routing
from megascale_trainer.parallel.expert.exchange import RowExchange, row_exchange
from megascale_trainer.parallel.expert.experts import ExpertParallel, UnscaledExperts
from megascale_trainer.parallel.groups import Group, single_process_groups
from megascale_trainer.parallel.tensor.sharding import plain_tensor_parallel
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.weights import Weight

# Whole cache lines: the bits of a product on a CPU depend on the alignment of its rows.
HIDDEN, WIDTH = 16, 32


def exchange_under_any_routing(
    rank: int, world_size: int, folder: Path, *, cases: list[dict[str, Any]]
) -> list[str]:
    """Exchange and multiply rows of each case; returns what is wrong.

    A case has ``seed``, ``tokens`` of each rank, ``each`` (experts of a rank), ``top_k`` and
    ``kind``: "random", or "few" (every token of every rank chooses the same experts).
    """
    config = _config(world_size)
    groups = _groups(config, rank, folder)
    wrong = []
    for case in cases:
        for problem in _check(groups["ep"], rank, case):
            wrong.append(f"{case}: {problem}")
    destroy_groups()
    return wrong


def _config(world_size: int) -> JobConfig:
    model = {"block": "serial", "mlp": "swiglu", "bias": False}
    experts = {"count": world_size, "top_k": 1, "ffn_size": WIDTH}
    return from_accepted(
        tiny_job(
            model={**model, "experts": experts},
            parallelism={"dp": world_size, "ep": world_size},
        )
    )


def _check(ep: Group, rank: int, case: dict[str, Any]) -> list[str]:
    experts, top_k = case["each"] * ep.size, case["top_k"]
    shared = torch.Generator().manual_seed(case["seed"])
    same = torch.randperm(experts, generator=shared)[:top_k]
    into = torch.randn(experts, 2 * WIDTH, HIDDEN, generator=shared)
    out_of = torch.randn(experts, HIDDEN, WIDTH, generator=shared)
    own = torch.Generator().manual_seed(case["seed"] * 1000 + rank)
    tokens = case["tokens"][rank]
    scores = torch.rand(tokens, experts, generator=own)
    chosen = same.expand(tokens, top_k) if case["kind"] == "few" else scores.topk(top_k).indices
    chosen = chosen.to(torch.int32).contiguous()
    plan = row_plan(chosen, experts)
    exchange = row_exchange(plan, ep)
    problems = _order(ep, rank, case["each"], chosen, plan, exchange)
    x = torch.randn(tokens, HIDDEN, generator=own)
    weights = torch.rand(tokens, top_k, generator=own)
    routing = Routing(chosen, weights, torch.empty(0), torch.empty(0))
    mine = slice(rank * case["each"], (rank + 1) * case["each"])
    alone = single_process_groups()["ep"]
    found = _multiply(ep, x, routing, plan, into[mine], out_of[mine])
    by_token = found
    if len(set(case["tokens"])) == 1:  # ranks gather only equally many tokens
        by_token = _multiply(ep, x, routing, plan, into[mine], out_of[mine], by_token=True)
    wanted = _multiply(alone, x, routing, plan, into, out_of)
    problems += [
        f"{name} differs from one rank with all experts"
        for name, one, other in zip(("y", "d_x", "d_weights"), found, wanted, strict=True)
        if not torch.equal(one, other)
    ]
    problems += [
        f"{name} differs if all ranks have all tokens"
        for name, one, other in zip(("y", "d_x", "d_weights"), by_token, wanted, strict=True)
        if other.numel() and (one - other).abs().max() > 1e-5 * other.abs().max()
    ]
    return problems


def _order(
    ep: Group,
    rank: int,
    each: int,
    chosen: torch.Tensor,
    plan: RowPlan,
    exchange: RowExchange,
) -> list[str]:
    """Rows that say where they come from arrive by expert, rank and position, and come back."""
    problems = []
    expert = chosen.flatten()[plan.choice]
    labels = torch.stack((expert, torch.full_like(expert, rank), plan.choice), dim=1)
    arrived = exchange.there(labels)
    if arrived.tolist() != sorted(arrived.tolist()):
        problems.append("rows are not ordered by expert, rank and position")
    counts = [int((arrived[:, 0] == rank * each + local).sum()) for local in range(each)]
    if exchange.groups.offsets.diff().tolist() != counts:
        problems.append(f"{exchange.groups.offsets.tolist()} are not the offsets of {counts}")
    assert exchange.groups.parts is not None
    apart = [
        int(((arrived[:, 0] == rank * each + local) & (arrived[:, 1] == sender)).sum())
        for local in range(each)
        for sender in range(ep.size)
    ]
    if exchange.groups.parts.diff().tolist() != apart:
        problems.append(f"{exchange.groups.parts.tolist()} are not the parts of {apart}")
    if not torch.equal(exchange.back(arrived), labels):
        problems.append("rows do not come back as they were")
    return problems


def _multiply(
    group: Group,
    x: torch.Tensor,
    routing: Routing,
    plan: RowPlan,
    into: torch.Tensor,
    out_of: torch.Tensor,
    *,
    by_token: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients of ``x`` and of the weights."""
    operators = expert_operators("torch", torch.float32)
    tp = plain_tensor_parallel(single_process_groups().tp)
    cp = single_process_groups()["cp"]
    arithmetic = UnscaledExperts(operators)
    experts = ExpertParallel(group, tp, cp, arithmetic, operators, by_token)
    leaf, own = x.clone().requires_grad_(), routing.weights.clone().requires_grad_()
    y = experts.experts(
        leaf,
        Routing(routing.chosen, own, routing.score_sums, routing.z_sums),
        plan,
        Weight(into.clone().requires_grad_(), torch.zeros_like(into)),
        Weight(out_of.clone().requires_grad_(), torch.zeros_like(out_of)),
        keep_rows=True,
    )
    torch.autograd.backward(y.square().sum())
    assert leaf.grad is not None and own.grad is not None
    assert leaf.device == CPU
    return y.detach(), leaf.grad, own.grad
