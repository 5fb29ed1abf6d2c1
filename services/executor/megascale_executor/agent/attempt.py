"""This node's part in an attempt, as a state machine without I/O: what is wanted, where we stand,
what to do next.

Level-triggered: only the newest desired state counts, and :meth:`AttemptState.next_action` compares
it with the present. Whatever was missed in between does not matter. Desired states are fenced: a
lower epoch, or a lower version within the epoch, is refused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from megascale.v1 import link_pb2, types_pb2

# Generated enums are plain numbers at run time; only the type checker knows this name.
Phase: TypeAlias = "link_pb2.AttemptPhase.ValueType"
IDLE = link_pb2.ATTEMPT_PHASE_IDLE
PREPARING = link_pb2.ATTEMPT_PHASE_PREPARING
PREPARED = link_pb2.ATTEMPT_PHASE_PREPARED
STARTING = link_pb2.ATTEMPT_PHASE_STARTING
RUNNING = link_pb2.ATTEMPT_PHASE_RUNNING
FAILED = link_pb2.ATTEMPT_PHASE_FAILED
FINISHED = link_pb2.ATTEMPT_PHASE_FINISHED


class AttemptAction(enum.Enum):
    """What the node has to do to come closer to the desired state."""

    NOTHING = enum.auto()
    STOP = enum.auto()
    PREPARE = enum.auto()
    START = enum.auto()
    # START of an attempt that this agent never prepared, as after its own restart.
    REFUSE_START = enum.auto()


@dataclass(frozen=True, order=True, slots=True)
class EpochNumber:
    """A driver leader's fencing token; higher wins."""

    cluster_generation: int = 0
    create_revision: int = 0

    @classmethod
    def of(cls, epoch: types_pb2.Epoch) -> EpochNumber:
        """From the wire."""
        return cls(epoch.cluster_generation, epoch.create_revision)

    def to_proto(self) -> types_pb2.Epoch:
        """To the wire."""
        return types_pb2.Epoch(
            cluster_generation=self.cluster_generation, create_revision=self.create_revision
        )


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Names one attempt of one job; ("", 0) is none."""

    job: str = ""
    attempt: int = 0


NO_ATTEMPT = AttemptKey()


class StaleDesiredState(Exception):
    """The desired state comes from a superseded driver, or is older than one taken in before."""


@dataclass(slots=True)
class AttemptState:
    """Desired and actual state of the node. Change it through the methods only."""

    epoch_seen: EpochNumber = field(default_factory=EpochNumber)
    desired: link_pb2.DesiredState = field(default_factory=link_pb2.DesiredState)
    key: AttemptKey = NO_ATTEMPT
    phase: Phase = IDLE
    failure: str = ""
    store_endpoint: str = ""
    checks: tuple[types_pb2.CheckResult, ...] = ()

    def see_epoch(self, epoch: EpochNumber) -> None:
        """Take in the epoch of a driver.

        Raises:
            StaleDesiredState: a higher one has been seen.
        """
        if epoch < self.epoch_seen:
            raise StaleDesiredState(
                f"epoch {epoch} is lower than {self.epoch_seen}, which this node has seen"
            )
        if epoch > self.epoch_seen:
            self.epoch_seen = epoch
            self.desired = _with_version(self.desired, 0)

    def accept(self, desired: link_pb2.DesiredState) -> None:
        """Make ``desired`` the state to reach.

        Raises:
            StaleDesiredState: its epoch or version is lower than one taken in before.
            ValueError: it has no phase, or PREPARE or START without an assignment.
        """
        if desired.phase not in (
            link_pb2.DESIRED_PHASE_IDLE,
            link_pb2.DESIRED_PHASE_PREPARE,
            link_pb2.DESIRED_PHASE_START,
        ):
            raise ValueError(
                f"phase {desired.phase} of a desired state is not IDLE, PREPARE or START"
            )
        if desired.phase != link_pb2.DESIRED_PHASE_IDLE and not (
            desired.assignment.job and desired.assignment.attempt
        ):
            raise ValueError("a desired state of PREPARE or START names no job and attempt")
        self.see_epoch(EpochNumber.of(desired.epoch))
        if desired.version < self.desired.version:
            raise StaleDesiredState(
                f"version {desired.version} is lower than {self.desired.version}, taken in before"
            )
        self.desired = desired

    @property
    def wanted(self) -> AttemptKey:
        """The attempt that the driver wants here; NO_ATTEMPT for idle or before the first desired
        state.
        """
        if self.desired.phase in (link_pb2.DESIRED_PHASE_PREPARE, link_pb2.DESIRED_PHASE_START):
            return AttemptKey(self.desired.assignment.job, self.desired.assignment.attempt)
        return NO_ATTEMPT

    def next_action(self) -> AttemptAction:
        """The one thing to do now; NOTHING also while an action is under way."""
        if self.desired.phase == link_pb2.DESIRED_PHASE_UNSPECIFIED:
            return AttemptAction.NOTHING  # no driver has spoken yet: whatever runs goes on
        if self.wanted != self.key:
            if self.key != NO_ATTEMPT:
                return AttemptAction.STOP
            prepare = self.desired.phase == link_pb2.DESIRED_PHASE_PREPARE
            return AttemptAction.PREPARE if prepare else AttemptAction.REFUSE_START
        if self.desired.phase == link_pb2.DESIRED_PHASE_START and self.phase == PREPARED:
            return AttemptAction.START
        return AttemptAction.NOTHING

    def begin(self, phase: Phase) -> None:
        """An action on the wanted attempt begins: PREPARING or STARTING."""
        if phase == PREPARING:
            self.checks, self.store_endpoint = (), ""
        self.key, self.phase, self.failure = self.wanted, phase, ""

    def prepared(self, store_endpoint: str, checks: tuple[types_pb2.CheckResult, ...]) -> None:
        """Devices, checks and store are ready; ``store_endpoint`` is empty on nodes without rank 0."""
        self.phase, self.store_endpoint, self.checks = PREPARED, store_endpoint, checks

    def running(self) -> None:
        """All workers of the node are past rendezvous and restore."""
        if self.phase == STARTING:
            self.phase = RUNNING

    def finished(self) -> None:
        """All workers of the node ended well."""
        if self.phase in (STARTING, RUNNING):
            self.phase = FINISHED

    def fail(self, failure: str, checks: tuple[types_pb2.CheckResult, ...] | None = None) -> None:
        """The attempt failed here; the first failure stands."""
        if self.phase == FAILED:
            return
        self.phase, self.failure = FAILED, failure
        if checks is not None:
            self.checks = checks

    def stopped(self) -> None:
        """Nothing runs any more."""
        self.key, self.phase, self.failure, self.store_endpoint = NO_ATTEMPT, IDLE, "", ""


def _with_version(desired: link_pb2.DesiredState, version: int) -> link_pb2.DesiredState:
    copy = link_pb2.DesiredState()
    copy.CopyFrom(desired)
    copy.version = version
    return copy
