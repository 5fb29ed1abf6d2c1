"""Which of the findings in the logs of all nodes is the cause, and what it asks for.

The order of evidence: faults in a kernel log outrank texts of workers, a root outranks what only
follows from one, and of equals the earliest counts. No text evicts a node that is not its own
(``NEVER_EVICT`` in the vocabulary), and a root that appears on several nodes at once is software,
configuration or the fabric: it restarts the attempt and evicts no node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale_common.node.logs.categories import Action, Domain, Kind, Role
from megascale_common.node.logs.matcher import Finding, Matcher

_STRENGTH: dict[Action, int] = {"none": 0, "alert": 1, "restart": 2, "evict_restart": 3, "stop": 4}
# Kernel evidence within this time of the earliest root outranks that root.
KERNEL_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Observation:
    """A finding of one node. ``at`` orders findings: seconds on one clock, or line numbers."""

    node: str
    finding: Finding
    at: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The one primary category, and what it asks for; ``nodes`` are those with the same root."""

    category: str
    role: Role
    action: Action
    domain: Domain
    evidence: str
    fingerprint: str
    nodes: tuple[str, ...]


BENIGN = Verdict("benign", "benign", "none", "unknown", "", "", ())


def verdict(observations: Iterable[Observation]) -> Verdict:
    """The cause among these findings; benign if none reports trouble."""
    seen = sorted(observations, key=lambda one: (one.at, one.node, one.finding.first))
    if not seen:
        return BENIGN
    primary = _primary(seen)
    kind, fingerprint = primary.finding.kind, primary.finding.fingerprint
    nodes = tuple(sorted({one.node for one in seen if one.finding.fingerprint == fingerprint}))
    action = _action(primary, seen)
    if action == "evict_restart" and len(nodes) > 1:
        action = "restart"
    return Verdict(
        kind.category, kind.role, action, kind.domain, primary.finding.sample, fingerprint, nodes
    )


def _primary(seen: Sequence[Observation]) -> Observation:
    roots = [one.at for one in seen if _tier(one.finding.kind) <= 2]
    limit = min(roots) + KERNEL_WINDOW_S if roots else float("inf")

    def order(one: Observation) -> tuple[int, float, str, int]:
        tier = _tier(one.finding.kind)
        if tier == 0 and one.at > limit:
            tier = 1
        return tier, one.at, one.node, one.finding.first

    return min(seen, key=order)


def _tier(kind: Kind) -> int:
    """How far a kind is from being a cause: 0 is a fault in a kernel log, 6 is nothing."""
    if kind.role in {"advice", "benign"}:
        return 6
    if kind.role == "teardown":
        return 5
    if kind.weak and kind.action == "alert":
        return 4
    if kind.role == "secondary":
        return 3
    if kind.action == "alert" or kind.weak:
        return 2
    return 0 if kind.kernel else 1


def _action(primary: Observation, seen: Sequence[Observation]) -> Action:
    """What the cause asks for, raised by what other roots of its node ask for.

    Only the cause itself stops a job: a restart may cure what came with it.
    """
    action = primary.finding.kind.action
    if primary.finding.kind.role != "root" or action in {"none", "stop"}:
        return action
    for one in seen:
        other = one.finding.kind
        raises = other.role == "root" and one.node == primary.node and other.action != "stop"
        if raises and _STRENGTH[other.action] > _STRENGTH[action]:
            action = other.action
    return action


def classify(text: str, node: str = "") -> Verdict:
    """The verdict on one excerpt, whose lines are in the order in which they were written."""
    matcher = Matcher()
    matcher.feed(text.encode(errors="replace"))
    matcher.close()
    # Without clocks, the ordinal orders lines; it is not compared with the window in seconds.
    return verdict(Observation(node, one, 0.0) for one in matcher.take())
