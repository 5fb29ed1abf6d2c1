"""A node that fails a check by comparison with the fleet twice in a row: what is advised.

One slow measurement condemns no node, because another process may have used the device. The second
one in a row of the same target is evidence, and still a comparison: it is observed unless an
operator has the rule enforced. Then the node is quarantined, within the breaker's limits.
"""

from __future__ import annotations

from typing import Final

from megascale_driver.core import breaker, nodes
from megascale_driver.core.draft import Draft
from megascale_driver.core.events import Evidence
from megascale_driver.core.group_events import CheckRepeated
from megascale_driver.core.state import Disposition

REPEATED_CHECK: Final = "repeated-check"
_MAX_DETAIL = 400


def failed(draft: Draft, event: CheckRepeated) -> None:
    """Write down what is advised; quarantine the node where the rule is enforced."""
    node = draft.nodes.get(event.node)
    if node is None or node.disposition is Disposition.QUARANTINED:
        return
    reason = f"check {event.check} failed twice in a row: {event.detail[:_MAX_DETAIL]}"
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
