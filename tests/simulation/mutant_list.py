"""Defects that the simulation must find: one change each, of the shell or the core.

``old`` must be in ``file`` exactly once; a mutant that no longer applies is an error, so that a
change of the code brings its mutants along.
"""

from __future__ import annotations

from dataclasses import dataclass

DRIVER = "services/driver/megascale_driver/"
COMMON = "services/common/megascale_common/"
JOB = "services/common/megascale_job/"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect: ``old`` text in ``file`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


def _driver(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, DRIVER + file, old, new)


MUTANTS = (
    # journal and leadership
    _driver(
        "drop the fence", "journal/fenced.py",
        "[self._leadership.guard(), self._expect(self._marker)]", "[self._expect(self._marker)]",
    ),
    _driver(
        "tear a commit", "journal/fenced.py",
        "            await self._send(changes)\n            return\n",
        "            for change in changes:\n                await self._send([change])\n"
        "            return\n",
    ),
    _driver(
        "forget half of a commit", "journal/store.py",
        "[*batch.changes, *self._garbage(batch)]",
        "[*batch.changes[: -1 if len(batch.changes) > 3 else None]]",
    ),
    Mutant(
        "believe a lost write", COMMON + "etcd/settled.py",
        "        except UnknownOutcome as error:\n            failure, unknown = error, True\n",
        "        except UnknownOutcome as error:\n            return Applied(0)\n",
    ),
    Mutant(
        "believe a refused write", COMMON + "etcd/settled.py",
        "        return Rejected(result.revision, dict(result.found))",
        "        return Applied(result.revision)",
    ),
    _driver(
        "write no breaker", "journal/rows.py",
        "if differs(old.breaker, new.breaker):", "if False:",
    ),
    _driver(
        "write no dispositions", "journal/rows.py",
        "elif differs(old.nodes.get(name), node):", "elif name not in old.nodes:",
    ),
    _driver(
        "end with the first term", "shell/leadership.py",
        "            while True:\n                await self._term()\n",
        "            await self._term()\n            await asyncio.sleep(1e9)\n",
    ),
    _driver(
        "lead on without the key", "shell/leadership.py",
        "        await leadership.deposed(OBSERVE_INTERVAL_S)\n",
        "        await asyncio.sleep(1e9)\n",
    ),
    # engine and links
    _driver(
        "publish before the commit", "shell/engine.py",
        "            await self._commit(store, leadership, changes)\n",
        "            self.state = state\n            await self._publish(old, outcomes, audit)\n"
        "            outcomes, audit = [], ()\n"
        "            await self._commit(store, leadership, changes)\n",
    ),
    _driver(
        "commit without the log", "shell/engine.py",
        "store.between(old, state, audit)", "store.between(old, state, ())",
    ),
    _driver(
        "lose a hello", "shell/heartbeats.py",
        "        self._core.post(NodeHello(now_s, link.node, link.identity))", "        pass",
    ),
    _driver(
        "send no orders", "nodes/orders.py",
        "link = self._links.get(name)",
        "link = None",
    ),
    _driver(
        "forget the open links at a new term", "shell/heartbeats.py",
        "links = core.links.all()\n",
        "links = core.links.all()[:-1]\n",
    ),
    _driver(
        "an old link's end counts", "nodes/open_links.py",
        "        if self._links.get(link.node) is not link:\n            return False\n"
        "        del self._links[link.node]\n",
        "        self._links.pop(link.node, None)\n",
    ),
    _driver(
        "refuse a restarted agent", "nodes/open_links.py",
        "            or link.received_at_s < received_since_s\n", "",
    ),
    _driver(
        "an attempt's end brings silence", "shell/engine.py",
        "self.steps.tick(event.now_s, False, silence=False)",
        "self.steps.tick(event.now_s, False)",
    ),
    # presence
    _driver(
        "remember incarnations between terms", "presence/lane.py",
        '            found.incarnation = ""\n', "",
    ),
    _driver(
        "lose changed evidence", "presence/lane.py",
        "decides = found.silent or found.evidence != evidence",
        "decides = found.silent or found.evidence is None",
    ),
    _driver(
        "never report silence", "presence/lane.py",
        "                silences.append(Silence(name, found.incarnation, last_beat_s))\n",
        "",
    ),
    _driver(
        "count an old epoch's version", "presence/reports.py",
        "current = (seen.cluster_generation, seen.create_revision) == (",
        "current = True or (seen.cluster_generation, seen.create_revision) == (",
    ),
    _driver(
        "drop vital events", "presence/inbox.py",
        "            waiting.reports[-1].entry = entry\n            return\n"
        "        cell = self._append(node, entry)\n",
        "            waiting.reports[-1].entry = entry\n            return\n"
        "        if waiting is not None:\n            return\n"
        "        cell = self._append(node, entry)\n",
    ),
    # liveness and breaker
    _driver(
        "skip the corroboration", "core/faults/liveness.py",
        "limit_s = policy.dead_after_s if corroboration else policy.dead_uncorroborated_after_s",
        "limit_s = policy.dead_after_s",
    ),
    _driver(
        "skip the silence", "core/faults/liveness.py",
        "        if age_s < policy.suspect_after_s:\n            continue\n",
        "        if age_s < policy.suspect_after_s / 8:\n            continue\n",
    ),
    _driver(
        "count silence while the loop stood still", "core/machine.py",
        "    if event.loop_blocked:\n", "    if False:\n",
    ),
    _driver(
        "never declare a silent node dead", "core/faults/liveness.py",
        "        if age_s >= limit_s and", "        if age_s >= 1e9 and",
    ),
    _driver(
        "no breaker", "core/faults/breaker.py",
        "    if len(draft.breaker.evictions) < limit(draft):\n", "    if True:\n",
    ),
    _driver(
        "a refused port of another incarnation counts", "core/faults/liveness.py",
        "    if node is None or node.identity.incarnation != event.incarnation:\n        return\n"
        "    if event.outcome",
        "    if node is None:\n        return\n    if event.outcome",
    ),
    _driver(
        "steps prove nothing", "core/faults/liveness.py",
        "        return max(node.last_seen_s, job.current.last_step_at_s - lag_s)\n",
        "        return node.last_seen_s\n",
    ),
    _driver(
        "several silent switches are believed", "core/faults/breaker.py",
        "    if len(silent) <= int(policy.breaker_share * len(switches)):\n",
        "    if len(silent) <= len(switches):\n",
    ),
    _driver(
        "decide on no hang", "core/signs/hang.py",
        "    if found is None or not found.hangs:\n", "    if True or found is None:\n",
    ),
    # nodes and requests
    _driver(
        "order nothing on connect", "core/nodes/nodes.py",
        "    draft.command(event.node)\n    if fresh:", "    if fresh:",
    ),
    _driver(
        "carry out a request twice", "core/machine.py",
        "    if known is None:\n        return False\n", "    return False\n",
    ),
    # jobs and scheduling
    _driver(
        "reuse an attempt", "core/queue/scheduling.py",
        "    number = max(job.attempt, job.opened_elsewhere) + 1\n",
        "    number = max(1, job.attempt)\n",
    ),
    _driver(
        "name a dead spare", "core/values/cluster.py",
        "        and node.liveness is Liveness.ALIVE\n        and node.connected\n", "",
    ),
    _driver(
        "place on a node that still works", "core/values/cluster.py",
        "        and node.report.phase is AttemptPhase.IDLE\n        and node.desired == IDLE\n",
        "",
    ),
    _driver(
        "place on a quarantined node", "core/values/cluster.py",
        "        node.disposition is Disposition.SCHEDULABLE\n"
        "        and node.liveness is Liveness.ALIVE\n",
        "        node.liveness is Liveness.ALIVE\n",
    ),
    _driver(
        "give a node to two jobs", "core/queue/scheduling.py",
        "    held = {name for job in running for name in job.nodes}",
        "    held = set[str]()",
    ),
    _driver(
        "do not wait for the stop", "core/jobs/jobs.py",
        "    return idle and report is not None and report.desired_version >= node.desired_version",
        "    return True",
    ),
    _driver(
        "do not order the stop", "core/values/cluster.py",
        "if job is None or slot is None or job.phase is JobPhase.STOPPING:",
        "if job is None or slot is None:",
    ),
    _driver(
        "start before all are prepared", "core/jobs/jobs.py",
        "if not _all_in(draft, job, _PREPARED):",
        "if not any(_report_phase(draft.nodes.get(s.node), job) in _PREPARED for s in job.slots):",
    ),
    _driver(
        "a failed call is not made again", "core/jobs/jobs.py",
        "            open_failures=failures,\n            open_asked=False,\n",
        "            open_failures=failures,\n",
    ),
    _driver(
        "a lost node is no fault", "core/recovery/recovery.py",
        "    if node is None or node.liveness is Liveness.DEAD:\n        return Fault",
        "    if node is None:\n        return Fault",
    ),
    _driver(
        "a restarted node is no fault", "core/recovery/recovery.py",
        "    if node.identity.incarnation and node.identity.incarnation != slot.incarnation:\n",
        "    if False:\n",
    ),
    _driver(
        "restore what only some ranks hold", "core/checkpoints/replicas.py",
        "common = steps if common is None else common & steps",
        "common = steps if common is None else common | steps",
    ),
    _driver(
        "restore a step that another attempt wrote", "core/checkpoints/replicas.py",
        "return max(usable, default=(0, 0))",
        "found = max(usable, default=(0, 0))\n"
        "    return (found[0] + 10, found[1]) if found[0] else found",
    ),
    _driver(
        "restore a step by its number alone", "core/checkpoints/replicas.py",
        "common = steps if common is None else common & steps",
        "same = {step for step, _ in steps}\n"
        "        common = steps if common is None else {c for c in common if c[0] in same}",
    ),
    # orders to go back to a step
    _driver(
        "go back to what an order gave up", "core/values/job.py",
        "            if attempt <= back.attempt and step > back.step:\n"
        "                return True\n",
        "            pass\n",
    ),
    _driver(
        "go back and refuse nothing", "core/checkpoints/roll_back.py",
        "        refused_steps=tuple(item for item in refused if item != step),\n",
        "",
    ),
    _driver(
        "a step that was given up once stays so", "core/values/job.py",
        "            if (step, attempt) == (back.step, back.written_by):\n"
        "                break\n",
        "",
    ),
    _driver(
        "go back and save first", "core/orders/orders.py",
        "now=event.now or back)", "now=event.now)",
    ),
    # the search for an unnamed culprit
    _driver(
        "search for no culprit", "core/recovery/search.py",
        "    return cause.kind is FaultKind.WORKER_SYMPTOM or"
        " (cause.kind in _UNNAMED and not cause.node)",
        "    return False",
    ),
    _driver(
        "search after a crash of workers alone", "core/recovery/search.py",
        " or (cause.kind in _UNNAMED and not cause.node)", "",
    ),
    _driver(
        "keep a bad link to oneself", "core/recovery/search.py",
        "        _log_link(draft, job, one, other)\n", "        pass\n",
    ),
    _driver(
        "keep a node that fails with all others", "core/recovery/search.py",
        "    if breaker.allows(draft, name, nodes.GROUP_CHECK):\n", "    if False:\n",
    ),
    _driver(
        "take every answer for a pass", "nodes/checks.py",
        "    if bad:\n        return Found(Answer.FAIL",
        "    if False:\n        return Found(Answer.FAIL",
    ),
    _driver(
        "blame a node for one failed pair", "analysis/group_search.py",
        "PARTNERS = 2  # good", "PARTNERS = 1  # good",
    ),
    _driver(
        "never cross the halves", "analysis/group_search.py",
        "            if all(passed):\n"
        "                self.tasks.append(Task(Kind.CROSS, groups[0][0], groups[1][0]))\n",
        "",
    ),
    _driver(
        "check all nodes but the last", "core/recovery/search.py",
        "    for index, group in enumerate(running):\n",
        "    for index, group in enumerate(running[:1]):\n",
    ),
    # over-eviction
    _driver(
        "over-evict although nobody has allowed it", "core/values/rules.py",
        '    "a job leaves the group of nodes that shares an unknown culprit",\n'
        '    default="OBSERVE",\n',
        '    "a job leaves the group of nodes that shares an unknown culprit",\n',
    ),
    _driver(
        "over-evict although nobody stands by", "core/recovery/search.py",
        "    enough = spare >= len(suspects)", "    enough = True",
    ),
    _driver(
        "over-evict nobody", "core/recovery/search.py",
        "    if enough and enforced:\n", "    if False:\n",
    ),
    _driver(
        "count nodes at work as standing by", "core/faults/blame.py",
        "    taken |= draft.holders().keys()\n", "",
    ),
    # spares by the rule
    _driver(
        "name no spares by the rule", "core/queue/scheduling.py",
        '    if job.config.recovery.spares != "auto" or not job.slots:\n        return',
        "    return",
    ),
    Mutant(
        "take a device for a node in the rule of spares", JOB + "sizes/failures.py",
        "hours / max(1, devices_per_node)", "hours",
    ),
    _driver(
        "name one spare too few", "core/queue/scheduling.py",
        "        missing = spares_wanted(job) - len(kept) if job.active else 0\n",
        "        missing = spares_wanted(job) - len(kept) - 1 if job.active else 0\n",
    ),
    # replicas
    _driver(
        "count the replicas of dead nodes", "core/checkpoints/replicas.py",
        "        if node.liveness is not Liveness.ALIVE or not node.connected:\n"
        "            continue\n"
        "        if node.report is None",
        "        if node.report is None",
    ),
    _driver(
        "name no source of a replica", "core/checkpoints/replicas.py",
        "    if restore.source is not RestoreSource.MEMORY:\n        return ()\n",
        "    return ()\n",
    ),
    _driver(
        "take any node for the source of a replica", "core/checkpoints/replicas.py",
        "        name = copies.get(rank, {}).get(wanted)\n",
        "        name = min(nodes) if wanted in copies.get(rank, {}) else None\n",
    ),
    _driver(
        "restore replicas that some ranks lack", "core/checkpoints/replicas.py",
        "steps = {item for item in own | set(copies.get(rank, {})) if item[1] < job.attempt}\n",
        "steps = {item for item in own | set().union(*copies.values())"
        " if item[1] < job.attempt}\n",
    ),
    _driver(
        "restore the oldest step that all have", "core/checkpoints/replicas.py",
        "    return max(usable, default=(0, 0))", "    return min(usable, default=(0, 0))",
    ),
    # quotas
    _driver(
        "ignore the quota", "placement/queue_values.py",
        "        return max(0, taken + job.world_size - quota)", "        return 0",
    ),
    _driver(
        "forget what has started in this decision", "placement/queue_values.py",
        "        self._used[job.tenant] += job.world_size\n\n    def promise",
        "        pass\n\n    def promise",
    ),
    _driver(
        "hold only to the driver's own quotas", "core/queue/quotas.py",
        "    return {**policy.quotas, **{name: tenant.quota for name, tenant in tenants.items()}}",
        "    return {**policy.quotas}",
    ),
    _driver(
        "write no quota", "journal/rows.py",
        '        self._small(batch, "tenants/", old.tenants, new.tenants)\n', "",
    ),
    _driver(
        "never lift a quota", "core/queue/quotas.py",
        "        del draft.tenants[event.tenant]\n", "        pass\n",
    ),
    # nodes that have left
    _driver(
        "never forget a node", "core/nodes/nodes.py",
        "    if draft.now_s < draft.forget_due_s:\n", "    if True:\n",
    ),
    _driver(
        "forget a node after an hour", "core/nodes/nodes.py",
        "    limit_s = draft.policy.forget_dead_s\n",
        "    limit_s = draft.policy.forget_dead_s / 24\n",
    ),
    _driver(
        "forget a cordoned node", "core/nodes/nodes.py",
        "        and node.disposition is Disposition.SCHEDULABLE\n", "",
    ),
    _driver(
        "forget a node that a job needs", "core/nodes/nodes.py",
        "    gone = [node for node in gone if node.name not in wanted]\n", "",
    ),
    _driver(
        "keep the row of a forgotten node", "journal/rows.py",
        'batch.changes.append(Change(f"nodes/{name}"))\n', "pass\n",
    ),
    # saves that fail
    _driver(
        "wait for a save that has failed", "core/nodes/departures.py",
        "    why = _not_saved(draft, job)\n", "    why = \"\"\n",
    ),
    _driver(
        "believe the failure of an older order", "core/nodes/departures.py",
        "if r.leave_failed[0] == order]", "if r.leave_failed[0]]",
    ),
    # nodes that answer and say nothing, jobs without workers
    _driver(
        "believe a mute agent for ever", "core/faults/liveness.py",
        "        if silent and _mute_s(draft, node) >= draft.policy.dead_uncorroborated_after_s:\n",
        "        if silent and _mute_s(draft, node) >= 1e9:\n",
    ),
    _driver(
        "ask nobody for workers", "core/signs/hang.py",
        "    limit_s = draft.policy.no_workers_after_s\n    if job.phase",
        "    limit_s = 1e9\n    if job.phase",
    ),
    # new code
    _driver(
        "begin the next attempt with the old code", "core/jobs/jobs.py",
        "            config=config,\n            spec_revision", "            spec_revision",
    ),
    _driver(
        "send no code path", "nodes/orders.py",
        "    job_json = loading.to_json(job.config).encode()\n",
        "    job_json = loading.to_json(__import__(\"dataclasses\").replace(\n"
        "        job.config, code=type(job.config.code)())).encode()\n",
    ),
    _driver(
        "lose an update with the leader", "core/values/job.py",
        "    pending_spec: str = \"\"\n",
        "    pending_spec: str = field(default=\"\", metadata=VOLATILE)\n",
    ),
    _driver(
        "update an attempt that runs", "core/orders/orders.py",
        "    if not job.active:\n        jobs.apply_update(draft, job)\n    elif event.restart:\n",
        "    jobs.apply_update(draft, job)\n    if event.restart:\n",
    ),
)  # fmt: skip
