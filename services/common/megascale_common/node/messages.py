"""Messages of the local contract: what trainer, agent and checkpoint daemon say to each other on
one node.

Framed as :mod:`megascale_common.node.framing` says (u32 length + JSON). Every message is an object
with a ``kind``; the first message of a connection carries ``version``
(:data:`megascale_common.node.framing.PROTOCOL_VERSION`). These TypedDicts are the contract; both
sides import them from here. ``-> fds`` in a docstring means that file descriptors travel beside.

Agent and template (the process that imported torch ahead of need and forks workers), over an
inherited socket:
    template: TemplateHello when it is ready; agent: Fork -> fds, template: Forked (in the order of
    the Forks) | Exited. Agent closing the socket ends the template and its workers.
Agent and worker, over the socket passed with Fork:
    agent: Assignment (-> fds: the store's listening socket, on rank 0 only)
    worker: Running, then StepDone per step (one rank of the node's ranks per job: see ``reports``),
        Failed or Finished.
    agent: ProfileSteps at any time; the worker answers each with Profiled, steps later.
    agent: STACKS_SIGNAL at any time; the worker writes its threads' stacks to its log, even from
        inside a hung call.
    Or, instead of Assignment, agent: SelfCheck (-> fds: the store's listening socket, on rank 0 of
    several only); the forked process answers SelfChecked and exits.
Worker and checkpoint daemon, over the daemon's unix socket, strictly request and answer: Register
    -> Registered (-> fds: one per slot); Restore -> Restored | Refused; Acquire -> Acquired | Busy;
    Seal -> Sealed; Release -> Released.  Closing the connection releases what is neither sealed nor
    being persisted.
"""

from __future__ import annotations

import signal
from typing import Any, Literal, NotRequired, TypedDict

STACKS_SIGNAL = signal.SIGUSR1
ErrorKind = Literal["CHECKPOINT_CORRUPT", "DATA", "COLLECTIVE", "OUT_OF_MEMORY", "OTHER"]


class TemplateHello(TypedDict):
    """Template to agent, first message: torch is imported; forks take milliseconds from now on."""

    kind: Literal["hello"]
    version: int
    torch: str


class Fork(TypedDict):
    """Agent to template: fork a worker. -> fds: [worker's end of its agent socket, log file]."""

    kind: Literal["fork"]
    rank: int


class Forked(TypedDict):
    """Template to agent: the worker runs."""

    kind: Literal["forked"]
    rank: int
    pid: int


class Exited(TypedDict):
    """Template to agent: a worker ended. ``status`` is the exit status, or minus the signal's
    number.
    """

    kind: Literal["exited"]
    pid: int
    status: int


class Assignment(TypedDict):
    """Agent to worker: everything a rank needs to know. ``config`` is
    megascale_common.job.config.to_mapping's value.
    """

    kind: Literal["assignment"]
    version: int
    cluster: str
    node: str
    job: str
    attempt: int
    rank: int
    local_rank: int
    device_kind: Literal["cpu", "cuda"]
    device_index: int
    config: dict[str, Any]
    store_host: str
    store_port: int
    status_page: str
    loader_socket: str
    readers: int
    reader: int
    checkpoint_socket: str
    committer_endpoint: str
    restore: dict[str, Any]
    reports: bool
    run_folder: str


class SelfCheck(TypedDict):
    """Agent to a forked process: check the device, and the path to the other ranks of this node.
    Ranks are local.
    """

    kind: Literal["self_check"]
    rank: int
    world_size: int
    store_port: int
    device_kind: Literal["cpu", "cuda"]
    device_index: int
    timeout_s: float


class SelfCheckResult(TypedDict):
    """One finding; ``verdict`` is the name of a megascale.v1.CheckVerdict without its prefix."""

    name: str
    target: str
    verdict: str
    detail: str
    elapsed_s: float


class SelfChecked(TypedDict):
    """Answer to SelfCheck."""

    kind: Literal["self_checked"]
    rank: int
    results: list[SelfCheckResult]


class Running(TypedDict):
    """Worker to agent: past rendezvous and restore; the next step is ``step + 1``."""

    kind: Literal["running"]
    step: int


class StepDone(TypedDict):
    """Worker to agent: one step record. The fields are those of megascale.v1.StepRecord, times in
    seconds.
    """

    kind: Literal["step"]
    record: dict[str, Any]


class ProfileSteps(TypedDict):
    """Agent to worker: write a trace of these steps, both ends included, to ``path`` (gzipped
    Chrome JSON).

    A worker that has not reached ``first_step`` by ``not_after_s`` (Unix seconds) does not begin.
    """

    kind: Literal["profile"]
    id: str
    first_step: int
    last_step: int
    path: str
    not_after_s: float


class Profiled(TypedDict):
    """Worker to agent: what became of a trace; ``detail`` says why there is none."""

    kind: Literal["profiled"]
    id: str
    state: Literal["written", "skipped", "failed"]
    size_bytes: int
    detail: str


class Failed(TypedDict):
    """Worker to agent: it is about to exit with an error. ``detail`` names the damaged file for
    CHECKPOINT_CORRUPT.
    """

    kind: Literal["failed"]
    error_kind: ErrorKind
    error: str
    detail: str


class Finished(TypedDict):
    """Worker to agent: all steps are done and the last snapshot is committed, or given up with a
    reason.
    """

    kind: Literal["finished"]
    step: int


class Register(TypedDict):
    """Worker to daemon: the rank's slot layout
    (megascale_common.sizes.checkpoint_layout.ShardLayout.to_dict).
    """

    kind: Literal["register"]
    version: int
    job: str
    attempt: int
    rank: int
    world_size: int
    uri: str
    committer_endpoint: str
    slots: int
    layout: dict[str, Any]
    layout_info: dict[str, int]


class Registered(TypedDict):
    """Daemon to worker: slots are mapped in this order. -> fds: one per slot."""

    kind: Literal["registered"]
    slots: int
    slot_bytes: int


class Restore(TypedDict):
    """Worker to daemon: bring the state of ``plan`` into a slot, in this rank's layout."""

    kind: Literal["restore"]
    plan: dict[str, Any]


class Restored(TypedDict):
    """Daemon to worker: ``slot`` holds the state; release it when it has been read."""

    kind: Literal["restored"]
    slot: int
    source: Literal["memory", "storage"]
    small_state: dict[str, Any]
    bytes_read: int


class Refused(TypedDict):
    """Daemon to worker: the state cannot be had; ``file`` names the damaged or missing file."""

    kind: Literal["refused"]
    error_kind: ErrorKind
    error: str
    file: str


class Acquire(TypedDict):
    """Worker to daemon: reserve a slot for the snapshot after ``step``."""

    kind: Literal["acquire"]
    step: int


class Acquired(TypedDict):
    """Daemon to worker: ``slot`` is being written from now on."""

    kind: Literal["acquired"]
    slot: int


class Busy(TypedDict):
    """Daemon to worker: all slots are sealed and being persisted; skip this snapshot and count it."""

    kind: Literal["busy"]


class Seal(TypedDict):
    """Worker to daemon: the slot holds the whole state after ``step``.

    ``finite``: the update of that step had a finite loss and gradient, or was masked, which leaves
    the state as it was. All ranks say the same. A state that is not finite is not kept.
    """

    kind: Literal["seal"]
    slot: int
    step: int
    small_state: dict[str, Any]
    finite: bool


class Sealed(TypedDict):
    """Daemon to worker: the checksums of the slot are taken; persistence goes on in the background."""

    kind: Literal["sealed"]
    step: int


class Release(TypedDict):
    """Worker to daemon: give back an acquired slot unsealed, or a restored one that has been read."""

    kind: Literal["release"]
    slot: int


class Released(TypedDict):
    """Daemon to worker: the slot is free."""

    kind: Literal["released"]


class Drain(TypedDict):
    """Worker to daemon, at the end of a run: answer when ``step`` is committed, or cannot be within
    ``timeout_s``.
    """

    kind: Literal["drain"]
    step: int
    timeout_s: float


class Drained(TypedDict):
    """Daemon to worker: ``committed_step`` is the newest complete checkpoint; ``error`` says why it
    is not ``step``.
    """

    kind: Literal["drained"]
    committed_step: int
    error: NotRequired[str]
