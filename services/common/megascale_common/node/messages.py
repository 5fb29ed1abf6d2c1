"""Messages of the local contract between trainer, agent and checkpoint daemon of one node.

Framed by :mod:`megascale_common.node.framing` (u32 length + JSON). Every message is an object with
a ``kind``; the first message of a connection carries ``version``
(:data:`megascale_common.node.framing.PROTOCOL_VERSION`). These structs are the contract: both sides
build messages from them, and read messages through :class:`Accepted`, which checks every type. A
field at its default is left out, and a field with a default can be missing, because an older build
does not know it. ``-> fds`` means that file descriptors travel with the message.

Agent and template (the process that imported torch ahead of need and forks workers), over an
inherited socket:
    template: TemplateHello once it is ready.
    agent: Fork -> fds; template: Forked (in the order of the Forks), Exited when the process ends.
    When the agent's end closes, the template and its workers end.
Agent and worker, over the socket passed with Fork:
    agent: Assignment (-> fds: the store's listening socket, on rank 0 only).
    worker: Running, then StepDone per step (from one rank per job: see ``reports``), then Failed or
        Finished.
    agent: ProfileSteps at any time; the worker answers each with Profiled, steps later.
    agent: Leave or Stay at any time; the workers end early together, each with Finished, or, if
        they cannot save, continue training, each with NotLeft.
    agent: STACKS_SIGNAL at any time; the worker writes its threads' stacks to its log, even from
        inside a hung call.
    agent: SelfCheck instead of Assignment (-> fds: the store's listening socket, on rank 0 only, if
        there are several); the forked process answers SelfChecked and exits.
Worker and checkpoint daemon, over the daemon's unix socket; answers come in the requests' order:
    Register, Pieces... -> Registered (-> fds: one per slot), Restore -> Restored | Refused,
    Acquire -> Acquired | Busy, Seal -> Sealed, Release -> Released, Drain -> Drained,
    StepTime -> Pace.
    Any request that breaks the contract -> RequestFailed, after which the daemon closes the
    connection. When it closes, slots that are neither sealed nor being persisted are released.
A restore, over the same connection: a worker first asks whether its state is in memory. If it is
not, all ranks read it from storage together: each opens the checkpoint, reads the index of its
share of the files, and then its windows, as :mod:`megascale_job.sizes.read_plan` plans for all.
    LookInMemory -> MemoryState, Verify -> Verified, OpenStored -> StoredState | Refused,
    ReadIndex -> StoredIndex | Refused, ReadStored -> DidRead | Refused.
    Release ends the use of a slot that MemoryState or StoredState named.
A run by hand, which has no driver, and the checkpoint daemon that it started, over a separate
connection:
    OpenAttempt -> AttemptOpened | Refused; AskSaves -> Saves | Refused.
"""

from __future__ import annotations

import reprlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_origin

import msgspec

from megascale_common.node.framing import FramingError

STACKS_SIGNAL = signal.SIGUSR1
# BAD_JOB: the job itself cannot run here, and another attempt would fail in the same way.
ErrorKind = Literal["BAD_JOB", "CHECKPOINT_CORRUPT", "DATA", "COLLECTIVE", "OUT_OF_MEMORY", "OTHER"]

PIECES_IN_A_FRAME = 2000  # about 250 bytes each, so half of a frame's limit
INDEX_UNITS = 4000  # described by one StoredIndex, so that it is below 1 MiB
MOST_READS = 4000  # requested by one ReadStored

T = TypeVar("T")


class LocalMessage(msgspec.Struct, omit_defaults=True, tag_field="kind"):
    """A message; its ``tag`` is the ``kind`` on the wire."""


class Accepted(Generic[T]):
    """The kinds of message that one end of a socket accepts; ``who`` names that end in errors."""

    def __init__(self, who: str, *kinds: type[T]) -> None:
        self._who = who
        self._kinds: dict[str, type[T]] = {kind_of(kind): kind for kind in kinds}

    def read(self, message: Mapping[str, Any]) -> T:
        """The message as a struct.

        Raises:
            FramingError: it has another kind, or a field is missing or has another type.
        """
        kind = self._kinds.get(str(message.get("kind")))
        if kind is None:
            *others, last = map(repr, self._kinds)
            accepted = f"{', '.join(others)} and {last}" if others else last
            raise FramingError(f"{self._who} accepts {accepted}, not {message.get('kind')!r}")
        try:
            return msgspec.convert(message, kind)
        except msgspec.ValidationError as error:
            raise FramingError(_wrong_field(message, kind) or str(error)) from error


def kind_of(message: object) -> str:
    """The ``kind`` on the wire of a message or of a class of messages."""
    return str(getattr(message, "__struct_config__").tag)  # noqa: B009  # only msgspec declares it


def _wrong_field(message: Mapping[str, Any], kind: type[Any]) -> str:
    for field in msgspec.structs.fields(kind):
        if field.encode_name not in message and not field.required:
            continue
        value = message.get(field.encode_name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            expected = getattr(get_origin(field.type) or field.type, "__name__", field.type)
            inside = f" ({error})" if " - at `$" in str(error) else ""
            return (
                f"{kind_of(kind)}.{field.encode_name} is {reprlib.repr(value)}; "
                f"it must be of type {expected}{inside}"
            )
    return ""


class TemplateHello(LocalMessage, tag="hello"):
    """Template to agent, first message: torch is imported, so a fork now takes milliseconds."""

    version: int
    torch: str


class Fork(LocalMessage, tag="fork"):
    """Agent to template: fork a worker. -> fds: [worker's end of its agent socket, log file]."""

    rank: int


class Forked(LocalMessage, tag="forked"):
    """Template to agent: the worker runs."""

    rank: int
    pid: int


class Exited(LocalMessage, tag="exited"):
    """Template to agent: a worker ended, with this exit status or minus the signal's number.

    ``peak_bytes`` is its peak resident memory.
    """

    pid: int
    status: int
    peak_bytes: int = 0


class ReplicaOrders(msgspec.Struct, frozen=True):
    """Peers' replica servers (host:port) to which one rank sends and from which it restores.

    ``target`` keeps the rank's snapshots from now on, ``source`` has the one that it restores; ""
    means none. All ranks of a node together send at most ``bytes_per_s``; 0 means no limit.
    """

    target: str
    source: str
    bytes_per_s: int


NO_REPLICAS = ReplicaOrders(target="", source="", bytes_per_s=0)


class FailureCount(msgspec.Struct, frozen=True):
    """Failures that ended attempts, and hours that devices trained, in the whole fleet."""

    count: int
    device_hours: float


class Assignment(LocalMessage, tag="assignment"):
    """Agent to worker: everything that a rank needs.

    ``config`` is the text of :func:`megascale_job.loading.to_json`, ``restore`` the value of
    :meth:`megascale_job.restore.RestorePlan.to_mapping`.
    """

    version: int
    cluster: str
    node: str
    job: str
    attempt: int
    rank: int
    local_rank: int
    device_kind: Literal["cpu", "cuda"]
    device_index: int
    config: str
    store_host: str
    store_port: int
    status_page: str
    loader_socket: str
    readers: int
    reader: int
    checkpoint_socket: str
    committer_endpoint: str
    replicas: ReplicaOrders
    restore: dict[str, Any]
    reports: bool
    run_folder: str
    rank_table: str = ""  # digest of the attempt's rank table; empty: the driver sent none
    local_ranks: int = 1  # number of ranks of this node
    network: dict[str, str] = {}  # NCCL's variables for this site
    spans: str = ""  # ring of the rank's spans; empty: no spans are measured
    failures: FailureCount = FailureCount(count=0, device_hours=0.0)


class SelfCheck(LocalMessage, tag="self_check"):
    """Agent to a forked process: check the device, and the path to the other ranks of the check.

    ``rank`` and ``world_size`` count the ranks of this check, which are those of this node or of a
    group of nodes that meet at ``store_host``.
    """

    rank: int
    world_size: int
    store_host: str
    store_port: int
    device_kind: Literal["cpu", "cuda"]
    device_index: int
    timeout_s: float


class SelfCheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding; ``verdict`` is the name of a megascale.v1.CheckVerdict without its prefix.

    ``bus_gb_s`` is the bus bandwidth of an all-reduce in GB/s.
    """

    name: str
    target: str
    verdict: str
    detail: str
    elapsed_s: float
    bus_gb_s: float | None = None


class SelfChecked(LocalMessage, tag="self_checked"):
    """Answer to SelfCheck."""

    rank: int
    results: list[SelfCheckResult]


class Running(LocalMessage, tag="running"):
    """Worker to agent: past rendezvous and restore; the next step is ``step + 1``.

    ``passed_over`` says what is wrong with the planned step if ``step`` is an older one. ``notes``
    lists accepted differences from the run that wrote it, such as another learning-rate schedule.
    """

    step: int
    passed_over: str = ""
    notes: str = ""


class StepDone(LocalMessage, tag="step"):
    """Worker to agent: a step record with the fields of megascale.v1.StepRecord, times in s."""

    record: dict[str, Any]


class ProfileSteps(LocalMessage, tag="profile"):
    """Agent to worker: write a trace of these steps to ``path`` (gzipped Chrome JSON).

    ``first_step`` and ``last_step`` are part of the trace. A worker that has not reached
    ``first_step`` by ``not_after_s`` (Unix seconds) does not begin.
    """

    id: str
    first_step: int
    last_step: int
    path: str
    not_after_s: float


class CancelProfile(LocalMessage, tag="cancel_profile"):
    """Agent to worker: do not begin this profile; one that has begun continues."""

    id: str


class Leave(LocalMessage, tag="leave"):
    """Agent to worker: save after one of the next steps and end; all ranks do so together.

    If the state cannot be saved they continue training, and ignore this ``id`` from then on.
    """

    id: str


class Stay(LocalMessage, tag="stay"):
    """Agent to worker: the order to leave is withdrawn, unless it is being carried out."""


class NotLeft(LocalMessage, tag="not_left"):
    """Worker to agent: the order ``id`` failed because the state could not be saved.

    The worker continues training.
    """

    id: str
    problem: str


class Profiled(LocalMessage, tag="profiled"):
    """Worker to agent: the outcome of a trace; ``detail`` says why if there is no trace."""

    id: str
    state: Literal["written", "skipped", "failed"]
    size_bytes: int
    detail: str


class Failed(LocalMessage, tag="failed"):
    """Worker to agent: it is about to exit with an error.

    ``detail`` names the damaged file for CHECKPOINT_CORRUPT, field and remedy for BAD_JOB; for
    OUT_OF_MEMORY it has the sizes.
    """

    error_kind: ErrorKind
    error: str
    detail: str


class Finished(LocalMessage, tag="finished"):
    """Worker to agent: all steps are done, and the last snapshot is committed or given up.

    ``step`` is the last one. If it is before the job's last step, it is committed and the run ended
    because of Leave. ``not_saved`` says why the snapshot was given up; "" if it is committed or the
    job writes no checkpoints.
    """

    step: int
    not_saved: str


class Register(LocalMessage, tag="register"):
    """Worker to daemon: who the rank is, and the layout of its slots.

    ``layout`` is the value of megascale_job.sizes.checkpoint_layout.ShardLayout.to_dict. Because a
    frame is bounded, ``further_pieces`` of its pieces follow in Pieces messages. With ``slots`` 0
    the daemon chooses their number: it allows for ``in_flight`` snapshots that are reserved, copied
    or unsettled at the same time (default 1), and divides its memory between the ``local_ranks`` of
    the node (default 1), less replicas of the ``largest_slot_bytes`` of the job (0, the default: as
    large as this rank's). ``max_write_mib_per_s`` limits the daemon's writes for the job (0, the
    default: no limit). The daemon slows its writes while they make steps longer by more than the
    share ``max_step_slowdown`` (0, the default: never).
    """

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
    in_flight: int = 1
    local_ranks: int = 1
    largest_slot_bytes: int = 0
    max_write_mib_per_s: float = 0.0
    max_step_slowdown: float = 0.0
    replicas: ReplicaOrders = NO_REPLICAS
    further_pieces: int = 0


class Pieces(LocalMessage, tag="pieces"):
    """Worker to daemon, after Register: at most PIECES_IN_A_FRAME more pieces of its layout."""

    pieces: list[dict[str, Any]]


class Registered(LocalMessage, tag="registered"):
    """Daemon to worker: its slots. -> fds: one per slot, in the order of their indices.

    At byte ``landing_at`` of a slot's file, the worker's copy stores a 64-bit number: how many
    bytes from the slot's start have landed. Checksums follow it. It can stay 0.
    """

    slots: int
    slot_bytes: int
    landing_at: int


class Restore(LocalMessage, tag="restore"):
    """Worker to daemon: bring the state of ``plan`` into a slot, in this rank's layout."""

    plan: dict[str, Any]


class Restored(LocalMessage, tag="restored"):
    """Daemon to worker: ``slot`` holds the state; release it when it has been read."""

    slot: int
    source: str  # a megascale_job.restore.RestoreSource
    small_state: dict[str, Any]
    bytes_read: int


class Refused(LocalMessage, tag="refused"):
    """Daemon to worker: the state is not available; ``file`` names a damaged or missing file."""

    error_kind: ErrorKind
    error: str
    file: str


class Acquire(LocalMessage, tag="acquire"):
    """Worker to daemon: reserve a slot for the snapshot after ``step``."""

    step: int


class Acquired(LocalMessage, tag="acquired"):
    """Daemon to worker: ``slot`` is reserved for the worker's writes.

    ``store_ready``: no state of this rank waits for storage or is being written to it.
    """

    slot: int
    store_ready: bool


class Busy(LocalMessage, tag="busy"):
    """Daemon to worker: no slot is free (all are being persisted); skip and count the snapshot."""


class Seal(LocalMessage, tag="seal"):
    """Worker to daemon: the slot holds the whole state after ``step``.

    ``finite``: the update of that step had a finite loss and gradient, or was masked, which leaves
    the state unchanged. It is the same on all ranks. A state that is not finite is not kept.
    ``persist`` false keeps the state in memory only; default true. ``replicate``: all ranks copy
    this state to their peers, and keep it until the next such step has been decided; default false.
    ``problem``: the copy differs from the device's memory, and is not kept.
    """

    slot: int
    step: int
    small_state: dict[str, Any]
    finite: bool
    persist: bool = True
    replicate: bool = False
    problem: str = ""


class Sealed(LocalMessage, tag="sealed"):
    """Daemon to worker: the daemon now owns the slot, computes its checksums and persists it."""

    step: int


class Release(LocalMessage, tag="release"):
    """Worker to daemon: give back an unsealed slot, or a restored one that has been read."""

    slot: int


class Released(LocalMessage, tag="released"):
    """Daemon to worker: the slot is free."""


class StepTime(LocalMessage, tag="step_time"):
    """Worker to daemon, after a step: its duration. Slow steps slow the daemon's writes."""

    step: int
    time_s: float


class Pace(LocalMessage, tag="pace"):
    """Daemon to worker: whether it persists for the job now, and how long that last took here.

    ``replica_ended``: no state of this rank is being copied to a peer or waits for that.
    """

    persisting: bool
    persist_s: float
    replica_ended: bool


class Drain(LocalMessage, tag="drain"):
    """Worker to daemon, at the end: answer once ``step`` is committed or the time is up."""

    step: int
    timeout_s: float


class Drained(LocalMessage, tag="drained"):
    """Daemon to worker: ``committed_step`` is the newest complete checkpoint.

    ``error`` says why if that is not the requested step; ``waiting`` is true if the time was up
    before the outcome was known.
    """

    committed_step: int
    error: str = ""
    waiting: bool = False


class RequestFailed(LocalMessage, tag="error"):
    """Daemon to worker: the request breaks the contract, or the worker is superseded."""

    error: str


class LookInMemory(LocalMessage, tag="restore_memory"):
    """Worker to daemon: is the state of ``plan`` sealed in a slot of this rank, and undamaged?

    With ``verified_later`` (default false) the answer does not wait for the checksums: the worker
    can copy the slot meanwhile, and sends Verify before it uses the copy.
    """

    plan: dict[str, Any]
    verified_later: bool = False


class MemoryState(LocalMessage, tag="memory_state"):
    """Daemon to worker: the slot that holds the state; -1 if none does, and ``problem`` says why.

    ``file`` names a slot that holds it but is damaged. ``arriving``: the state is on its way from a
    peer's memory; until Verified the slot's content is invalid and ``small_state`` is empty.
    """

    slot: int
    small_state: dict[str, Any]
    problem: str
    file: str
    arriving: bool = False


class Verify(LocalMessage, tag="restore_verify"):
    """Worker to daemon, after LookInMemory with ``verified_later``: is the state undamaged?"""


class Verified(LocalMessage, tag="verified"):
    """Daemon to worker: ``problem`` is "" or the problem with the slot that ``file`` names.

    The worker must not release a damaged slot, nor one whose state has not arrived. If the state
    has arrived, ``small_state`` belongs to it and ``fetched_bytes`` is its size.
    """

    problem: str
    file: str
    small_state: dict[str, Any] = {}
    fetched_bytes: int = 0


class OpenStored(LocalMessage, tag="restore_open"):
    """Worker to daemon: open the checkpoint of ``plan`` on storage."""

    plan: dict[str, Any]


class StoredState(LocalMessage, tag="stored_state"):
    """Daemon to worker: the checkpoint has ``files`` files; windows are read into ``slot``."""

    files: int
    slot: int
    small_state: dict[str, Any]


class ReadIndex(LocalMessage, tag="restore_index"):
    """Worker to daemon: list the pieces in a file of the open checkpoint, from piece ``first``."""

    file: int
    first: int


class StoredIndex(LocalMessage, tag="stored_index"):
    """Daemon to worker: the pieces, by :func:`megascale_job.sizes.read_plan.encode` and base64.

    ``following`` is the next piece to request, -1 after the last.
    """

    runs: str
    following: int


class ReadStored(LocalMessage, tag="restore_read"):
    """Worker to daemon: fill a window that begins at byte ``at`` of the slot.

    ``reads`` are the fields of :class:`megascale_job.sizes.read_plan.Read`, in their order.
    """

    at: int
    reads: list[list[int | str]]


class DidRead(LocalMessage, tag="did_read"):
    """Daemon to worker: the window holds the bytes; units that are complete are verified."""

    bytes_read: int


class OpenAttempt(LocalMessage, tag="open_attempt"):
    """Run by hand to daemon: open the attempt after the newest one in the job's commit log.

    It corresponds to a driver's OpenAttempt of megascale.v1.CheckpointService, except that the
    daemon chooses the attempt's number. From then on the daemon is the attempt's committer.
    ``config`` is the text of :func:`megascale_job.loading.to_json`. ``read_only``: open no attempt,
    only report what would be restored.
    """

    version: int
    config: str
    read_only: bool = False


class AttemptOpened(LocalMessage, tag="attempt_opened"):
    """Daemon to a run by hand: the attempt's number, and the restore plan of all its ranks.

    ``restore`` is the value of :meth:`megascale_job.restore.RestorePlan.to_mapping`; ``refused``
    says why newer checkpoints were passed over. ``attempt`` is 0 if none was opened.
    """

    attempt: int
    restore: dict[str, Any]
    committer_endpoint: str
    refused: list[str]


class AskSaves(LocalMessage, tag="ask_saves"):
    """Run by hand to daemon: report the outcome of the saves of ``attempt``.

    ``look``: also find out from the commit log of ``uri`` whether a later attempt is open.
    """

    job: str
    attempt: int
    uri: str
    look: bool


class FailedSave(msgspec.Struct, frozen=True):
    """A rank's part of the checkpoint of ``step`` could not be saved."""

    step: int
    rank: int
    error: str


class Saves(LocalMessage, tag="saves"):
    """Daemon to a run by hand: the newest failures of its attempt, and its newest commit.

    ``newest_attempt`` is that of the commit log; 0 if it was not requested or is not known now.
    """

    committed_step: int
    failures: list[FailedSave]
    newest_attempt: int


TemplateMessage: TypeAlias = TemplateHello | Forked | Exited
WorkerMessage: TypeAlias = Running | StepDone | Profiled | NotLeft | Failed | Finished
WorkerOrder: TypeAlias = ProfileSteps | CancelProfile | Leave | Stay
RestoreRequest: TypeAlias = Restore | LookInMemory | Verify | OpenStored | ReadIndex | ReadStored
DaemonRequest: TypeAlias = (
    Register | Pieces | Acquire | Seal | Release | Drain | StepTime | RestoreRequest
)
RestoreAnswer: TypeAlias = (
    Restored | MemoryState | Verified | StoredState | StoredIndex | DidRead | Refused
)
DaemonAnswer: TypeAlias = (
    Registered
    | Acquired
    | Busy
    | Sealed
    | Released
    | Drained
    | Pace
    | RequestFailed
    | RestoreAnswer
)
HandRequest: TypeAlias = OpenAttempt | AskSaves
HandAnswer: TypeAlias = AttemptOpened | Saves | Refused | RequestFailed


@dataclass(frozen=True, slots=True)
class RankTerms:
    """One rank of one attempt.

    Attributes:
        uri: the job's checkpoint folder; empty: snapshots are kept in memory only.
        committer_endpoint: host:port of the attempt's committer.
        slots: number of slots of the rank; 0: the daemon chooses.
        in_flight: number of snapshots that can be reserved, copied or unsettled at once: with short
            intervals the next ones begin before the first is sealed.
        local_ranks: number of ranks of this node, which share its memory.
        largest_slot_bytes: size of the largest slot of all ranks of the job, which a rank's replica
            on another node can need; 0: that of this rank.
        max_write_mib_per_s: limit on writes to storage by the job's ranks of this node; 0: none.
        max_step_slowdown: share by which steps may take longer during a write; 0: any.
    """

    job: str
    attempt: int
    rank: int
    world_size: int
    uri: str
    committer_endpoint: str
    slots: int
    in_flight: int = 1
    local_ranks: int = 1
    largest_slot_bytes: int = 0
    max_write_mib_per_s: float = 0.0
    max_step_slowdown: float = 0.0


# The type of each attribute in a message.
RANK_KINDS: dict[str, type[Any]] = {
    item.name: {"str": str, "int": int, "float": float}[str(item.type)]
    for item in fields(RankTerms)
}


def rank_values(terms: object) -> dict[str, Any]:
    """The values of RankTerms, or of a message that has them, by name."""
    return {name: kind(getattr(terms, name)) for name, kind in RANK_KINDS.items()}
