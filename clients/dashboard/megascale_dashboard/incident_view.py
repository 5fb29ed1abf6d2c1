"""The first page: problems, since when, what the system does about them, what a person can do.

An incident needs a person (``act``) or an eye on it (``watch``), or it is a fault that the system
has handled within the last hour (``handled``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import TERMINAL_PHASES, Job, JobConditionType, JobPhase, Node
from megascale_dashboard import job_view, node_view, page_values
from megascale_dashboard.page_values import Page

RECENT_S = 3600.0
SHOWN_INCIDENTS = 50
SHOWN_DOINGS = 6
SHOWN_FAULTS = 5  # the newest of a job; all are counted
REPEATED = 2  # attempts in a row without a new step, from which on a job needs a person
URGENCY = ("act", "watch", "handled")
# Nodes in these states are reported together, by switch: a dying switch takes all its nodes down.
_NODE_DOING = {
    "dead": "gives it no work until it is back",
    "suspect": "probes it",
    "unknown": "waits for it to connect",
    "quarantined": "gives it no work until it is uncordoned",
}
_WAITS = "reads the status of all ranks; if no rank advances, it ends the attempt and restarts it"
_NODE_URGENCY = {"dead": "watch", "suspect": "watch", "unknown": "watch", "quarantined": "act"}


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The driver's answers from which the page is made.

    Attributes:
        events: lines of the audit log, oldest first.
        explanations: by job.
        logs: by job, the lines of its own log, from which its faults are counted.
        notes: of the driver, about itself.
    """

    info: driver_pb2.GetClusterInfoResponse
    nodes: Sequence[Node] = ()
    jobs: Sequence[Job] = ()
    events: Sequence[types_pb2.Event] = ()
    explanations: Mapping[str, driver_pb2.ExplainJobResponse] = field(default_factory=dict)
    logs: Mapping[str, Sequence[types_pb2.Event]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def now(cluster: ClusterState, now_s: float) -> Page:
    """One sentence, incidents with the most urgent first, and running jobs, at Unix ``now_s``."""
    info, nodes, jobs, events = cluster.info, cluster.nodes, cluster.jobs, cluster.events
    explanations, notes = cluster.explanations, cluster.notes
    handled = {
        job.spec.name: _recovered(job, cluster.logs.get(job.spec.name, ()), now_s)
        for job in jobs
        if job.phase == JobPhase.RUNNING
    }
    incidents = [
        *_breaker(info),
        *_node_incidents(nodes, events),
        *_check_incidents(nodes),
        *_straggler_incidents(nodes, events, now_s),
        *_routing_incidents(jobs, events, now_s),
        *(
            incident
            for job in jobs
            for incident in _job_incidents(job, explanations.get(job.spec.name), now_s)
        ),
    ]
    for name, faults in handled.items():
        # The job has recovered from a fault only once it has got further than before it.
        told = explanations.get(name)
        present = told.setback.failures if told and told.HasField("setback") else 0
        past = faults[: max(0, len(faults) - present)]
        handled[name] = past
        incidents += map(_handled, past[-SHOWN_FAULTS:], itertools.repeat(name))
    incidents.sort(key=lambda each: (URGENCY.index(each["urgency"]), -(each["since_s"] or 0)))
    incidents[:0] = map(_without_term, notes)  # first: they tell how old all the rest is
    counts = {word: sum(each["urgency"] == word for each in incidents) for word in URGENCY}
    counts["handled"] = sum(map(len, handled.values()))
    living = [job for job in jobs if job.phase not in TERMINAL_PHASES]
    return {
        "sentence": incidents[0]["title"] if notes else _sentence(counts, nodes, living),
        "counts": counts,
        "incidents": incidents[:SHOWN_INCIDENTS],
        "left_out": max(0, len(incidents) - SHOWN_INCIDENTS),
        "jobs": [job_view.figures(job) for job in living],
        "cluster": {
            "name": info.cluster,
            "leader": info.leader,
            "leader_since_s": page_values.time_s(info.leader_since),
            "build": info.build,
            "nodes": len(nodes),
            "nodes_alive": info.nodes_alive,
        },
        "events": [page_values.event(line) for line in reversed(events[-12:])],
        "command": "megascale cluster",
    }


def _sentence(counts: Mapping[str, int], nodes: Sequence[Node], living: Sequence[Job]) -> str:
    if counts["act"]:
        problems = "problem needs" if counts["act"] == 1 else "problems need"
        return f"{counts['act']} {problems} attention."
    running = sum(job.phase == JobPhase.RUNNING for job in living)
    if counts["watch"]:
        things = "thing" if counts["watch"] == 1 else "things"
        return f"No action needed; {counts['watch']} {things} to watch."
    if not nodes:
        return "No node has joined the cluster yet."
    jobs = "job runs" if running == 1 else "jobs run"
    joined = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"All is well: {running or 'no'} {jobs}, on {joined}."


def _incident(
    urgency: str,
    title: str,
    since_s: float | None,
    page: str,
    doing: Sequence[str],
    may_do: Iterable[tuple[str, str]],
) -> Page:
    return {
        "urgency": urgency,
        "title": title,
        "since_s": since_s,
        "page": page,
        "doing": list(doing[:SHOWN_DOINGS]),
        "may_do": [{"text": text, "command": command} for text, command in may_do],
    }


def _without_term(note: str) -> Page:
    return _incident(
        "act",
        note[:1].upper() + note[1:],
        None,
        "/events?subject=cluster",
        ["lets training and checkpoints continue; orders, restarts and new jobs wait"],
        [
            (
                "see which member of etcd leads, and which is missing or full",
                "etcdctl endpoint status --cluster --write-out table",
            ),
            ("see etcd's alarms", "etcdctl alarm list"),
        ],
    )


def _breaker(info: driver_pb2.GetClusterInfoResponse) -> Iterable[Page]:
    if info.HasField("breaker_tripped_at"):
        yield _incident(
            "act",
            "The breaker holds inferred verdicts back: too many nodes would have been evicted",
            page_values.time_s(info.breaker_tripped_at),
            "/events?subject=cluster",
            ["evicts nodes only for hard facts, such as a dead process"],
            [("if the verdicts were right", "megascale reset-breaker --reason REASON")],
        )


def _node_incidents(nodes: Sequence[Node], events: Sequence[types_pb2.Event]) -> Iterable[Page]:
    together: dict[tuple[str, str], list[Node]] = {}  # by state and switch
    for node in nodes:
        if node_view.state(node) in _NODE_URGENCY:
            together.setdefault((node_view.state(node), node_view.switch(node)), []).append(node)
    for (state, switch), found in together.items():
        names = [node.name for node in found]
        where = f" of switch {switch}" if switch else ""
        many = f"{len(names)} nodes{where} are {state}: {', '.join(names[:4])}"
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        why = found[0].disposition_reason or found[0].liveness_reason
        one = f"Node {names[0]} is {state}" + (f": {why}" if why else "")
        lines = _about(names, switch if len(names) > 1 else "", events)
        beats = [page_values.time_s(node.last_heartbeat_at) or 0.0 for node in found]
        since_s = max(beats) if state != "quarantined" else _newest(lines, "NODE_EVICTED")
        # Earlier lines belong to an earlier fault.
        lines = [line for line in lines if (page_values.time_s(line.time) or since_s) >= since_s]
        yield _incident(
            _NODE_URGENCY[state],
            one if len(names) == 1 else many + more,
            since_s or None,
            f"/nodes/{names[0]}" if len(names) == 1 else "/fleet",
            [*(line.message for line in lines[1 - SHOWN_DOINGS :]), _NODE_DOING[state]],
            _node_remedies(state, names[0]),
        )


def _node_remedies(state: str, name: str) -> Iterable[tuple[str, str]]:
    if state == "quarantined":
        yield "see what its checks say", f"megascale diagnose {name} --set full"
        yield "once it is repaired", f"megascale uncordon {name} --reason REASON"
    else:
        yield "read what happened to it", f"megascale events nodes/{name}"
        if state == "dead":
            yield "on a cluster of this machine, start it again", f"megascale node start {name}"


def _check_incidents(nodes: Sequence[Node]) -> Iterable[Page]:
    """Nodes in use of which a check has failed or measured less than usual."""
    for node in nodes:
        found = node_view.health(node)
        if node_view.state(node) in _NODE_URGENCY or found not in ("fail", "degraded"):
            continue
        worst = next(check for check in node.checks if check.verdict.name.lower() == found)
        yield _incident(
            "act" if found == "fail" else "watch",
            f"Node {node.name}: {worst.name} is {found}: {worst.detail}",
            None,
            f"/nodes/{node.name}",
            [],
            [("move its work to a spare", f"megascale evict {node.name} --reason REASON")],
        )


def _straggler_incidents(
    nodes: Sequence[Node], events: Sequence[types_pb2.Event], now_s: float
) -> Iterable[Page]:
    """Nodes in use that were slow within the last hour, by their spans."""
    newest = {line.subject: line for line in events if line.reason == "STRAGGLER"}
    for node in nodes:
        line = newest.get(f"nodes/{node.name}")
        since_s = page_values.time_s(line.time) if line is not None else None
        if line is None or since_s is None or now_s - since_s > RECENT_S:
            continue
        if node_view.state(node) != "active":
            continue
        observed = line.mode == "OBSERVE"
        yield _incident(
            "watch",
            line.message,
            since_s,
            f"/jobs/{node.job}/heat",
            ["only logs it: the rule straggler is in mode OBSERVE"] if observed else [],
            [
                ("measure it when it is idle", f"megascale diagnose {node.name} --set full"),
                ("move its work to a spare", f"megascale evict {node.name} --reason REASON"),
            ],
        )


def _routing_incidents(
    jobs: Sequence[Job], events: Sequence[types_pb2.Event], now_s: float
) -> Iterable[Page]:
    """Running jobs of which a rank had hot experts within the last hour."""
    newest = {line.subject: line for line in events if line.reason == "EXPERTS_HOT"}
    for job in jobs:
        name = job.spec.name
        line = newest.get(f"jobs/{name}")
        since_s = page_values.time_s(line.time) if line is not None else None
        if line is None or since_s is None or now_s - since_s > RECENT_S:
            continue
        if job.phase != JobPhase.RUNNING or line.attempt != job.attempt:
            continue
        yield _incident(
            "watch",
            f"Job {name}: {line.message}",
            since_s,
            f"/jobs/{name}/heat",
            [],
            [("see the rows of each rank's experts and its time", f"megascale heat {name}")],
        )


def _job_incidents(
    job: Job, explanation: driver_pb2.ExplainJobResponse | None, now_s: float
) -> Iterable[Page]:
    name, page = job.spec.name, f"/jobs/{job.spec.name}"
    for condition in job.conditions:
        failing = condition.type == JobConditionType.CHECKPOINT_FAILING
        yield _incident(
            "act",
            f"Job {name}: {condition.message}",
            page_values.time_s(condition.since),
            page,
            [_saves_again(job)] if failing else [],
            [("see its checkpoints", f"megascale checkpoint list {name}")],
        )
    if explanation is None:
        return
    why = job_view.why(explanation)
    cause = why["cause"]
    doing = [action["message"] for action in why["actions"]]
    may_do = [(each["text"], each["command"]) for each in why["suggestions"]]
    updated_s = page_values.time_s(job.updated_at) or 0.0
    since_s = cause["time_s"] if cause and cause["time_s"] else updated_s
    setback = explanation.setback if explanation.HasField("setback") else None
    repeated = setback is not None and setback.failures >= REPEATED
    if job.phase == JobPhase.FAILED:
        if now_s - updated_s <= 24 * RECENT_S:
            yield _incident("act", why["sentence"], since_s, page, doing, may_do)
    elif repeated and setback and job.phase not in (*TERMINAL_PHASES, JobPhase.SUSPENDED):
        title = f"Job {name} fails again and again: {setback.sentence}"
        yield _incident("act", title, since_s, page, doing, may_do)
    elif job.phase == JobPhase.RUNNING:
        if explanation.still_s:
            still = f"has completed no step for {explanation.still_s:.0f} s"
            title = f"Job {name} {still}; {explanation.held_up_by}"
            began_s = now_s - explanation.still_s
            yield _incident("watch", title, began_s, f"{page}/ranks", [_WAITS], may_do)
        if setback:
            title = f"Job {name} has not recovered yet: {setback.sentence} ({setback.reason})"
            yield _incident("watch", title, since_s, page, doing, may_do)
    elif job.phase not in (*TERMINAL_PHASES, JobPhase.SUSPENDED):
        # A queued job with a suggestion waits for a person.
        urgency = "act" if job.phase == JobPhase.QUEUED and may_do else "watch"
        yield _incident(urgency, why["sentence"], since_s, page, doing, may_do)


def _saves_again(job: Job) -> str:
    """The reaction of a job to failing checkpoints."""
    if job.step >= job.spec.trainer.training.steps:
        return "tries again to save the last step; it has no more steps to train"
    return "training continues; the next checkpoint is tried as usual"


def _recovered(job: Job, log: Sequence[types_pb2.Event], now_s: float) -> list[Page]:
    """Faults of the last hour that ended an attempt of a running job, oldest first."""
    faults = job_view.faults(log)
    return [each for each in faults if now_s - (each["time_s"] or 0.0) <= RECENT_S]


def _handled(fault: Page, name: str) -> Page:
    title = f"Job {name} has recovered: {fault['message']}"
    page = f"/jobs/{name}"
    return _incident("handled", title, fault["time_s"], page, fault["actions"], [])


def _about(
    names: Sequence[str], switch: str, events: Sequence[types_pb2.Event]
) -> list[types_pb2.Event]:
    """The newest lines about one of the nodes or their switch, oldest first."""
    either = [*map(re.escape, names), *([f"switch {re.escape(switch)}"] if switch else [])]
    word = re.compile(rf"(?<![\w.-])(?:{'|'.join(either)})(?![\w-])")
    found = [
        line
        for line in events
        if word.search(line.message) or line.subject.removeprefix("nodes/") in names
    ]
    return found[-SHOWN_DOINGS:]


def _newest(lines: Sequence[types_pb2.Event], reason: str) -> float:
    times = [page_values.time_s(line.time) or 0.0 for line in lines if line.reason == reason]
    return max(times, default=0.0)
