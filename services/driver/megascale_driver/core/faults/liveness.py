"""Liveness of nodes: verdicts from hellos, heartbeats, broken streams, probes and silence.

The presence lane reports which nodes have fallen silent (:mod:`megascale_driver.presence.lane`);
only those are evaluated here, with every tick, and at once when something new is known of one.

A refused connection after a broken stream is positive evidence that the agent's process is gone:
the node is DEAD at once. Silence alone is an inference: its verdict takes longer, is quicker with a
second independent sign (corroboration), and passes through the breaker. A platform that does not
reach a node is such a sign, and means nothing without silence: the platform's own daemon may be
broken while the agent is well. A job that completes steps proves that all its nodes are alive
(MegaScale section 4.1: heartbeats show where a fault is, progress shows whether there is one).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import breaker
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import REACHED, AttemptPhase, Liveness, Node, PlatformSign
from megascale_driver.core.values.events import (
    Evidence,
    PlatformReport,
    Probe,
    ProbeResult,
    Silence,
    StreamReset,
)
from megascale_driver.core.values.job import Job, JobPhase

_AT_WORK = (AttemptPhase.RUNNING, AttemptPhase.FINISHED)


def stream_reset(draft: Draft, event: StreamReset) -> None:
    """The link broke: probe the port of the node at once, in case its agent is gone."""
    node = draft.nodes.get(event.node)
    if node is None or node.identity.incarnation != event.incarnation or not node.connected:
        return
    draft.put_node(
        replace(
            draft.nodes[node.name], connected=False, reset_at_s=draft.now_s, heard_at_s=draft.now_s
        )
    )
    _probe(draft, node)
    if node.liveness is Liveness.SUSPECT:
        evaluate_silence(draft, (node.name,))


def probe_result(draft: Draft, event: ProbeResult) -> None:
    """Take in the result of a probe."""
    node = draft.nodes.get(event.node)
    if node is None or node.identity.incarnation != event.incarnation:
        return
    if event.outcome == "alive":
        # The core does not know the newest heartbeat of a linked node that is not silent.
        silent = node.liveness is Liveness.SUSPECT or not node.connected
        if silent and _mute_s(draft, node) >= draft.policy.dead_uncorroborated_after_s:
            _mute(draft, node, event)
            return
        draft.put_node(
            replace(draft.nodes[node.name], last_seen_s=draft.now_s, probe_failed_at_s=0.0)
        )
        if node.liveness is Liveness.SUSPECT and node.connected:
            draft.put_node(replace(draft.nodes[node.name], liveness=Liveness.ALIVE))
        return
    node = draft.put_node(replace(draft.nodes[node.name], probe_failed_at_s=draft.now_s))
    if event.outcome == "refused" and not node.connected and node.liveness is not Liveness.DEAD:
        if draft.now_s < draft.grace_until_s and not node.reset_at_s:
            return  # this leader has not seen its link break: the agent may be restarting
        evidence = (
            Evidence(
                "stream",
                f"nodes/{node.name}",
                "reset" if node.reset_at_s else "not opened in this term",
            ),
            Evidence("probe", node.identity.executor_endpoint, "connection refused"),
        )
        if draft.holder_of(node.name) is not None:
            breaker.count(draft, node.name)
        _declare_dead(
            draft, node, "its link broke and its port refuses connections", "process-gone", evidence
        )
    elif node.liveness is Liveness.SUSPECT:
        evaluate_silence(draft, (node.name,))


def _mute(draft: Draft, node: Node, event: ProbeResult) -> None:
    """Handle an agent that answers probes but has neither linked nor sent heartbeats for too long.

    It cannot be commanded, so from now on its answers are evidence instead of signs of life. If it
    reports that it has no workers of the job that holds it, that is a fact. Otherwise the job may
    be training behind a network that is broken in one direction, and the node is given up like any
    silent one.
    """
    node = draft.put_node(replace(draft.nodes[node.name], mute_at_s=draft.now_s))
    job = draft.holder_of(node.name)
    if node.liveness is not Liveness.SUSPECT:
        return
    at_work = (event.job, event.attempt) == (job.name, job.attempt) if job is not None else True
    at_work = at_work and event.phase in _AT_WORK
    if job is None or job.phase is not JobPhase.RUNNING or event.phase is None or at_work:
        evaluate_silence(draft, (node.name,))
        return
    breaker.count(draft, node.name)
    said = f"attempt {event.attempt} of job {event.job} is {event.phase}" if event.job else "idle"
    _declare_dead(
        draft,
        node,
        f"its agent answers probes, has sent no heartbeat for {_mute_s(draft, node):.0f} s, "
        f"and has no workers of attempt {job.attempt}",
        "mute",
        (
            Evidence("silence", f"nodes/{node.name}", f"{_mute_s(draft, node):.1f} s"),
            Evidence("probe", node.identity.executor_endpoint, said),
        ),
    )


def _mute_s(draft: Draft, node: Node) -> float:
    return draft.now_s - node.heard_at_s


def platform_report(draft: Draft, event: PlatformReport) -> None:
    """Take in which nodes their platform does not reach; it reaches all others."""
    for name, node in list(draft.nodes.items()):
        if name in event.unreachable:
            words = f"{event.unreachable[name]}, reported by {event.actor}"
            draft.put_node(replace(draft.nodes[name], unreachable=PlatformSign(draft.now_s, words)))
        elif node.unreachable is not REACHED:
            draft.put_node(replace(draft.nodes[name], unreachable=REACHED))
    known = [draft.nodes[name] for name in event.unreachable if name in draft.nodes]
    evaluate_silence(draft, [node.name for node in known if node.liveness is Liveness.SUSPECT])


def silent(draft: Draft, silences: Iterable[Silence]) -> None:
    """Take in which nodes are silent, with their newest heartbeats, and evaluate them."""
    names = []
    for found in silences:
        node = draft.nodes.get(found.node)
        if node is None or found.incarnation not in ("", node.identity.incarnation):
            continue  # forgotten, or the hello of its next incarnation is on the way
        draft.put_node(
            replace(
                draft.nodes[node.name],
                last_seen_s=max(node.last_seen_s, found.last_beat_s),
                heard_at_s=max(node.heard_at_s, found.last_beat_s),
            )
        )
        names.append(node.name)
    if names:
        evaluate_silence(draft, names)


def evaluate_silence(draft: Draft, names: Iterable[str]) -> None:
    """Declare nodes SUSPECT or DEAD by the age of their last sign of life; probe them."""
    policy = draft.policy
    # No evidence yet: the driver's own loop was blocked, or the breaker was reset.
    if draft.now_s < draft.silence_hold_until_s:
        return
    holders = draft.holders()
    for name in names:
        node = draft.nodes[name]
        if node.liveness is Liveness.DEAD:
            continue
        if draft.now_s < draft.grace_until_s and node.liveness is Liveness.UNKNOWN:
            continue  # not linked to this leader yet, and the time for that has not passed
        job = holders.get(node.name)
        age_s = draft.now_s - _last_sign(node, job, policy.step_proof_lag_s)
        if age_s < policy.suspect_after_s:
            continue
        if node.liveness is not Liveness.SUSPECT:
            _suspect(draft, node, job, age_s)
        if draft.now_s - node.probed_at_s >= policy.probe_interval_s:
            _probe(draft, draft.nodes[node.name])
        corroboration = _corroboration(draft, node, job)
        limit_s = policy.dead_after_s if corroboration else policy.dead_uncorroborated_after_s
        # Without a job the verdict does no harm, since the node is ALIVE again with its next
        # heartbeat: the breaker protects running jobs only.
        if age_s >= limit_s and (job is None or breaker.allows(draft, node.name)):
            why = f"no heartbeat for {age_s:.1f} s"
            evidence: tuple[Evidence, ...] = (
                Evidence("silence", f"nodes/{node.name}", f"no sign of life for {age_s:.1f} s"),
            )
            if corroboration:
                why = f"{why} and {corroboration}"
                evidence = (*evidence, Evidence("corroboration", "driver", corroboration))
            _declare_dead(draft, draft.nodes[node.name], why, "silence", evidence)


def _last_sign(node: Node, job: Job | None, lag_s: float) -> float:
    """When the node was last known alive: heartbeat, answered probe, or a step of its job."""
    if job is not None and job.phase is JobPhase.RUNNING and job.current.last_step_at_s:
        return max(node.last_seen_s, job.current.last_step_at_s - lag_s)
    return node.last_seen_s


def _corroboration(draft: Draft, node: Node, job: Job | None) -> str:
    """A second sign, besides missing heartbeats, that the node is gone; empty without one."""
    if node.reset_at_s and not node.connected:
        return "its link is broken"
    if node.probe_failed_at_s > node.last_seen_s:
        return "a probe of its port failed"
    if node.mute_at_s > node.last_seen_s:
        return f"its agent answers probes but has sent nothing for {_mute_s(draft, node):.0f} s"
    sign = node.unreachable
    still_counts = draft.now_s - sign.at_s <= draft.policy.platform_report_s
    if sign.at_s > node.last_seen_s and still_counts:
        return f"its platform does not reach it: {sign.words}"
    if job is not None and job.phase is JobPhase.RUNNING and job.current.step_interval_s:
        still_s = draft.now_s - job.current.last_step_at_s
        if still_s > max(
            draft.policy.suspect_after_s, draft.policy.still_intervals * job.current.step_interval_s
        ):
            return f"job {job.name} has completed no step for {still_s:.1f} s"
    return ""


def _suspect(draft: Draft, node: Node, job: Job | None, age_s: float) -> None:
    why = f"no heartbeat for {age_s:.1f} s; it is being probed"
    draft.put_node(replace(draft.nodes[node.name], liveness=Liveness.SUSPECT, liveness_reason=why))
    draft.log_node(
        node.name,
        job,
        reasons.NODE_SUSPECT,
        f"no heartbeat from node {node.name} for {age_s:.1f} s; it is being probed",
        policy="silence",
        mode="OBSERVE",
        evidence=(Evidence("silence", f"nodes/{node.name}", f"{age_s:.1f} s"),),
    )


def _declare_dead(
    draft: Draft, node: Node, why: str, policy: str, evidence: tuple[Evidence, ...]
) -> None:
    job = draft.holder_of(node.name)
    draft.put_node(replace(draft.nodes[node.name], liveness=Liveness.DEAD, liveness_reason=why))
    draft.log_node(
        node.name,
        job,
        reasons.NODE_DEAD,
        f"node {node.name} is dead: {why}",
        policy=policy,
        evidence=evidence,
        outcome=f"job {job.name} loses it" if job else "it ran nothing",
    )


def _probe(draft: Draft, node: Node) -> None:
    """Order a probe of the port of the node; a node that never named one cannot be probed."""
    if node.identity.executor_endpoint:
        draft.put_node(replace(draft.nodes[node.name], probed_at_s=draft.now_s))
        draft.ask(Probe(node.name, node.identity.incarnation, node.identity.executor_endpoint))
