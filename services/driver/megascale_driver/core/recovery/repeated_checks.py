"""A node that fails a check by comparison with the fleet twice in a row: what is advised.

One slow measurement condemns no node, because another process may have used the device. The second
one in a row of the same target is evidence, and still a comparison: it is observed unless an
operator has the rule enforced. Then the node is quarantined, within the breaker's limits. How often
it was is stored with the node, so a new leader counts on.
"""

from __future__ import annotations

from typing import Final

from megascale_driver.analysis.baselines import REPEATS
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import breaker
from megascale_driver.core.nodes import nodes
from megascale_driver.core.values.conditions import MAX_SLOW, SlowCheck
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.group_events import CheckCompared
from megascale_driver.core.values.state import Disposition
from megascale_job.visible import counted

REPEATED_CHECK: Final = "repeated-check"
_MAX_DETAIL = 400


def compared(draft: Draft, event: CheckCompared) -> None:
    """Count what FAILS in a row; write down what is advised, or quarantine where enforced."""
    node = draft.nodes.get(event.node)
    if node is None:
        return
    others = tuple(
        each
        for each in node.slow_checks
        if (each.check, each.target) != (event.check, event.target)
    )
    if not event.failed:
        if others != node.slow_checks:
            draft.node(event.node, slow_checks=others)
        return
    before = next((each for each in node.slow_checks if each not in others), None)
    if before is not None and event.origin and before.origin == event.origin:
        return  # the same measurement, told to another leader
    times = before.times + 1 if before is not None else 1
    newest = SlowCheck(event.check, event.target, times, event.origin)
    draft.node(event.node, slow_checks=(*others, newest)[-MAX_SLOW:])
    if times >= REPEATS and node.disposition is not Disposition.QUARANTINED:
        _advise(draft, event, times)


def _advise(draft: Draft, event: CheckCompared, times: int) -> None:
    detail = event.detail[:_MAX_DETAIL]
    reason = (
        f"check {event.check} of {event.target} failed {counted(times, 'time')} in a row: {detail}"
    )
    evidence = (Evidence("check", f"nodes/{event.node}", event.check),)
    enforced = draft.enforced(REPEATED_CHECK)
    if enforced and breaker.allows(draft, event.node, REPEATED_CHECK):
        nodes.quarantine(draft, event.node, reason, policy=REPEATED_CHECK, evidence=evidence)
        return
    draft.log(
        "CHECK_REPEATED", f"node {event.node}: {reason}", subject=f"nodes/{event.node}",
        policy=REPEATED_CHECK, mode="OBSERVE", evidence=evidence,
        outcome="too many nodes were evicted recently: it keeps its work" if enforced
        else "the rule is observed: evicting the node is advised",
    )  # fmt: skip
