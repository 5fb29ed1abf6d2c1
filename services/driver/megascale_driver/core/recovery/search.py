"""The search for the node that broke an attempt, if no fault names one.

The culprit is unknown if all ranks lost a peer at once, if several held the others up, or if the
job ends because values were not finite. When the attempt has stopped, its nodes check each other in
groups, within a time limit; spares help to decide. The job stays STOPPING meanwhile, so it keeps
its nodes. Possible results:

- a node that fails with good partners: a fact like a failed self-check (rule ``group-check``);
- two good nodes that fail together: the link between them is named, and no node is evicted;
- a group that shares a culprit that was not found: the job leaves the whole group if spares suffice
  (rule ``over-eviction``, inferred, so only observed unless an operator has it enforced).

Note [Bisecting groups]
~~~~~~~~~~~~~~~~~~~~~~~
A check of one node finds nothing where it takes two to see the fault: a slow link, or a card that
fails only under a collective. So groups of nodes all-reduce a known payload. A group that passes
clears all its members at once. A group that fails is halved until two or three suspects are left,
and each of these is paired with good nodes: with two of them where there are two, so that a broken
link does not look like a broken node. The groups of a round are disjoint and are checked at the
same time, so one bad node among n is found in at most log2(n) + 3 rounds, where checks of all pairs
would take n(n - 1) / 2. Two halves that pass alone and fail together are crossed until the pair
with the bad link is found. :mod:`megascale_driver.analysis.group_search` is the pure search; this
module orders its groups and acts on the result.

The members and the result of each round are stored, but not the state of the search: a new leader
replays the rounds, which gives the same state, and repeats only the round that was open. If a node
of that round can no longer be checked, the search begins anew, within the same time limit. A fault
that names a node ends it.
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


def in_progress(draft: Draft, job: Job) -> bool:
    """Begin or continue the search of an attempt that has stopped; True while it is in progress."""
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
        what = f"the limit of {policy.search_cap_s:g} s was reached"
        if late:
            what = (
                f"round {found.search.rounds} took longer than {policy.group_check_timeout_s:g} s"
            )
        _conclude(draft, job, found, what)
        return False
    return True


def culprit_unknown(job: Job) -> bool:
    """True if the faults of the attempt name no node, and the job is to try again.

    Also true if the job ends because its values were not finite: a device may be the reason.
    """
    if job.current.suspects_devices and job.after_stop is JobPhase.FAILED:
        return True
    if job.after_stop is not JobPhase.QUEUED or job.current.leaving is not None:
        return False
    cause = blame.culprit(job.current.faults)
    if cause is None:
        return False
    if cause.kind is FaultKind.DEADLINE and job.current.restore is None:
        return False  # its nodes were still preparing, each on its own
    return cause.kind is FaultKind.WORKER_SYMPTOM or (cause.kind in _UNNAMED and not cause.node)


def checked(draft: Draft, event: GroupChecked) -> None:
    """Take in the answers of one group; the last one of a round starts the next round."""
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
        outcome=f"the next step waits for it, at most {draft.policy.search_cap_s:g} s",
    )
    _ask(draft, draft.jobs[job.name], Searching(search, begun_at_s, draft.now_s))
    return True


def _resume(draft: Draft, job: Job) -> bool:
    """Continue the search of the leader before, if every node that is next can be checked."""
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
        f"a new leader continues with round {search.rounds} of the checks that "
        f"{counted(len(log.nodes), 'node')} of attempt {job.attempt} do in groups",
        policy="group-check",
        outcome=f"the next step waits for it, at most {draft.policy.search_cap_s:g} s in all",
    )
    _ask(draft, draft.jobs[job.name], Searching(search, log.begun_at_s, draft.now_s))
    return True


def _able(node: Node | None, incarnation: str) -> bool:
    """True if the node can be checked: alive, idle, and (of a slot) not restarted since."""
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
    """Have all groups of the current round checked at once."""
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
    """Act on the result, and log it; ``given_up``: why the search did not finish."""
    search = found.search
    _put(draft, job, replace(found, over=True))
    for name in search.bad:
        _evict(draft, draft.jobs[job.name], found, name)
    for one, other in search.links:
        _log_link(draft, job, one, other)
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


def _log_link(draft: Draft, job: Job, one: str, other: str) -> None:
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
    """Leave the group that shares the culprit, if enough nodes stand by."""
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
    """Number of idle nodes that could take a place in the job: its spares, and unreserved ones."""
    kinds = {device.kind for slot in job.slots for device in _devices(draft, slot.node)}
    wanted = max(len(slot.devices) for slot in job.slots)
    return sum(
        {device.kind for device in node.identity.devices} == kinds
        for node in blame.standing_by(draft, job, wanted)
    )


def _devices(draft: Draft, name: str) -> tuple[Device, ...]:
    node = draft.nodes.get(name)
    return node.identity.devices if node is not None else ()
