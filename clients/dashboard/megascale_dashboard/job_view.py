"""Pages of jobs: figures, curves, attempts, checkpoints, time left, and why a job is slower.

The latter compares the parts of a step with the plan, and the newest steps with earlier ones
(MegaScale, section 6.3: the decline of MFU and its cause).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import TERMINAL_PHASES, Job
from megascale_client.messages import remaining_s
from megascale_dashboard import page_values
from megascale_dashboard.page_values import Page

CURVE_POINTS = 1_000  # of each curve: a screen has about so many columns
SHOWN_CHECKPOINTS = 20
SHOWN_EVENTS = 200
# A job without checkpoints has no ATTEMPT_OPENED.
_BEGINNINGS = ("ATTEMPT_PREPARING", "ATTEMPT_OPENED")
# Events that end an attempt: faults, and orders of people or of the queue.
_FAULTS = frozenset(
    {
        *("WORKER_EXITED", "WORKER_OUT_OF_MEMORY", "KERNEL_FAULT", "HANG_SUSPECTED"),
        *("TRAFFIC_STOPPED", "NODE_DEAD", "NODE_RESTARTED", "SWITCH_LOST", "LOSS_DIVERGED"),
    }
)
_ORDERS = frozenset(
    {
        *("SUSPEND_REQUESTED", "RESTART_REQUESTED", "UPDATE_REQUESTED", "CANCEL_REQUESTED"),
        *("PREEMPTION_ORDERED", "NODE_DRAINING", "NODE_EVICTED"),
    }
)
_ANSWERS = frozenset({"SPARE_ASSIGNED", "PLACED", "ATTEMPT_OPENED", "ATTEMPT_STARTED"})
_ENDS = ("ATTEMPT_STOPPED", "JOB_SUCCEEDED", "JOB_FAILED", "JOB_CANCELLED", "JOB_SUSPENDED")


def listed(jobs: Iterable[Job]) -> Page:
    """All jobs: those that have not ended first, each group by name."""
    rows = sorted(jobs, key=lambda job: (job.phase in TERMINAL_PHASES, job.spec.name))
    return {"jobs": [figures(job) for job in rows], "command": "megascale jobs"}


def figures(job: Job) -> Page:
    """The figures of a job that fit one row."""
    record, has_record = job.last_record, job.HasField("last_record")
    has_goodput = job.HasField("goodput")
    return {
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "phase_reason": job.phase_reason,
        "owner": job.spec.owner,
        "attempt": job.attempt,
        "restarts": job.restarts,
        "step": job.step,
        "steps": job.spec.trainer.training.steps,
        "loss": page_values.finite(record.loss) if has_record else None,
        **_newest_held_out(job),
        "tokens_per_s": record.tokens_per_s if has_record else None,
        "mfu_causal": record.mfu_causal if record.HasField("mfu_causal") else None,
        "mfu_full": record.mfu_full if record.HasField("mfu_full") else None,
        "goodput": job.goodput.ratio_since_start if has_goodput else None,
        "committed_step": job.committed_step,
        "committed_at_s": page_values.time_s(job.committed_at),
        "created_at_s": page_values.time_s(job.created_at),
        "nodes": len(job.nodes),
        "spares": len(job.spare_nodes),
        "conditions": [
            {
                "type": condition.type.name.lower(),
                "message": condition.message,
                "since_s": page_values.time_s(condition.since),
            }
            for condition in job.conditions
        ],
    }


def _newest_held_out(job: Job) -> Page:
    known, record = job.HasField("last_evaluation"), job.last_evaluation
    return {
        "held_out_loss": page_values.finite(record.evaluation_loss) if known else None,
        "held_out_step": record.step if known else None,
    }


def one(
    job: Job,
    records: Sequence[types_pb2.StepRecord],
    events: Sequence[types_pb2.Event],
    checkpoints: Sequence[driver_pb2.Checkpoint],
    explanation: driver_pb2.ExplainJobResponse,
) -> Page:
    """One job in full; ``records`` and ``events`` oldest first, ``checkpoints`` newest first."""
    name = job.spec.name
    if job.HasField("last_record"):  # the heading and the end of the curves are one record
        newest = (job.last_record.attempt, job.last_record.step)
        records = [each for each in records if (each.attempt, each.step) < newest]
        records.append(job.last_record)
    records = effective_records(records)
    return {
        **figures(job),
        "remaining_s": remaining_s(job),
        "goodput_parts_s": _goodput(job),
        "restored_step": job.restored_step,
        "restore_source": job.restore_source.name.lower(),
        "replicated_step": job.replicated_step,
        "replica_problem": job.replica_problem,
        "node_names": list(job.nodes),
        "spare_names": list(job.spare_nodes),
        "evicted_names": list(job.evicted_nodes),
        "layout": {axis: max(1, size) for axis, size in layout(job).items()},
        "curves": curves(records),
        "held_out_curve": _held_out(records),
        "attempts": attempts(events),
        "why": why(explanation),
        "plan": plan(job),
        "checkpoints": [
            {
                "step": each.step,
                "attempt": each.attempt,
                "size_bytes": each.size_bytes,
                "committed_at_s": page_values.time_s(each.committed_at),
                "pin": each.pin,
            }
            for each in checkpoints[:SHOWN_CHECKPOINTS]
        ],
        "events": [page_values.event(line) for line in reversed(events[-SHOWN_EVENTS:])],
        "commands": [
            {"text": "why is it in this phase", "command": f"megascale explain {name}"},
            {"text": "watch it in a terminal", "command": f"megascale watch {name}"},
            {"text": "the log of rank 0", "command": f"megascale logs {name} --rank 0"},
            {"text": "a trace of two steps", "command": f"megascale profile {name} --steps 2"},
            {"text": "why its steps take longer", "command": f"megascale why {name}"},
            {"text": "its checkpoints", "command": f"megascale checkpoint list {name}"},
        ],
    }


def why(explanation: driver_pb2.ExplainJobResponse) -> Page:
    """The answer of ExplainJob: sentence, cause, actions of the system, suggestions."""
    has_cause, root = explanation.HasField("cause"), explanation.log_root
    return {
        "sentence": explanation.explanation,
        "cause": page_values.event(explanation.cause) if has_cause else None,
        "root": {
            "attempt": root.attempt,
            "node": root.node,
            "rank": root.rank if root.rank >= 0 else None,
            "category": root.category,
            "line": root.line,
        }
        if explanation.HasField("log_root")
        else None,
        "actions": [page_values.event(line) for line in explanation.actions],
        "suggestions": [
            {"text": each.text, "command": each.command} for each in explanation.suggestions
        ],
    }


def layout(job: Job) -> dict[str, int]:
    """Sizes of the axes, innermost first; an axis that the job leaves out is 1."""
    given = job.spec.trainer.parallelism
    return {
        axis: getattr(given, axis) if given.HasField(axis) else 1
        for axis in ("tp", "cp", "dp", "pp")
    }


def effective_records(records: Sequence[types_pb2.StepRecord]) -> list[types_pb2.StepRecord]:
    """The records of the steps that led to the present state, in rising order.

    If a later attempt went back to an earlier step, the steps after that one are dropped.
    """
    # From the newest backwards: a record counts only if its step lies before all that follow it.
    found: list[types_pb2.StepRecord] = []
    for record in reversed(records):
        if not found or record.step < found[-1].step:
            found.append(record)
    return found[::-1]


def curves(records: Sequence[types_pb2.StepRecord]) -> Page:
    """Columns over the records, at most CURVE_POINTS of them, always with the newest.

    ``records`` rise by step; see :func:`effective_records`.
    """
    stride = max(1, -(-len(records) // CURVE_POINTS))
    first = (len(records) - 1) % stride if records else 0  # so that the last one is taken
    chosen = records[first::stride]
    return {
        "time_s": [page_values.time_s(record.completed_at) for record in chosen],
        "step": [record.step for record in chosen],
        "attempt": [record.attempt for record in chosen],
        "loss": [page_values.finite(record.loss) for record in chosen],
        "tokens_per_s": [record.tokens_per_s for record in chosen],
        "mfu": [record.mfu_causal if record.HasField("mfu_causal") else None for record in chosen],
        "step_s": [page_values.duration_s(record.step_time) for record in chosen],
    }


def _held_out(records: Sequence[types_pb2.StepRecord]) -> Page:
    """Steps after which held-out data was evaluated, and the loss on it."""
    found = [record for record in records if record.HasField("evaluation_loss")]
    found = found[:: -(-len(found) // CURVE_POINTS) or 1]
    return {
        "step": [record.step for record in found],
        "loss": [page_values.finite(record.evaluation_loss) for record in found],
    }


def faults(events: Sequence[types_pb2.Event]) -> list[Page]:
    """Each fault that ended an attempt, oldest first, and what was done about it.

    ``events``: the job's own log. An attempt that was stopped by an order has no fault.
    """
    found: list[Page] = []
    for place, stop in enumerate(events):
        if stop.reason != "ATTEMPT_STOPPED":
            continue
        mine = [line for line in events[:place] if line.attempt == stop.attempt]
        named = [line for line in mine if _is_fault(line)]
        if not named and any(line.reason in _ORDERS for line in mine):
            continue
        # The error that stopped the attempt, among all that it had: the message of the stop quotes
        # it, whole or in part.
        why = stop.message.partition("has stopped: ")[2] or stop.message
        alike = (line for line in named if line.message in why or why in line.message)
        cause = next(alike, None) or next(iter(named), stop)
        stopped = [] if cause is stop else [stop.message]
        later = itertools.takewhile(
            lambda line: line.reason != "ATTEMPT_STOPPED", events[place + 1 :]
        )
        found.append(
            {
                "attempt": stop.attempt,
                "time_s": page_values.time_s(cause.time),
                "reason": cause.reason,
                "message": cause.message,
                "actions": stopped + [line.message for line in later if line.reason in _ANSWERS],
            }
        )
    return found


def _is_fault(line: types_pb2.Event) -> bool:
    """Whether the line is about a fault that ends an attempt, not about an order."""
    if line.reason == "NODE_EVICTED":
        return line.actor == "driver"
    return line.reason in _FAULTS and line.mode != "OBSERVE"


def attempts(events: Sequence[types_pb2.Event]) -> list[Page]:
    """The attempts that the events show, oldest first: opened, all workers run, ended, and why.

    ``ended_s`` is None for the attempt in progress; ``failed``: a fault has ended it.
    """
    broken = {fault["attempt"] for fault in faults(events)}
    found: dict[int, Page] = {}
    for line in events:
        at_s = page_values.time_s(line.time)
        if line.reason in _BEGINNINGS and line.attempt and line.attempt not in found:
            for earlier in found.values():
                earlier["ended_s"] = earlier["ended_s"] or at_s
            found[line.attempt] = {
                "attempt": line.attempt,
                "opened_s": at_s,
                "running_s": None,
                "ended_s": None,
                "failed": line.attempt in broken,
                "opening": "",
                "ending": "",
            }
        current = found.get(line.attempt)
        if current is None or current["ended_s"] is not None:
            continue
        if line.reason in _BEGINNINGS:
            current["opening"] = line.message
        elif line.reason == "ATTEMPT_STARTED":
            current["running_s"] = at_s
        elif line.reason in _ENDS:
            current["ended_s"], current["ending"] = at_s, line.message
            current["failed"] = current["failed"] or line.reason == "JOB_FAILED"
    return list(found.values())


def _goodput(job: Job) -> Page:
    if not job.HasField("goodput"):
        return {}
    parts = ("productive", "lost", "detecting", "restarting", "checkpointing", "waiting")
    return {
        part: page_values.duration_s(getattr(job.goodput, part))
        for part in (*parts, "starting", "ending")
    }


def slower(job: Job, decline: driver_pb2.GetMfuDeclineResponse | None, problem: str = "") -> Page:
    """The page; ``decline`` None: the driver cannot compute it, for the reason ``problem``."""
    return {
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "plan": plan(job),
        "decline": None if decline is None else _decline(decline),
        "problem": problem,
        "command": f"megascale why {job.spec.name}",
    }


def plan(job: Job) -> Page | None:
    """The running attempt compared with its plan; None before the driver has compared them."""
    if not job.proto.HasField("plan"):
        return None
    found = job.proto.plan
    return {
        "attempt": found.attempt,
        "first_step": found.first_step,
        "last_step": found.last_step,
        "measured_s": found.measured_step_s,
        "planned_s": found.predicted_step_s or None,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "slower_by": found.slower_by,
        "sentence": found.sentence,
        "hardware": found.hardware,
        "problem": found.problem,
        "terms": [
            {"term": term.name, "measured_s": term.measured_s, "planned_s": term.predicted_s}
            for term in found.terms
        ],
    }


def _decline(found: driver_pb2.GetMfuDeclineResponse) -> Page:
    return {
        "cause": found.cause,
        "sentence": found.sentence,
        "before_ms": found.step_before_ms,
        "after_ms": found.step_after_ms,
        "first_step": found.first_step,
        "split_step": found.split_step,
        "last_step": found.last_step,
        "node": found.node,
        "rank": found.rank if found.rank >= 0 else None,
        "shares": dict(sorted(found.shares.items(), key=lambda each: (-each[1], each[0]))),
    }
