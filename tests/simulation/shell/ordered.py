"""What operators have ordered, and what must follow from it: steps, configurations, quotas, rules.

An order counts from its answer on. While it is under way, and when it was never answered, it may
have been carried out or not: then both are right. Of two that were under way at once either may
have been the later one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megascale.v1 import driver_pb2, link_pb2, types_pb2
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_executor.agent.run.assignment import job_of
from megascale_job.loading import to_json
from megascale_job.wire import spec as job_spec

if TYPE_CHECKING:
    from tests.simulation.shell.world import World

T = TypeVar("T")
MOST_BACK = 8  # orders to go back that a job keeps
_UNLIMITED = 1 << 40
_VERDICTS = ("NODE_DEAD", "NODE_EVICTED", "HANG_SUSPECTED", "GROUP_OVER_EVICTED")


@dataclass(eq=False)
class Order:
    """One order; ``attempt`` of its job was the newest open one when it was given."""

    request: Any
    sent: int = 0  # its place among all orders and answers
    closed: int = 0  # that of its answer
    attempt: int = 0
    stored: int = 0  # commits of its job when it was given
    answered: bool = False
    refused: bool = False
    ended_by: int = 0  # the newest open attempt when it was answered
    heads: int = 0  # the newest attempt that was decided by then


@dataclass
class _Job:
    back: list[Order] = field(default_factory=list)
    updates: list[Order] = field(default_factory=list)
    first: str = ""  # the specification that it was submitted with


class Ordered:
    """Keeps the orders, and compares with them what drivers do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[str, _Job] = {}
        self._quotas: dict[str, list[Order]] = {}
        self._rules: dict[str, list[Order]] = {}
        self._places = itertools.count(1)

    # --- what is asked for

    def sent(self, request: Any) -> Order:
        """An order is on its way."""
        order = Order(request, next(self._places))
        if isinstance(request, driver_pb2.SubmitJobRequest) and request.spec.name:
            self._of(request.spec.name).first = _text(request.spec)
        elif isinstance(request, driver_pb2.UpdateJobRequest) and not request.validate_only:
            self._of(request.spec.name).updates.append(order)
        elif isinstance(request, driver_pb2.RestartJobRequest) and request.HasField("from_step"):
            storage = self._world.storage_of(request.name)
            order.attempt, order.stored = storage.opened, len(storage.commits)
            self._of(request.name).back.append(order)
        elif isinstance(request, driver_pb2.SetQuotaRequest):
            self._quotas.setdefault(request.tenant, []).append(order)
        elif isinstance(request, driver_pb2.SetPolicyRequest):
            self._rules.setdefault(request.rule, []).append(order)
        return order

    def answered(self, order: Order, code: str) -> None:
        """An order has its answer."""
        order.answered, order.closed = code == "OK", next(self._places)
        order.refused = code not in ("OK", "GIVEN_UP", "UNSURE")
        request = order.request
        name = request.name if isinstance(request, driver_pb2.RestartJobRequest) else ""
        if isinstance(request, driver_pb2.UpdateJobRequest):
            name = request.spec.name
        if name:
            order.ended_by = self._world.storage_of(name).opened
            order.heads = self._world.invariants.newest_attempt(name)

    # --- what follows

    def restored(self, job: str, step: int, by: int) -> None:
        """I7: a restore goes behind a commit only by order, and not to what that has given up.

        What was committed before the order was given is refused from its answer on, so no attempt
        is lost on it.
        """
        storage, back = self._world.storage_of(job), self._of(job).back
        for newer, writer in storage.commits:
            if newer > step and not any(_gives_up(each, newer, writer) for each in back):
                what = f"step {newer} of attempt {writer} is committed, and nobody gave it up"
                self._world.invariants.breaks("I7", f"{job} restores {step}: {what}")
        for order in back[-MOST_BACK:]:
            known = order.answered and (step, by) in storage.commits[: order.stored]
            if known and step > order.request.from_step and not self._later(job, step, order):
                what = f"{step} of attempt {by}, and was to go back to {order.request.from_step}"
                self._world.invariants.breaks("I7", f"{job} is offered {what}")

    def started(self, wanted: link_pb2.AttemptAssignment) -> None:
        """What an attempt does whose first node starts.

        I7: it does not begin above a step that it was to go back to. The committer may have offered
        one that was committed while the order was under way: then the driver opens another attempt.
        I11: it has the newest configuration that was answered before it was decided.
        """
        self._begins(wanted.job, wanted.restore.step, wanted.restore.written_by_attempt)
        mine, found = self._of(wanted.job), to_json(job_of(wanted))
        if not mine.first:
            return
        # An update that was answered later may be for the next attempt.
        allowed = _in_force(
            mine.updates,
            lambda request: _text(request.spec),
            mine.first,
            lambda order: order.heads < wanted.attempt,
        )
        if found not in allowed:
            what = f"attempt {wanted.attempt} of {wanted.job} has code {job_of(wanted).code.path!r}"
            self._world.invariants.breaks("I11", f"{what}, and not the configuration that it must")

    def _begins(self, job: str, step: int, by: int) -> None:
        for order in self._of(job).back[-MOST_BACK:]:
            given_up = order.answered and by <= order.attempt and step > order.request.from_step
            if given_up and not self._later(job, step, order):
                what = f"{step} of attempt {by}, and was to go back to {order.request.from_step}"
                self._world.invariants.breaks("I7", f"{job} begins at {what}")

    def _later(self, job: str, step: int, order: Order) -> bool:
        """Whether an order that may have been later than this one was to go back to the step."""
        return any(
            other.request.from_step == step
            and not other.refused
            and not 0 < other.closed < order.sent
            for other in self._of(job).back[-MOST_BACK:]
        )

    def placed(self, job: str, state: Cluster) -> None:
        """I11: the jobs of a tenant hold no more than its quota when one of them starts."""
        tenant = state.jobs[job].config.tenant
        limits = _in_force(self._quotas.get(tenant, []), _quota_of, _UNLIMITED)
        held = sum(
            other.config.layout.world_size
            for other in state.jobs.values()
            if other.active and other.config.tenant == tenant
        )
        if held > max(limits):
            what = f"tenant {tenant} holds {held} devices"
            self._world.invariants.breaks("I11", f"{job} is placed: {what}, of {max(limits)}")

    def enforced(self, rule: str) -> bool:
        """Whether a rule is enforced without any doubt."""
        default: int = types_pb2.POLICY_MODE_ENFORCE
        if rule == "over-eviction":
            default = types_pb2.POLICY_MODE_OBSERVE
        modes = _in_force(self._rules.get(rule, []), _mode_of, default)
        return {*modes} == {types_pb2.POLICY_MODE_ENFORCE}

    def decided(self, line: Audit) -> None:
        """I11: a verdict is enforced only by a rule that is."""
        if line.reason not in _VERDICTS or not line.log:
            return
        default: int = types_pb2.POLICY_MODE_ENFORCE
        if line.policy == "over-eviction":
            default = types_pb2.POLICY_MODE_OBSERVE
        modes = _in_force(self._rules.get(line.policy, []), _mode_of, default)
        if line.mode == "ENFORCE" and types_pb2.POLICY_MODE_ENFORCE not in modes:
            what = f"{line.reason} of {line.subject} is enforced"
            self._world.invariants.breaks("I11", f"{what}, and rule {line.policy} is observed")

    def _of(self, job: str) -> _Job:
        return self._jobs.setdefault(job, _Job())


def _gives_up(order: Order, step: int, by: int) -> bool:
    """Whether an order to go back may have given up this commit."""
    if order.refused or order.request.from_step >= step:
        return False
    return not order.answered or by <= max(order.ended_by, order.heads)


def _in_force(
    orders: list[Order],
    value: Callable[[Any], T],
    default: T,
    counts: Callable[[Order], bool] = lambda order: True,
) -> list[T]:
    """The values that may be in force now: of the newest answered order, and of those after it.

    An answer of an order that does not count says no more than none.
    """
    found: list[tuple[T, Order | None]] = [(default, None)]
    for order in orders:
        if order.answered and counts(order):
            beside = [(v, o) for v, o in found if o is not None and o.closed > order.sent]
            found = [*beside, (value(order.request), order)]
        elif not order.refused:
            found.append((value(order.request), order))
    return [v for v, _ in found]


def _quota_of(request: driver_pb2.SetQuotaRequest) -> int:
    return request.devices if request.HasField("devices") else _UNLIMITED


def _mode_of(request: driver_pb2.SetPolicyRequest) -> int:
    return request.mode


def _text(spec: Any) -> str:
    """A specification in one form, whatever is left to its defaults."""
    return to_json(job_spec.from_accepted_proto(spec))
