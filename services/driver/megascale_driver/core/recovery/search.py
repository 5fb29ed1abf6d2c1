"""The search for the node that broke an attempt, where no fault names one.

All ranks lost a peer at once, several held the others up, or the values of a run were not finite
and it ends for that: the culprit is unknown. When the
attempt has stopped, its nodes check each other in groups that bisect
(:mod:`megascale_driver.analysis.group_search`), within a time cap; spares help to decide. The job
stays STOPPING meanwhile, so it holds its nodes. What is found:

- a node that fails with good partners is a fact like a failed self-check (rule ``group-check``);
- of two good nodes that fail together the link is named, and nobody is evicted;
- a group that shares a culprit which was not found is left as a whole if spares suffice (rule
  ``over-eviction``, inferred, so only observed unless an operator has it enforced).

Who takes part and what each round has shown is stored: a new leader goes on with the round that was
open. If one of its nodes cannot be checked any more, the search begins anew, within the same time.
A fault that names a node ends it.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.analysis.group_search import Search, advance, begin, replayed, taken
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import blame, breaker, job_faults
from megascale_driver.core.nodes import nodes
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import FaultKind, Searching, SearchLog
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Device,
    Disposition,
    Liveness,
    Node,
)
from megascale_driver.core.values.events import (
    CheckGroup,
    Evidence,
    GroupChecked,
    GroupMember,
    listed,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_job.visible import agreed, counted

MAX_NAMED = 8
MAX_HELPERS = 2
_UNNAMED = frozenset({FaultKind.HANG, FaultKind.DEADLINE})


def goes_on(draft: Draft, job: Job) -> bool:
    """Begin or continue the search of an attempt that has stopped; whether it is in progress."""
    found = job.current.searching
    if found is not None and found.over:
        return False
    if not culprit_unknown(job):
        if found is not None:
            _put(draft, job, replace(found, over=True))
        return False
    if found is None:
        return _resume(draft, job) or _begin(draft, job)
    policy = draft.policy
    late = draft.now_s >= found.round_at_s + policy.group_check_timeout_s
    if late or draft.now_s >= found.begun_at_s + policy.search_cap_s:
        what = f"no more than {policy.search_cap_s:g} s are spent on it"
        if late:
            what = (
                f"round {found.search.rounds} took longer than {policy.group_check_timeout_s:g} s"
            )
        _conclude(draft, job, found, what)
        return False
    return True


def culprit_unknown(job: Job) -> bool:
    """Whether the faults of the attempt name no node, and the job is to try again.

    Or it ends because its values were not finite: then a device may be why.
    """
    if job.current.suspects_devices and job.after_stop is JobPhase.FAILED:
        return True
    if job.after_stop is not JobPhase.QUEUED or job.current.leaving is not None:
        return False
    cause = blame.culprit(job.current.faults)
    if cause is None:
        return False
    if cause.kind is FaultKind.DEADLINE and job.current.restore is None:
        return False  # its nodes were still preparing, each for itself
    return cause.kind is FaultKind.WORKER_SYMPTOM or (cause.kind in _UNNAMED and not cause.node)


def checked(draft: Draft, event: GroupChecked) -> None:
    """Take in the answers of one group; with the last of a round the search goes on."""
    job = draft.jobs.get(event.job)
    found = job.current.searching if job is not None else None
    if job is None or found is None or found.over or job.phase is not JobPhase.STOPPING:
        return
    if (job.attempt, found.search.rounds) != (event.attempt, event.round):
        return
    if event.group not in found.missing:
        return
    found = replace(
        found,
        missing=found.missing - {event.group},
        answers={**found.answers, **event.answers},
        details={**found.details, **event.details},
    )
    if found.missing:
        _put(draft, job, found)
        return
    log = job.current.search_log
    rounds = (*log.rounds, taken(found.search, found.answers))
    job = draft.put_attempt(
        job.name, replace(draft.jobs[job.name].current, search_log=replace(log, rounds=rounds))
    )
    search = advance(found.search, found.answers)
    found = replace(found, search=search, answers={}, round_at_s=draft.now_s)
    if search.over:
        _conclude(draft, job, found, "")
    else:
        _ask(draft, job, found)


def _put(draft: Draft, job: Job, found: Searching) -> None:
    draft.put_attempt(job.name, replace(draft.jobs[job.name].current, searching=found))


def _begin(draft: Draft, job: Job) -> bool:
    able = [slot.node for slot in job.slots if _able(draft.nodes.get(slot.node), slot.incarnation)]
    if len(able) < 2:
        return False
    helpers = [name for name in job.spares if _able(draft.nodes.get(name), "")][:MAX_HELPERS]
    search = begin(able, helpers)
    begun_at_s = job.current.search_log.begun_at_s or draft.now_s
    log = SearchLog(tuple(able), tuple(helpers), begun_at_s)
    draft.put_attempt(job.name, replace(draft.jobs[job.name].current, search_log=log))
    draft.log_job(
        job,
        reasons.GROUP_CHECK_STARTED,
        f"no fault of attempt {job.attempt} names a node: {counted(len(able), 'node')} check "
        "each other in "
        "groups",
        policy="group-check",
        outcome=f"what follows waits for it, at most {draft.policy.search_cap_s:g} s",
    )
    _ask(draft, draft.jobs[job.name], Searching(search, begun_at_s, draft.now_s))
    return True


def _resume(draft: Draft, job: Job) -> bool:
    """Go on with the search of the leader before, if all that it checks next can be checked."""
    log = job.current.search_log
    if not log.nodes:
        return False
    search = replayed(log.nodes, log.helpers, log.rounds)
    for name in dict.fromkeys(name for group in search.running for name in group):
        slot = job.slot_of(name)
        if not _able(draft.nodes.get(name), slot.incarnation if slot is not None else ""):
            return False
    draft.log_job(
        job,
        reasons.GROUP_CHECK_STARTED,
        f"a new leader goes on with round {search.rounds} of the checks that "
        f"{counted(len(log.nodes), 'node')} of attempt {job.attempt} do in groups",
        policy="group-check",
        outcome=f"what follows waits for it, at most {draft.policy.search_cap_s:g} s in all",
    )
    _ask(draft, draft.jobs[job.name], Searching(search, log.begun_at_s, draft.now_s))
    return True


def _able(node: Node | None, incarnation: str) -> bool:
    """Whether the node can be checked: alive, idle, and (of a slot) not restarted since."""
    return (
        node is not None
        and node.liveness is Liveness.ALIVE
        and node.connected
        and node.disposition is not Disposition.QUARANTINED
        and (not incarnation or node.identity.incarnation == incarnation)
        and node.report is not None
        and node.report.phase is AttemptPhase.IDLE
        and bool(node.identity.executor_endpoint)
    )


def _ask(draft: Draft, job: Job, found: Searching) -> None:
    """Have the groups of the present round checked, all at once."""
    running = found.search.running
    found = replace(found, missing=frozenset(range(len(running))))
    _put(draft, job, found)
    draft.put_job(
        replace(
            draft.jobs[job.name],
            reason=f"attempt {job.attempt} has stopped: {job.stop_reason}; its nodes check each "
            f"other (round {found.search.rounds})",
        )
    )
    for index, group in enumerate(running):
        members = tuple(_member(draft, job, name) for name in group)
        draft.ask(CheckGroup(job.name, job.attempt, found.search.rounds, index, members))


def _member(draft: Draft, job: Job, name: str) -> GroupMember:
    who, slot = draft.nodes[name].identity, job.slot_of(name)
    devices = slot.devices if slot is not None else tuple(each.index for each in who.devices)
    return GroupMember(name, who.incarnation, who.executor_endpoint, devices)


def _conclude(draft: Draft, job: Job, found: Searching, given_up: str) -> None:
    """Act on what was found, and say it; ``given_up``: why the search did not come to its end."""
    search = found.search
    _put(draft, job, replace(found, over=True))
    for name in search.bad:
        _evict(draft, draft.jobs[job.name], found, name)
    for one, other in search.links:
        _say_link(draft, job, one, other)
    suspects = tuple(name for name in search.suspects if name not in search.bad)
    draft.log_job(
        job,
        reasons.GROUP_CHECK_ENDED,
        _result(search, suspects, given_up),
        policy="group-check",
        outcome="the next attempt follows" if job.after_stop is JobPhase.QUEUED else "the job ends",
    )
    if suspects and not search.bad:
        _over_evict(draft, draft.jobs[job.name], suspects)


def _result(search: Search, suspects: tuple[str, ...], given_up: str) -> str:
    parts = []
    if search.bad:
        parts.append(f"found {listed(search.bad, MAX_NAMED)}")
    if search.links:
        links = len(search.links)
        parts.append(f"{counted(links, 'link')} between good nodes {agreed(links, 'fail')}")
    if suspects:
        parts.append(f"the culprit is among {listed(suspects, MAX_NAMED)}")
    if search.left_out:
        parts.append(f"{listed(search.left_out, MAX_NAMED)} could not be checked")
    text = "; ".join(parts) or "no node and no link fails now"
    why = f"; it was given up: {given_up}" if given_up else ""
    return f"{search.rounds} rounds of checks: {text}{why}"


def _evict(draft: Draft, job: Job, found: Searching, name: str) -> None:
    partners = sorted(found.search.failed_with.get(name, frozenset()) & found.search.good)
    message = f"its checks with {listed(tuple(partners), MAX_NAMED)} fail, which pass with others"
    detail = found.details.get(name, "")
    if detail:
        message += f": {detail}"
    evidence = (Evidence("group-check", f"nodes/{name}", detail or "no answer"),)
    if breaker.allows(draft, name, nodes.GROUP_CHECK):
        nodes.quarantine(draft, name, message, policy=nodes.GROUP_CHECK, evidence=evidence)
        return
    draft.log_node(
        name,
        job,
        reasons.NODE_EVICTED,
        f"node {name} is not evicted: {message}",
        policy=nodes.GROUP_CHECK,
        mode="OBSERVE",
        evidence=evidence,
        outcome="nothing: the rule is observed, or the breaker has tripped",
    )


def _say_link(draft: Draft, job: Job, one: str, other: str) -> None:
    draft.log_node(
        one,
        job,
        reasons.LINK_SUSPECTED,
        f"nodes {one} and {other} fail together, and each passes with others: the network between "
        "them is broken",
        policy="group-check",
        evidence=(Evidence("group-check", f"nodes/{other}", f"with {one}"),),
        outcome="no node is evicted for it: look at the network between them, or evict one",
    )


def _over_evict(draft: Draft, job: Job, suspects: tuple[str, ...]) -> None:
    """Leave the group that shares the culprit, if as many nodes stand by."""
    enforced = draft.enforced("over-eviction")
    spare = _standing_by(draft, job)
    enough = spare >= len(suspects)
    message = f"the culprit was not found and is among {listed(suspects, MAX_NAMED)}; "
    message += f"{counted(spare, 'node')} {agreed(spare, 'stand')} by"
    outcome = job_faults.left_by(job)
    if not enough:
        outcome = "nothing: too few nodes stand by to take their place; evict one by hand"
    elif not enforced:
        outcome = "nothing: the rule is observed; it would leave all of them"
    elif not all(breaker.allows(draft, name, "over-eviction") for name in suspects):
        enforced, outcome = False, "nothing: the breaker has tripped"
    if enough and enforced:
        draft.put_job(
            replace(draft.jobs[job.name], evicted=tuple(dict.fromkeys((*job.evicted, *suspects))))
        )
    draft.log_job(
        job,
        reasons.GROUP_OVER_EVICTED,
        message,
        policy="over-eviction",
        mode="ENFORCE" if enough and enforced else "OBSERVE",
        evidence=tuple(Evidence("suspect", f"nodes/{n}") for n in suspects[:MAX_NAMED]),
        outcome=outcome,
    )


def _standing_by(draft: Draft, job: Job) -> int:
    """Idle nodes that could take a place in the job: its own spares, and those of nobody."""
    kinds = {device.kind for slot in job.slots for device in _devices(draft, slot.node)}
    wanted = max(len(slot.devices) for slot in job.slots)
    return sum(
        {device.kind for device in node.identity.devices} == kinds
        for node in blame.standing_by(draft, job, wanted)
    )


def _devices(draft: Draft, name: str) -> tuple[Device, ...]:
    node = draft.nodes.get(name)
    return node.identity.devices if node is not None else ()
