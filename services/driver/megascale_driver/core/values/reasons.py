"""Reasons of lines of the audit log: one record for each.

A record has everything about a reason: how urgent a line of it is, which rule writes it
(:mod:`megascale_driver.core.values.rules`), whether it explains what happened to a job, and its
entry in docs/alarms.md, which is generated. A detector defines its own reason and rule in its
module (docs/how-to/add-a-detector.md).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal, get_args

from megascale_driver.core.values.rules import RULES

# critical: a person is needed now; warning: the system deals with it, but a person should know;
# info: nothing is wrong. A line without a severity causes no alert.
Severity = Literal["info", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)  # the least urgent first


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason of lines of the audit log.

    ``meaning``, ``response`` and ``remedy`` are its entry for operators, in Markdown: what
    happened, what the system does about it, what they can do. ``rule``: the rule whose verdict a
    line reports; "" where no single rule writes it. ``cause``: something goes wrong or was
    requested, which explains what happens to a job. ``routine``: every healthy job has such lines.

    A record makes itself known in REASONS.

    Raises:
        ValueError: there is one of this name, no such rule, or no meaning.
    """

    name: str
    _: KW_ONLY
    meaning: str
    response: str = ""
    remedy: str = "nothing"
    severity: Severity | None = None
    rule: str = ""
    cause: bool = False
    routine: bool = False

    def __post_init__(self) -> None:
        if self.name in REASONS or (self.rule and self.rule not in RULES) or not self.meaning:
            raise ValueError(
                f"reason {self.name}: defined twice, no meaning, or no rule {self.rule}"
            )
        REASONS[self.name] = self

    def __str__(self) -> str:
        return self.name


REASONS: Final[dict[str, Reason]] = {}


def severity_of(reason: str) -> Severity | None:
    """The severity; None: the line causes no alert, or another build wrote it."""
    known = REASONS.get(reason)
    return known.severity if known is not None else None


def is_cause(reason: str) -> bool:
    """True if a line of this reason explains what happened to a job."""
    known = REASONS.get(reason)
    return known is not None and known.cause


def is_routine(reason: str) -> bool:
    """True if every healthy job has such lines."""
    known = REASONS.get(reason)
    return known is not None and known.routine


# The order is that of docs/alarms.md.
LEADER_ELECTED: Final = Reason(
    "LEADER_ELECTED",
    meaning="a driver leads from now on",
    response="running jobs are adopted, not restarted",
    remedy="nothing; if it repeats, check the driver's log and the latency of etcd",
    severity="info",
)
ROW_UNREADABLE: Final = Reason(
    "ROW_UNREADABLE",
    meaning="a row of etcd cannot be read by this build",
    response=(
        "the row's job is not scheduled and its name is reserved; its workers continue, and their "
        "nodes get no order and no other work. An unreadable node is quarantined. Nothing else is "
        "affected"
    ),
    remedy=(
        "read the reason; start the build that wrote the row, or restore it from a backup, or "
        "give up the job: `megascale delete JOB --reason REASON` removes its rows and stops its "
        "workers; uncordon the node"
    ),
    severity="critical",
)
MESSAGE_REFUSED: Final = Reason(
    "MESSAGE_REFUSED",
    meaning=(
        "a heartbeat or step record names a step beyond the job's, an impossible attempt, or a "
        "value that this build does not know"
    ),
    response=(
        "the message is dropped as a whole. Unreadable messages are reported once for each node "
        "and job while a driver leads"
    ),
    remedy="look at the node that it names: its memory, its agent's log, its build",
    severity="warning",
)
SUBMITTED: Final = Reason("SUBMITTED", meaning="a job was accepted", routine=True)
PLACED: Final = Reason("PLACED", meaning="the job has its nodes", routine=True)
ATTEMPT_PREPARING: Final = Reason(
    "ATTEMPT_PREPARING",
    meaning="its nodes reserve devices and run their self-checks",
    remedy="nothing; after 300 s the attempt is given up",
    routine=True,
)
ATTEMPT_OPENED: Final = Reason(
    "ATTEMPT_OPENED",
    meaning="earlier attempts are fenced, and the checkpoint to restore is chosen",
    remedy="check that the step is the one that you expect",
    routine=True,
)
ATTEMPT_STARTED: Final = Reason("ATTEMPT_STARTED", meaning="all workers run", routine=True)
ATTEMPT_STOPPED: Final = Reason(
    "ATTEMPT_STOPPED",
    meaning="all processes of the attempt have ended; the message names the culprit",
    remedy="read the culprit's log if it happens again",
)
WORKER_EXITED: Final = Reason(
    "WORKER_EXITED",
    meaning=(
        "a worker process failed; the outcome reports whether it is the cause or a symptom of "
        "another failure"
    ),
    remedy="read that rank's log of that attempt: `megascale logs JOB --rank R --attempt N`",
    cause=True,
)
WORKER_OUT_OF_MEMORY: Final = Reason(
    "WORKER_OUT_OF_MEMORY",
    meaning=(
        "a worker ran out of memory: the kernel killed it (the message has the limit of its "
        "memory cgroup or the host's memory, and the most that the process held), or its device "
        "or host refused an allocation"
    ),
    response=(
        "the attempt ends and the next one begins, at first without blame for the node; a second "
        "time in a row without a new step, a job that never completed a step ends, and any other "
        "leaves the node"
    ),
    remedy="see [Out of memory](#out-of-memory)",
    severity="warning",
    cause=True,
)
KERNEL_FAULT: Final = Reason(
    "KERNEL_FAULT",
    meaning=(
        "the kernel log of a node of a running attempt reports that a GPU is gone or needs a "
        "reset (Xid 79, 48, 95, 119, 120, 62 and their texts)"
    ),
    response=(
        "the attempt ends at once, before its ranks detect it or hang. `LOG_ROOT_FOUND` follows, "
        "and the quarantine of the node"
    ),
    remedy="reset the GPU or reboot the node, then `megascale uncordon NODE --reason ...`",
    severity="warning",
    rule="kernel-log",
    cause=True,
)
LOG_ROOT_FOUND: Final = Reason(
    "LOG_ROOT_FOUND",
    meaning=(
        "the root of a stopped attempt by the logs of its ranks and nodes: rank, node, category, "
        "the line, and how many lines were set aside ([logs.md](logs.md))"
    ),
    response=(
        "with policy `kernel-log` (a line of a kernel log) the node is quarantined if the line "
        "asks for it; with `log-root` (text of a worker) this is observed, unless `megascale "
        "policy` has it enforced"
    ),
    remedy="read the line; the outcome has the action that it asks for",
    severity="warning",
)
HANG_SUSPECTED: Final = Reason(
    "HANG_SUSPECTED",
    meaning=(
        "all processes are alive, but no rank has advanced for max(60 s, 5 x p99 of the step "
        "times); the message names the ranks that hold the others up, and the evidence shows "
        "where every rank is"
    ),
    response=(
        "the attempt is restarted and all its nodes run their self-checks; the job leaves a node "
        "that is blamed twice in a row without progress"
    ),
    remedy=(
        "nothing at first. Read the suspect's log, which ends with the stacks of its threads "
        "unless the process itself was stopped (the logs of waiting ranks do, too). If a step can "
        "really take that long, raise the driver's `--hang-floor-s`"
    ),
    severity="warning",
    rule="hang",
    cause=True,
)
HANG_STACKS: Final = Reason(
    "HANG_STACKS",
    meaning=(
        "where the ranks of a hung attempt were when it was stopped: the suspect's innermost "
        "frames, and where most others waited. The evidence has the suspect's stack and up to "
        "eight more; for a process that is stopped or in a kernel wait, the line shows its state. "
        "On GPUs it also has NCCL's records: which rank did not enter which operation"
    ),
    response=(
        "only if the verdict blamed no node, and the records name ranks of one node, the hang "
        "counts against that node"
    ),
    remedy=(
        "read where the suspect was. If it waits in a call of its own (storage, a lock, garbage "
        "collection), that is the cause"
    ),
)
WORKERS_MISSING: Final = Reason(
    "WORKERS_MISSING",
    meaning=(
        "a job is RUNNING, but for ten minutes it has completed no step and no node reports "
        "workers of its attempt, whatever happened to them (policy `no-workers`); the evidence "
        "has the state of each node. This is the last resort: lost nodes, exits and hangs are "
        "detected earlier, unless the breaker holds back verdicts on many silent nodes"
    ),
    response="the attempt ends, and the job starts again when there are nodes for it",
    remedy=(
        "nothing. If its nodes were training all the time, the driver was cut off from them: look "
        "at the network"
    ),
    severity="warning",
    rule="no-workers",
    cause=True,
)
LOSS_DIVERGED: Final = Reason(
    "LOSS_DIVERGED",
    meaning=(
        "the loss or the gradient norm was not finite for `recovery.divergence_steps` steps in a "
        "row (policy `recovery.on_non_finite`), or the loss was above `recovery.loss_rise_factor` "
        "times its start for as long (policy `recovery.on_loss_rise`)"
    ),
    response=(
        "ENFORCE: the job ends or is taken back (see the outcome). OBSERVE: it continues, and "
        "each divergence is logged once"
    ),
    remedy="see [A run that diverges](#a-run-that-diverges)",
    severity="warning",
    cause=True,
)
STRAGGLER: Final = Reason(
    "STRAGGLER",
    meaning=(
        "a node takes longer than others for the same work, by the spans of its ranks: which "
        "operation, how much longer, since which step. Logged once for each node and attempt"
    ),
    response=(
        "OBSERVE (the default): the job keeps the node. ENFORCE: it saves and leaves the node, if "
        "a spare stands by"
    ),
    remedy=(
        "run `megascale heat JOB` and the node's diagnostics ([spans.md](spans.md)); `megascale "
        "policy straggler enforce --reason REASON` makes jobs leave such nodes"
    ),
    severity="warning",
    rule="straggler",
)
TRAFFIC_STOPPED: Final = Reason(
    "TRAFFIC_STOPPED",
    meaning=(
        "no byte moves through the ports of any node, and no step is completed, for max(30 s, 3 x "
        "p99 of the step times), while ranks are inside communication operations; the message "
        "names the ranks that hold the others up"
    ),
    response=(
        "OBSERVE (the default, because it is inferred): only this line. ENFORCE: the same as for "
        "`HANG_SUSPECTED`, earlier"
    ),
    remedy=(
        "look at the network and at the ranks that the message names "
        "([diagnostics.md](diagnostics.md#traffic)); `megascale policy traffic enforce --reason "
        "REASON` makes the driver restart such attempts"
    ),
    severity="warning",
    rule="traffic",
    cause=True,
)
TRAFFIC_DECLINED: Final = Reason(
    "TRAFFIC_DECLINED",
    meaning=(
        "nodes move less than 75 % of their usual bytes per second in three windows in a row; the "
        "message has both rates and the bytes per step"
    ),
    response="only this alert",
    remedy=(
        "if the bytes per step are as before, steps take longer: `megascale heat JOB`; otherwise "
        "look at the ports of the nodes that it names"
    ),
    severity="warning",
    rule="traffic",
)
TRAFFIC_FLUCTUATES: Final = Reason(
    "TRAFFIC_FLUCTUATES",
    meaning=(
        "the bytes per second of all nodes go up and down from window to window by more than a "
        "quarter"
    ),
    response="only this alert",
    remedy="look for congestion, a flapping link, or another job on the same switches",
    severity="warning",
    rule="traffic",
)
SLOWER_THAN_PLAN: Final = Reason(
    "SLOWER_THAN_PLAN",
    meaning=(
        "the steps of a job take longer than the upper end of the planner's prediction, in three "
        "windows of ten steps in a row; the message names the term that exceeds its prediction "
        "the most"
    ),
    response=(
        "only this alert, once in an attempt, and again only when another term takes over (policy "
        "`plan`, always observed)"
    ),
    remedy=(
        "`megascale job JOB` shows all terms; "
        "[planner.md](planner.md#a-running-job-compared-with-its-plan) explains each; "
        "`megascale why JOB` if it was faster before"
    ),
    severity="warning",
)
AS_PLANNED: Final = Reason(
    "AS_PLANNED",
    meaning="the steps of such a job are within the plan's interval again",
    routine=True,
)
SPARE_ASSIGNED: Final = Reason(
    "SPARE_ASSIGNED",
    meaning="a spare takes the place of a lost node",
    remedy="add a node, so that there is a spare again",
)
SPARES_SHORT: Final = Reason(
    "SPARES_SHORT",
    meaning="fewer spares stand by for a running job than `recovery.spares: auto` asks for",
    response="the job trains on; platforms that provide nodes are asked for more",
    remedy="add nodes, or repair lost ones, before the next is lost",
    severity="warning",
)
CHECKPOINT_COMMITTED: Final = Reason(
    "CHECKPOINT_COMMITTED",
    meaning="a checkpoint is complete on storage",
    routine=True,
)
CHECKPOINT_REFUSED: Final = Reason(
    "CHECKPOINT_REFUSED",
    meaning="a checkpoint was passed over because a file is missing or damaged",
    response=(
        "an older one is used, in the same attempt if the ranks find the damage while they restore"
    ),
    remedy="`megascale checkpoint verify FOLDER`; if it happens twice, check the storage",
    severity="critical",
)
RESUME_DIFFERS: Final = Reason(
    "RESUME_DIFFERS",
    meaning=(
        "the job continues with other settings than the run that wrote its checkpoint: the "
        "fields, and the learning rate before and after"
    ),
    response="the job trains with the new settings",
    remedy="nothing if the change was intended; otherwise update the job with the old values",
    severity="warning",
)
CHECKPOINT_FAILED: Final = Reason(
    "CHECKPOINT_FAILED",
    meaning=(
        "a rank's part of a checkpoint, or the commit, failed; the message has the step, the "
        "rank, the node and the error. One line per step; after ten in a row one for each power "
        "of ten"
    ),
    response=(
        "training continues, and the next checkpoint is tried as usual; after the last step the "
        "write is tried again for `checkpoint.final_timeout_s`. The outcome has which"
    ),
    remedy="see [A checkpoint that is not saved](#a-checkpoint-that-is-not-saved)",
    severity="critical",
    cause=True,
)
CHECKPOINT_SKIPPED: Final = Reason(
    "CHECKPOINT_SKIPPED",
    meaning=(
        "a snapshot was skipped on all ranks, because a rank had no free slot: earlier ones are "
        "still being written. The 1st, 10th, 100th, ... of an attempt are logged"
    ),
    response="training continues; the next snapshot is tried as usual",
    remedy=(
        "nothing if it is rare, or if the interval is short on purpose; otherwise raise "
        "`checkpoint.interval_steps`, set `checkpoint.slots` to 4 to 6, or use faster storage"
    ),
    cause=True,
)
SNAPSHOT_DAMAGED: Final = Reason(
    "SNAPSHOT_DAMAGED",
    meaning=(
        "a restore found that the bytes of a snapshot in a node's memory are no longer those that "
        "were sealed; the message has the step, the rank and the slot"
    ),
    response="the stored copy of the step is used if there is one, otherwise an older checkpoint",
    remedy=(
        "nothing if it happens once; a node on which it happens again has bad memory: `megascale "
        "evict NODE --reason ...`, and test its memory"
    ),
    severity="warning",
)
CHECKPOINT_DAEMON_RESTARTED: Final = Reason(
    "CHECKPOINT_DAEMON_RESTARTED",
    meaning="the checkpoint daemon of a node ended",
    response=(
        "the agent restarts it; the snapshots and replicas in its memory are lost, and training "
        "continues"
    ),
    remedy=(
        "read `nodes/NODE/checkpoint.log`; status -9 often means that the kernel killed it for "
        "lack of memory"
    ),
    severity="warning",
    cause=True,
)
REPLICA_FAILED: Final = Reason(
    "REPLICA_FAILED",
    meaning=(
        "a snapshot of a rank has no copy in the memory of the peer node (`checkpoint.replicas`); "
        "the message has the reason. The 1st, 10th, 100th, ... such step of an attempt is logged"
    ),
    response="training continues, and the next snapshot is copied anew",
    remedy=(
        "if a later snapshot needed the slot: raise `checkpoint.max_replicate_mib_per_s`, the "
        "interval or `checkpoint.slots`; if the peer cannot be reached or has no room: look at "
        "its `nodes/NODE/checkpoint.log`"
    ),
    severity="warning",
)
PROFILE_REQUESTED: Final = Reason(
    "PROFILE_REQUESTED",
    meaning="a client requested a trace of some future steps from some ranks",
    remedy="nothing; see [A slow step](#a-slow-step)",
    routine=True,
)
PROFILE_WRITTEN: Final = Reason(
    "PROFILE_WRITTEN",
    meaning="a rank's trace is written; message and evidence name node, path and size",
    remedy="open it at https://ui.perfetto.dev",
    routine=True,
)
PROFILE_MISSED: Final = Reason(
    "PROFILE_MISSED",
    meaning=(
        "one or several ranks will have no trace; training continues. The message has the "
        "reason: the request arrived too late, the disk is full, the attempt ended first, or the "
        "node did not report in time"
    ),
    remedy=(
        "fix the cause if there is one (`nodes/NODE/jobs/JOB/attempt-000001/rank-00000.log` has "
        "more), then request it again"
    ),
    routine=True,
)
PROFILE_CANCELLED: Final = Reason(
    "PROFILE_CANCELLED",
    meaning="a client gave up a profile in progress; training continues",
    routine=True,
)
CANCEL_REQUESTED: Final = Reason(
    "CANCEL_REQUESTED",
    meaning="a client asked to cancel the job",
    cause=True,
)
RESTART_REQUESTED: Final = Reason(
    "RESTART_REQUESTED",
    meaning=(
        "a client asked for a new attempt, from the newest state or from a named step; the "
        "outcome describes how it begins"
    ),
)
UPDATE_REQUESTED: Final = Reason(
    "UPDATE_REQUESTED",
    meaning="a client gave the job a new configuration for its next attempt",
    remedy="nothing; `megascale config show JOB` shows it from then on",
)
JOB_WAITS: Final = Reason(
    "JOB_WAITS",
    meaning=(
        "a job waits for nodes, in another way than before: the message has what is missing, the "
        "policy how it waits (`reserve`: nodes are held for it; `keep`: it recovers and keeps "
        "its surviving nodes; `wait`: it holds nothing)"
    ),
    remedy="nothing; see [The queue](#the-queue)",
    routine=True,
)
SUSPEND_REQUESTED: Final = Reason(
    "SUSPEND_REQUESTED",
    meaning="a client asked the job to save and leave its nodes",
    cause=True,
)
PREEMPTION_ORDERED: Final = Reason(
    "PREEMPTION_ORDERED",
    meaning="a job of higher priority needs the nodes",
    response="the job saves, then it leaves them",
    remedy="nothing; see [The queue](#the-queue)",
    cause=True,
)
LEAVE_WITHDRAWN: Final = Reason(
    "LEAVE_WITHDRAWN",
    meaning=(
        "the job was to leave its nodes and now stays on them: it was resumed, or it could not save"
    ),
    remedy="if it could not save, find out why: the job's `CHECKPOINT_FAILED` events",
)
JOB_SUSPENDED: Final = Reason(
    "JOB_SUSPENDED",
    meaning="the job has left its nodes, which are free; the message has the step that is saved",
    remedy="`megascale resume JOB --reason REASON` when it is to continue",
    severity="info",
)
JOB_PREEMPTED: Final = Reason(
    "JOB_PREEMPTED",
    meaning=("the job has saved and left its nodes to one of higher priority; it is queued again"),
    severity="info",
)
JOB_RESUMED: Final = Reason(
    "JOB_RESUMED",
    meaning="a client asked that a suspended job get nodes again",
    routine=True,
)
JOB_DELETED: Final = Reason(
    "JOB_DELETED",
    meaning=(
        "an ended job was deleted, by order or because of `--keep-ended-jobs` or "
        "`--keep-ended-days` of the driver; its checkpoints stay"
    ),
    remedy="remove the folder of its checkpoints (`checkpoint.uri`) if it is no longer needed",
    routine=True,
)
JOB_SUCCEEDED: Final = Reason(
    "JOB_SUCCEEDED",
    meaning=(
        "all steps are done, and the checkpoint of the last one is complete if the job has "
        "checkpoints. With `checkpoint.require_final: false` the message can have the reason why "
        "it is not"
    ),
    remedy=(
        "nothing; for a job with the condition NOT_SAVED see [A checkpoint that is not "
        "saved](#a-checkpoint-that-is-not-saved)"
    ),
    severity="info",
    routine=True,
)
JOB_FAILED: Final = Reason(
    "JOB_FAILED",
    meaning=(
        "a restart budget (`recovery.max_restarts`, `recovery.max_restarts_without_progress`) is "
        "spent; or the job itself cannot run, so no restart was tried: see [A job that cannot "
        "run](#a-job-that-cannot-run); or it ran out of memory twice, or it diverged; or the "
        "checkpoint of its last step could not be saved, or its first step is not below its last"
    ),
    response="the job ends and frees its nodes; its checkpoints stay",
    remedy=(
        "the message has the last failure: fix it; `megascale update JOB.YAML --reason REASON` if "
        "the job file has to change; then `megascale restart JOB --reason REASON`, which "
        "continues from the newest complete checkpoint"
    ),
    severity="critical",
)
JOB_CANCELLED: Final = Reason("JOB_CANCELLED", meaning="the job was stopped on request")
NODE_JOINED: Final = Reason("NODE_JOINED", meaning="an agent has started on a node")
NODE_RESTARTED: Final = Reason(
    "NODE_RESTARTED",
    meaning="a node's agent was restarted during a running attempt, which ends",
    remedy="find out why it ended: `nodes/NODE/agent.log`",
    cause=True,
)
NODE_SUSPECT: Final = Reason(
    "NODE_SUSPECT",
    meaning="no heartbeat for 8 s",
    response="the driver probes the node",
    remedy="nothing yet; if many nodes are suspect together, check the network",
    rule="silence",
    cause=True,
)
NODE_DEAD: Final = Reason(
    "NODE_DEAD",
    meaning=(
        "its process is gone (broken link and refused connection), or it was silent for too long: "
        "for 14 s with a second sign (its link is broken, a probe fails, its platform does not "
        "reach it, its job stands still), otherwise for 60 s; the message names that sign. An "
        "agent that answers probes but sends no heartbeat for 60 s counts as silent from then on, "
        "because it cannot be commanded; if it reports that it has no workers of the job that "
        "holds it, it is dead at once (policy `mute`)"
    ),
    response=(
        "the job leaves the node: a spare takes its place, or the job waits for one, and the next "
        "attempt resumes"
    ),
    remedy=(
        "check whether the machine is up; a node that comes back is alive again without further "
        "action. If its agent answers probes but sends nothing, read `nodes/NODE/agent.log` and "
        "restart the agent (`systemctl restart megascale-node@NODE`, or `megascale node stop n2` "
        "and `megascale node start n2`)"
    ),
    severity="warning",
    cause=True,
)
NODE_FORGOTTEN: Final = Reason(
    "NODE_FORGOTTEN",
    meaning=(
        "nodes are forgotten that were dead for longer than `--forget-dead-hours` of the driver "
        "(24), that no job needs, and that were not cordoned, drained or evicted"
    ),
    remedy="nothing; a node that comes back joins as a new one",
)
NODE_EVICTED: Final = Reason(
    "NODE_EVICTED",
    meaning=(
        "a job leaves the node. Policy `manual`: an operator requested it; `self-check`: a check "
        "failed; `group-check`: its checks with good nodes failed; `kernel-log`: its kernel log "
        "has a fatal fault of its hardware; `log-root`: a worker's log shows one; `straggler`: it "
        "is slow; `hard-fact`: it is dead; `repeated-failure`: its workers fail repeatedly; "
        "`stop-deadline`: it did not confirm its stop"
    ),
    response=(
        "a spare or another node takes its place, and the next attempt resumes. `manual`, "
        "`self-check`, `group-check` and `kernel-log` also quarantine it; in the other cases it "
        "comes back without further action"
    ),
    remedy="fix a quarantined node, run its diagnostics, and uncordon it",
    severity="warning",
    cause=True,
)
NODE_DRAINING: Final = Reason(
    "NODE_DRAINING",
    meaning="an operator asked to empty the node",
    response="its job saves, then leaves it; then it is quarantined",
    remedy="nothing; uncordon it when the work on it is done",
)
NODE_CORDONED: Final = Reason(
    "NODE_CORDONED",
    meaning="it gets no new work; work that runs there continues",
    remedy="uncordon it when the work on it is done",
)
NODE_UNCORDONED: Final = Reason(
    "NODE_UNCORDONED",
    meaning="it can get work again",
)
SOFTWARE_SUSPECTED: Final = Reason(
    "SOFTWARE_SUSPECTED",
    meaning=(
        "different nodes have the same failure (two nodes for workers and the opening of an "
        "attempt, three for self-checks, in a large job a hundredth of its nodes, at most 32)"
    ),
    response="it counts as a fault of software, and no node is evicted for it",
    remedy="look at the job's code and data, its storage, and the build that is installed",
    severity="warning",
    cause=True,
)
CHECK_REPEATED: Final = Reason(
    "CHECK_REPEATED",
    meaning=(
        "a target of a node was slower than the fleet in the same check twice in a row; the "
        "message has check, target and figures"
    ),
    response=(
        "OBSERVE (the default): it only advises to evict the node. ENFORCE: `NODE_EVICTED` "
        "instead, except for verdicts that the breaker holds back"
    ),
    remedy=(
        "`megascale diagnose NODE --set full` once more, then `megascale evict NODE --reason ...`"
    ),
    severity="warning",
    rule="repeated-check",
)
GROUP_CHECK_STARTED: Final = Reason(
    "GROUP_CHECK_STARTED",
    meaning="an attempt broke and no fault names a node",
    response="its nodes check each other, see [An unknown culprit](#an-unknown-culprit)",
    rule="group-check",
)
GROUP_CHECK_ENDED: Final = Reason(
    "GROUP_CHECK_ENDED",
    meaning="those checks have ended; the message has the nodes and links that fail, if any",
    remedy=(
        "if nothing fails and it happens again: look at the job's code, and at the network under "
        "load"
    ),
    rule="group-check",
)
GROUP_OVER_EVICTED: Final = Reason(
    "GROUP_OVER_EVICTED",
    meaning="the checks ended with a group of nodes that shares the culprit",
    response="OBSERVE (the default): nothing. ENFORCE: the job leaves all of them",
    remedy=(
        "check the nodes that the message names; `megascale policy over-eviction enforce --reason "
        "REASON` makes jobs leave such groups"
    ),
    severity="warning",
    rule="over-eviction",
)
LINK_SUSPECTED: Final = Reason(
    "LINK_SUSPECTED",
    meaning="two nodes fail together, and each passes with others",
    response="neither node is evicted",
    remedy="check the network between them; until then evict one of them",
    severity="warning",
    rule="group-check",
)
SWITCH_LOST: Final = Reason(
    "SWITCH_LOST",
    meaning=(
        "at least half of a switch's nodes were silent for 60 s, while the rest of the fleet was "
        "heard"
    ),
    response="the silent nodes of the switch are given up together, as one loss",
    remedy="check the switch; its nodes are alive again when they are heard",
    severity="critical",
    rule="switch-lost",
)
POLICY_SET: Final = Reason(
    "POLICY_SET",
    meaning="an operator had a rule of the driver observed or enforced",
    remedy="set it back to `enforce` when the reason is gone",
)
QUOTA_SET: Final = Reason(
    "QUOTA_SET",
    meaning="an operator limited the devices of a tenant, or returned it to the driver's default",
    remedy="nothing; see [The queue](#the-queue)",
)
BREAKER_TRIPPED: Final = Reason(
    "BREAKER_TRIPPED",
    meaning="the driver gave up too many nodes in 5 minutes, or many went silent at once",
    response=(
        "silent nodes are only observed, so that a driver that is cut off does not break up "
        "running jobs; if the message names one switch, only its nodes are, for 60 s"
    ),
    remedy="look for the common cause: switch, power, etcd, the driver's own host",
    severity="critical",
)
BREAKER_RESET: Final = Reason(
    "BREAKER_RESET",
    meaning="silent nodes can be evicted again",
    severity="info",
)
