"""Forgets nodes that have left: dead for long, held by no job, and nobody has decided about them.

A fleet that replaces machines would else keep every name for ever, in memory and in etcd. A node
that was cordoned, drained or quarantined stays until somebody puts it back: forgotten, it could
come back as one that gets work. A forgotten node that comes back after all joins as a new one.
"""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.state import Disposition, Liveness, Node
from megascale_job.visible import counted

# How often it is looked for such nodes: it goes through all of them.
LOOK_S = 3600.0
LOOK_MIN_S = 60.0
MAX_AT_ONCE = 64  # nodes in one decision; their keys are deleted together
AGAIN_S = 1.0
MAX_NAMED = 8


def expire(draft: Draft) -> None:
    """Forget what the policy keeps no longer, the longest dead first, a few at a time."""
    if draft.now_s < draft.forget_due_s:
        return
    limit_s = draft.policy.forget_dead_s
    draft.forget_due_s = draft.now_s + max(LOOK_MIN_S, min(LOOK_S, limit_s / 4))
    oldest_s = draft.now_s - limit_s
    gone = [node for node in draft.nodes.values() if _may_go(node) and node.last_seen_s < oldest_s]
    if not gone:
        return
    wanted = {
        name
        for job in draft.jobs.values()
        if not job.terminal
        for name in (*(slot.node for slot in job.slots), *job.spares)
    }
    gone = [node for node in gone if node.name not in wanted]
    gone.sort(key=lambda node: (node.last_seen_s, node.name))
    if len(gone) > MAX_AT_ONCE:
        draft.forget_due_s = draft.now_s + AGAIN_S
    if gone:
        _forget(draft, [node.name for node in gone[:MAX_AT_ONCE]], limit_s)


def _may_go(node: Node) -> bool:
    return (
        node.liveness is Liveness.DEAD
        and not node.connected
        and node.disposition is Disposition.SCHEDULABLE
    )


def _forget(draft: Draft, names: list[str], limit_s: float) -> None:
    for name in names:
        del draft.nodes[name]
    one = len(names) == 1
    shown = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    what = f"node {shown} is" if one else f"nodes {shown}{more} are"
    draft.log(
        "NODE_FORGOTTEN",
        f"{what} forgotten: dead for more than {counted(limit_s / 3600, 'hour')}, and no job needs "
        f"{'it' if one else 'them'}",
        subject=f"nodes/{names[0]}" if one else "cluster", policy="retention",
        evidence=tuple(Evidence("silence", f"nodes/{name}", "dead") for name in names),
        outcome="a node that comes back joins as a new one",
    )  # fmt: skip
