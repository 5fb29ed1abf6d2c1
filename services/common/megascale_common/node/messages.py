"""Messages of the local contract between trainer, agent and checkpoint daemon of one node.

Framed by :mod:`megascale_common.node.framing` (u32 length + JSON). Every message is an object with
a ``kind``; the first message of a connection carries ``version``
(:data:`megascale_common.node.framing.PROTOCOL_VERSION`). These TypedDicts are the contract: both
sides build and read messages through them. ``-> fds`` means that file descriptors travel with the
message.

Agent and template (the process that imported torch ahead of need and forks workers), over an
inherited socket:
    template: TemplateHello when it is ready.
    agent: Fork -> fds; template: Forked (in the order of the Forks), Exited when the process ends.
    Closing the agent's end ends the template and its workers.
Agent and worker, over the socket passed with Fork:
    agent: Assignment (-> fds: the store's listening socket, on rank 0 only).
    worker: Running, then StepDone per step (from one rank per job: see ``reports``), then Failed or
        Finished.
    agent: ProfileSteps at any time; the worker answers each with Profiled, steps later.
    agent: Leave or Stay at any time; the workers end early together, each with Finished, or, if
        they cannot save, train on, each with NotLeft.
    agent: STACKS_SIGNAL at any time; the worker writes its threads' stacks to its log, even from
        inside a hung call.
    Or, instead of Assignment, agent: SelfCheck (-> fds: the store's listening socket, on rank 0 of
    several only); the forked process answers SelfChecked and exits.
Worker and checkpoint daemon, over the daemon's unix socket; answers come in the requests' order:
    Register, Pieces... -> Registered (-> fds: one per slot), Restore -> Restored | Refused,
    those of :mod:`megascale_common.node.restore_messages`, those of a run by hand
    (:mod:`megascale_common.node.opening_messages`),
    Acquire -> Acquired | Busy, Seal -> Sealed, Release -> Released, Drain -> Drained,
    StepTime -> Pace.
    Any request that breaks the contract -> RequestFailed, after which the daemon closes the
    connection. Closing it releases what is neither sealed nor being persisted.
"""

from __future__ import annotations

import signal
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from megascale_common.node.restore_messages import RestoreAnswer, RestoreRequest

STACKS_SIGNAL = signal.SIGUSR1
# BAD_JOB: the job itself cannot run here, and another attempt would find the same.
ErrorKind = Literal["BAD_JOB", "CHECKPOINT_CORRUPT", "DATA", "COLLECTIVE", "OUT_OF_MEMORY", "OTHER"]

PIECES_IN_A_FRAME = 2000  # some 250 bytes each: half of a frame's limit


class TemplateHello(TypedDict):
    """Template to agent, first message: torch is imported, a fork takes milliseconds from now."""

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
    """Template to agent: a worker ended, with this exit status or minus the signal's number.

    ``peak_bytes`` is the most resident memory that it held.
    """

    kind: Literal["exited"]
    pid: int
    status: int
    peak_bytes: NotRequired[int]


class ReplicaOrders(TypedDict):
    """Where the replicas of one rank go and come from: host:port of peers' replica servers.

    ``target`` keeps the rank's snapshots from now on, ``source`` has the one that it restores; ""
    is none. All ranks of a node together send at most ``bytes_per_s``; 0 is no limit.
    """

    target: str
    source: str
    bytes_per_s: int


class FailureCount(TypedDict):
    """Failures that ended attempts, and the hours that devices trained, of the whole fleet."""

    count: int
    device_hours: float


class Assignment(TypedDict):
    """Agent to worker: all that a rank needs.

    ``config`` is the value of :func:`megascale_job.config.to_mapping`, ``restore`` that of
    :meth:`megascale_job.restore.RestorePlan.to_mapping`.
    """

    kind: Literal["assignment"]
    version: int
    cluster: str
    node: str
    job: str
    attempt: int
    rank_table: NotRequired[str]  # digest of the attempt's rank table; empty: the driver gave none
    rank: int
    local_rank: int
    local_ranks: NotRequired[int]  # of this node; absent: taken for one
    device_kind: Literal["cpu", "cuda"]
    device_index: int
    config: dict[str, Any]
    store_host: str
    store_port: int
    status_page: str
    network: NotRequired[dict[str, str]]  # NCCL's variables for this site; absent: none
    spans: NotRequired[str]  # ring of the rank's spans; absent: nothing is measured
    loader_socket: str
    readers: int
    reader: int
    checkpoint_socket: str
    committer_endpoint: str
    replicas: ReplicaOrders
    failures: NotRequired[FailureCount]
    restore: dict[str, Any]
    reports: bool
    run_folder: str


class SelfCheck(TypedDict):
    """Agent to a forked process: check the device, and the path to the other ranks of the check.

    ``rank`` and ``world_size`` count the ranks of this check: of this node, or of a group of nodes
    that meet at ``store_host``.
    """

    kind: Literal["self_check"]
    rank: int
    world_size: int
    store_host: str
    store_port: int
    device_kind: Literal["cpu", "cuda"]
    device_index: int
    timeout_s: float


class SelfCheckResult(TypedDict):
    """One finding; ``verdict`` is the name of a megascale.v1.CheckVerdict without its prefix.

    ``bus_gb_s``: of an all-reduce, the bus bandwidth in GB/s.
    """

    name: str
    target: str
    verdict: str
    detail: str
    elapsed_s: float
    bus_gb_s: NotRequired[float]


class SelfChecked(TypedDict):
    """Answer to SelfCheck."""

    kind: Literal["self_checked"]
    rank: int
    results: list[SelfCheckResult]


class Running(TypedDict):
    """Worker to agent: past rendezvous and restore; the next step is ``step + 1``.

    ``passed_over``: what is wrong with the planned step, where ``step`` is an older one. ``notes``:
    what differs from the run that wrote it and is accepted, such as another learning-rate schedule.
    """

    kind: Literal["running"]
    step: int
    passed_over: NotRequired[str]
    notes: NotRequired[str]


class StepDone(TypedDict):
    """Worker to agent: a step record, with the fields of megascale.v1.StepRecord, times in s."""

    kind: Literal["step"]
    record: dict[str, Any]


class ProfileSteps(TypedDict):
    """Agent to worker: write a trace of these steps to ``path`` (gzipped Chrome JSON).

    ``first_step`` and ``last_step`` are part of the trace. A worker that has not reached
    ``first_step`` by ``not_after_s`` (Unix seconds) does not begin.
    """

    kind: Literal["profile"]
    id: str
    first_step: int
    last_step: int
    path: str
    not_after_s: float


class CancelProfile(TypedDict):
    """Agent to worker: do not begin this profile; one that has begun goes on."""

    kind: Literal["cancel_profile"]
    id: str


class Leave(TypedDict):
    """Agent to worker: save after one of the next steps and end; all ranks do so together.

    If the state cannot be saved they train on, and ignore this ``id`` from then on.
    """

    kind: Literal["leave"]
    id: str


class Stay(TypedDict):
    """Agent to worker: the order to leave is withdrawn, unless it is being carried out."""

    kind: Literal["stay"]


class NotLeft(TypedDict):
    """Worker to agent: the order ``id`` failed, as the state could not be saved; it trains on."""

    kind: Literal["not_left"]
    id: str
    problem: str


class Profiled(TypedDict):
    """Worker to agent: what became of a trace; ``detail`` gives the reason when there is none."""

    kind: Literal["profiled"]
    id: str
    state: Literal["written", "skipped", "failed"]
    size_bytes: int
    detail: str


class Failed(TypedDict):
    """Worker to agent: it is about to exit with an error.

    ``detail`` names the damaged file for CHECKPOINT_CORRUPT, field and remedy for BAD_JOB; for
    OUT_OF_MEMORY it has the sizes.
    """

    kind: Literal["failed"]
    error_kind: ErrorKind
    error: str
    detail: str


class Finished(TypedDict):
    """Worker to agent: all steps are done, and the last snapshot is committed or given up.

    ``step`` is the last; before that of the job it is committed, and the run ended by Leave.
    ``not_saved`` is the reason for giving up; "" where it is committed, or the job writes none.
    """

    kind: Literal["finished"]
    step: int
    not_saved: str


class Register(TypedDict):
    """Worker to daemon: who the rank is, and the layout of its slots.

    ``layout`` is the value of megascale_job.sizes.checkpoint_layout.ShardLayout.to_dict; of its
    pieces, ``further_pieces`` follow in Pieces messages, because a frame is bounded. ``slots`` 0
    leaves their number to the daemon, which then counts ``in_flight`` for snapshots that are
    reserved, copied or unsettled at the same time (default 1), and shares its memory between the
    ``local_ranks`` of the node (default 1). ``max_write_mib_per_s`` bounds what
    the daemon writes for the job (0, the default, is no bound). It writes slower while steps take
    longer beside it by more than ``max_step_slowdown``, a share (0, the default, is never).
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
    in_flight: NotRequired[int]
    local_ranks: NotRequired[int]
    max_write_mib_per_s: NotRequired[float]
    max_step_slowdown: NotRequired[float]
    replicas: NotRequired[ReplicaOrders]
    layout: dict[str, Any]
    further_pieces: NotRequired[int]
    layout_info: dict[str, int]


class Pieces(TypedDict):
    """Worker to daemon, after Register: at most PIECES_IN_A_FRAME more pieces of its layout."""

    kind: Literal["pieces"]
    pieces: list[dict[str, Any]]


class Registered(TypedDict):
    """Daemon to worker: its slots. -> fds: one per slot, in the order of their indices.

    Byte ``landing_at`` of a slot's file is where the worker's copy keeps, as a 64-bit number, how
    many bytes from the slot's start have landed: checksums follow it. It may stay 0.
    """

    kind: Literal["registered"]
    slots: int
    slot_bytes: int
    landing_at: int


class Restore(TypedDict):
    """Worker to daemon: bring the state of ``plan`` into a slot, in this rank's layout."""

    kind: Literal["restore"]
    plan: dict[str, Any]


class Restored(TypedDict):
    """Daemon to worker: ``slot`` holds the state; release it when it has been read."""

    kind: Literal["restored"]
    slot: int
    source: str  # a megascale_job.restore.RestoreSource
    small_state: dict[str, Any]
    bytes_read: int


class Refused(TypedDict):
    """Daemon to worker: the state is not available; ``file`` names a damaged or missing file."""

    kind: Literal["refused"]
    error_kind: ErrorKind
    error: str
    file: str


class Acquire(TypedDict):
    """Worker to daemon: reserve a slot for the snapshot after ``step``."""

    kind: Literal["acquire"]
    step: int


class Acquired(TypedDict):
    """Daemon to worker: ``slot`` is being written from now on.

    ``store_ready``: no state of this rank waits for storage or is being written to it.
    """

    kind: Literal["acquired"]
    slot: int
    store_ready: bool


class Busy(TypedDict):
    """Daemon to worker: no slot is free (all are being persisted); skip the snapshot, count it."""

    kind: Literal["busy"]


class Seal(TypedDict):
    """Worker to daemon: the slot holds the whole state after ``step``.

    ``finite``: the update of that step had a finite loss and gradient, or was masked, which leaves
    the state as it was. It is the same on all ranks. A state that is not finite is not kept.
    ``persist`` false keeps it in memory only; default true. ``replicate``: all ranks copy this one
    to their peers, and keep it until the next such step has been decided; default false.
    ``problem``: the copy is not what was on the device, and is not kept.
    """

    kind: Literal["seal"]
    slot: int
    step: int
    small_state: dict[str, Any]
    finite: bool
    persist: NotRequired[bool]
    replicate: NotRequired[bool]
    problem: NotRequired[str]


class Sealed(TypedDict):
    """Daemon to worker: the slot is the daemon's, which computes its checksums and persists it."""

    kind: Literal["sealed"]
    step: int


class Release(TypedDict):
    """Worker to daemon: give back an unsealed slot, or a restored one that has been read."""

    kind: Literal["release"]
    slot: int


class Released(TypedDict):
    """Daemon to worker: the slot is free."""

    kind: Literal["released"]


class StepTime(TypedDict):
    """Worker to daemon, after a step: how long it took. Slow steps slow what is persisted."""

    kind: Literal["step_time"]
    step: int
    time_s: float


class Pace(TypedDict):
    """Daemon to worker: whether it persists now for the job, and how long that last took here.

    ``replica_ended``: nothing of this rank is being copied to a peer, or waits for that.
    """

    kind: Literal["pace"]
    persisting: bool
    persist_s: float
    replica_ended: bool


class Drain(TypedDict):
    """Worker to daemon, at the end: answer when ``step`` is committed or the time is up."""

    kind: Literal["drain"]
    step: int
    timeout_s: float


class Drained(TypedDict):
    """Daemon to worker: ``committed_step`` is the newest complete checkpoint.

    ``error`` gives the reason when that is not the step asked for, ``waiting`` whether the time was
    up before it was settled.
    """

    kind: Literal["drained"]
    committed_step: int
    error: NotRequired[str]
    waiting: NotRequired[bool]


class RequestFailed(TypedDict):
    """Daemon to worker: the request breaks the contract, or the worker is superseded."""

    kind: Literal["error"]
    error: str


TemplateMessage: TypeAlias = TemplateHello | Forked | Exited
WorkerMessage: TypeAlias = Running | StepDone | Profiled | NotLeft | Failed | Finished
DaemonRequest: TypeAlias = (
    Register | Pieces | Restore | Acquire | Seal | Release | Drain | StepTime | RestoreRequest
)
DaemonAnswer: TypeAlias = (
    Registered
    | Restored
    | Refused
    | Acquired
    | Busy
    | Sealed
    | Released
    | Drained
    | Pace
    | RequestFailed
    | RestoreAnswer
)
