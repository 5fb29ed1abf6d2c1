"""This node's part in an attempt, as a state machine without I/O.

It is level-triggered: :meth:`AttemptState.next_action` compares the newest desired state with the
present state, and it does not matter which desired states were missed in between.

Note [Two-phase open]
~~~~~~~~~~~~~~~~~~~~~
An attempt starts in two phases. In PREPARE every node checks itself and its daemon, and the node of
rank 0 binds the rendezvous store's socket. Only when all nodes have reported PREPARED does the
driver open the attempt in the job's commit log (if the job writes checkpoints), which fences all
earlier attempts, and send START with the store's endpoint and the restore plan. So no worker starts
before every node is ready, and no worker of an earlier attempt can commit once a new one runs.

START therefore requires PREPARED of the same attempt on this node. An agent that was restarted in
between has neither the check results nor the bound socket, and refuses START (REFUSE_START); the
driver then opens another attempt.

Note [Fencing]
~~~~~~~~~~~~~~
Desired states carry the leader's epoch and a version. A lower epoch comes from a leader that was
superseded, a lower version of the same epoch from a message that was overtaken: both are refused.
A higher epoch resets the version, because each leader counts its own versions from 1.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.errors import StaleStateError

# Generated enums are plain numbers at run time; this name exists for the type checker.
Phase: TypeAlias = "link_pb2.AttemptPhase.ValueType"
IDLE = link_pb2.ATTEMPT_PHASE_IDLE
PREPARING = link_pb2.ATTEMPT_PHASE_PREPARING
PREPARED = link_pb2.ATTEMPT_PHASE_PREPARED
STARTING = link_pb2.ATTEMPT_PHASE_STARTING
RUNNING = link_pb2.ATTEMPT_PHASE_RUNNING
FAILED = link_pb2.ATTEMPT_PHASE_FAILED
FINISHED = link_pb2.ATTEMPT_PHASE_FINISHED


class AttemptAction(enum.Enum):
    """The next action of the node towards the desired state."""

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
    """One attempt of one job; ("", 0) is none."""

    job: str = ""
    attempt: int = 0


NO_ATTEMPT = AttemptKey()


@dataclass(slots=True)
class AttemptState:
    """Desired and actual state of the node. It changes through the methods only."""

    epoch_seen: EpochNumber = field(default_factory=EpochNumber)
    desired: link_pb2.DesiredState = field(default_factory=link_pb2.DesiredState)
    key: AttemptKey = NO_ATTEMPT
    phase: Phase = IDLE
    failure: str = ""
    finished_step: int = 0  # with FINISHED: the step after which the workers ended
    store_endpoint: str = ""
    checks: tuple[types_pb2.CheckResult, ...] = ()

    def see_epoch(self, epoch: EpochNumber) -> None:
        """Accept the epoch of a driver.

        Raises:
            StaleStateError: a higher one has been seen.
        """
        if epoch < self.epoch_seen:
            raise StaleStateError(
                f"epoch {epoch} is lower than {self.epoch_seen}, which this node has seen"
            )
        if epoch > self.epoch_seen:
            self.epoch_seen = epoch
            # The earlier leader's desired state stays in force until the new one has sent its own.
            self.desired = _with_version(self.desired, 0)

    def accept(self, desired: link_pb2.DesiredState) -> None:
        """Make ``desired`` the state to reach.

        Raises:
            StaleStateError: its epoch or version is lower than one accepted before.
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
            raise StaleStateError(
                f"version {desired.version} is lower than {self.desired.version}, accepted before"
            )
        self.desired = desired

    @property
    def wanted(self) -> AttemptKey:
        """The attempt that the driver wants here; NO_ATTEMPT when there is none."""
        if self.desired.phase in (link_pb2.DESIRED_PHASE_PREPARE, link_pb2.DESIRED_PHASE_START):
            return AttemptKey(self.desired.assignment.job, self.desired.assignment.attempt)
        return NO_ATTEMPT

    def next_action(self) -> AttemptAction:
        """The next action; NOTHING also while an action is in progress."""
        if self.desired.phase == link_pb2.DESIRED_PHASE_UNSPECIFIED:
            return AttemptAction.NOTHING  # no desired state yet: keep what runs
        if self.wanted != self.key:
            # The earlier attempt is stopped before anything else: its workers hold the devices, and
            # its slots must not change while a restore reads them.
            if self.key != NO_ATTEMPT:
                return AttemptAction.STOP
            prepare = self.desired.phase == link_pb2.DESIRED_PHASE_PREPARE
            return AttemptAction.PREPARE if prepare else AttemptAction.REFUSE_START
        if self.desired.phase == link_pb2.DESIRED_PHASE_START and self.phase == PREPARED:
            return AttemptAction.START
        return AttemptAction.NOTHING

    def begin(self, phase: Phase) -> None:
        """An action on the wanted attempt begins; ``phase`` is PREPARING or STARTING."""
        if phase == PREPARING:
            self.checks = ()
            self.store_endpoint = ""
        self.key = self.wanted
        self.phase = phase
        self.failure = ""
        self.finished_step = 0

    def prepared(self, store_endpoint: str, checks: tuple[types_pb2.CheckResult, ...]) -> None:
        """Checks have passed and the store is bound; ``store_endpoint`` is "" without rank 0."""
        self.phase = PREPARED
        self.store_endpoint = store_endpoint
        self.checks = checks

    def running(self) -> None:
        """All workers of the node are past rendezvous and restore."""
        if self.phase == STARTING:
            self.phase = RUNNING

    def finished(self, not_saved: str = "", step: int = 0) -> None:
        """All workers of the node ended after ``step``; ``not_saved``: why it is not saved."""
        if self.phase in (STARTING, RUNNING):
            self.phase = FINISHED
            self.failure = not_saved
            self.finished_step = step

    def fail(self, failure: str, checks: tuple[types_pb2.CheckResult, ...] | None = None) -> None:
        """The attempt failed here. Only the first failure is kept, because it causes the others."""
        if self.phase == FAILED:
            return
        self.phase = FAILED
        self.failure = failure
        if checks is not None:
            self.checks = checks

    def stopped(self) -> None:
        """No process of the attempt is left."""
        self.key = NO_ATTEMPT
        self.phase = IDLE
        self.failure = ""
        self.store_endpoint = ""
        self.finished_step = 0


def _with_version(desired: link_pb2.DesiredState, version: int) -> link_pb2.DesiredState:
    copy = link_pb2.DesiredState()
    copy.CopyFrom(desired)
    copy.version = version
    return copy
