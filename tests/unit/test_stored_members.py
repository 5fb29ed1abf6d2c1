"""A member that an enum gets does not keep the build before from reading what is stored."""

from __future__ import annotations

import dataclasses
import enum
import typing
from typing import Any

import pytest

from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.cluster import Breaker, Node, Request, Tenant
from megascale_driver.core.values.job import AttemptRecord, Job
from megascale_driver.core.values.stored_fields import added_members, added_to, stored_fields
from megascale_driver.journal import codec
from megascale_driver.journal.pieces import PartEncoder

pytestmark = pytest.mark.check

# The members that each build reads which a cluster may still run. One that is not among them needs
# a form that those builds read (`added_members`): they refuse the whole row of a job for it.
# A member moves here once the build before this one knows it.
KNOWN = {
    "JobPhase": "QUEUED PREPARING STARTING RUNNING STOPPING SUSPENDED SUCCEEDED FAILED CANCELLED",
    "RestoreSource": "none memory storage",
    "FaultKind": "NODE_DEAD NODE_RESTARTED NODE_EVICTED CHECK_FAILED JOB_TOO_BIG BAD_JOB "
    "OUT_OF_MEMORY WORKER_EXITED WORKER_SYMPTOM CHECKPOINT_CORRUPT DEADLINE HANG OPEN_FAILED",
    "LeaveKind": "SUSPEND PREEMPT RESTART DRAIN",
    "ConditionType": "NOT_SAVED CHECKPOINT_FAILING",
    "TraceState": "PENDING WRITTEN SKIPPED FAILED LOST",
    "Activity": "WAITING STARTING TRAINING RESTARTING ENDING ENDED",
    "Disposition": "SCHEDULABLE CORDONED DRAINING QUARANTINED",
}
ROWS = (Job, Node, AttemptRecord, Breaker, Request, Tenant)
GONE = Fault(FaultKind.KERNEL_FAULT, "n2", 7.5, "the GPU has fallen off the bus")
DEAD = Fault(FaultKind.NODE_DEAD, "n1", 7.0, "node n1 is dead")


class EarlierKind(enum.StrEnum):
    """FaultKind before KERNEL_FAULT, as far as it is needed."""

    NODE_DEAD = "NODE_DEAD"
    WORKER_EXITED = "WORKER_EXITED"


@dataclasses.dataclass(frozen=True)
class EarlierFault:
    """Fault of that build."""

    kind: EarlierKind
    node: str
    at_s: float
    message: str
    rank: int = -1
    hard: bool = True


@dataclasses.dataclass(frozen=True)
class Owner:
    """A value with such a field of its own, which is stored by another way than those in lists."""

    kind: FaultKind = dataclasses.field(
        metadata=added_members({FaultKind.KERNEL_FAULT: FaultKind.WORKER_EXITED})
    )
    faults: tuple[Fault, ...] = ()


def test_the_build_before_reads_a_fault_of_a_new_kind_and_this_one_reads_it_as_it_was() -> None:
    stored = codec.dump(GONE)
    assert codec.load(Fault, stored) == GONE
    earlier = codec.load(EarlierFault, stored)
    assert (earlier.kind, earlier.node, earlier.hard) == (EarlierKind.WORKER_EXITED, "n2", True)
    assert codec.dump(DEAD) == codec.dump(codec.load(EarlierFault, codec.dump(DEAD)))


def test_it_is_so_in_a_row_with_parts() -> None:
    owner = Owner(FaultKind.KERNEL_FAULT, (GONE, DEAD))
    row = PartEncoder().encode("jobs/j/head", lambda _: "parts/", owner).values
    assert codec.build(Owner, row) == owner
    assert row == codec.plain(owner)
    assert row["kind"] == row["faults"][0]["kind"] == "WORKER_EXITED"


def test_a_member_of_a_later_build_is_read_in_its_earlier_form() -> None:
    values = codec.parse(codec.dump(GONE), "fault")
    (beside,) = [key for key, value in values.items() if value == "KERNEL_FAULT"]
    read = codec.build(Fault, {**values, beside: "OF_A_LATER_BUILD"})
    assert read == dataclasses.replace(GONE, kind=FaultKind.WORKER_EXITED)


def test_every_member_that_is_stored_has_a_form_that_the_build_before_reads() -> None:
    found: dict[str, set[str]] = {}
    for row in ROWS:
        _stored_members(row, {}, found, set())
    assert found == {name: set(members.split()) for name, members in KNOWN.items()}


def _stored_members(
    hint: Any, added: typing.Mapping[Any, Any], found: dict[str, set[str]], seen: set[Any]
) -> None:
    """Collect for each enum below a type what may be stored of it."""
    for argument in typing.get_args(hint):
        _stored_members(argument, added, found, seen)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        forms = {added.get(member, member).value for member in hint}
        found[hint.__name__] = found.get(hint.__name__, set()) | forms
    elif dataclasses.is_dataclass(hint) and hint not in seen:
        seen.add(hint)
        hints = typing.get_type_hints(hint)
        for field in stored_fields(typing.cast(type[Any], hint)):
            _stored_members(hints[field.name], added_to(field), found, seen)
