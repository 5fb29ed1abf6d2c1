"""Which of the findings in the logs of all nodes is the cause, and what it asks for.

The order of evidence: faults in a kernel log outrank texts of workers, a root outranks what only
follows from one, and of equals the earliest counts. No text evicts a node that is not its own
(``NEVER_EVICT`` in the vocabulary), and a root that appears on several nodes at once is software,
configuration or the fabric: it restarts the attempt and evicts no node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megascale_common.node.logs.categories import Action, Domain, Kind, Role
from megascale_common.node.logs.matcher import (
    MAX_LINE_BYTES,
    MAX_SAMPLE_CHARS,
    Finding,
    Matcher,
    kind_of,
)

_STRENGTH: dict[Action, int] = {"none": 0, "alert": 1, "restart": 2, "evict_restart": 3, "stop": 4}
# Kernel evidence within this time of the earliest root outranks that root.
KERNEL_WINDOW_S = 60.0
JOINED = 8  # lines that are looked at together where no line alone has a known cause
MAX_JOINED_LINES = 200  # of one excerpt, from its beginning; the rest is seen line by line
# Lines that explain the failures after them away: a host without NVSwitch needs no fabric manager.
_FINAL = frozenset({"fabric-no-switch"})


@dataclass(frozen=True, slots=True)
class Observation:
    """A finding of one node. ``at`` orders findings: seconds on one clock, or line numbers.

    ``rank`` is the one whose log has it, -1 for the kernel's log. Nodes of one ``host`` share its
    kernel log and its hardware; empty: the node is a host of its own.
    """

    node: str
    finding: Finding
    at: float
    rank: int = -1
    host: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The one primary category, and what it asks for; ``nodes`` are those with the same root.

    ``node`` and ``rank`` have the line; ``set_aside`` counts the lines of other kinds, which
    followed from it or are weaker evidence. ``kernel``: the kernel's own driver reports it.
    """

    category: str
    role: Role
    action: Action
    domain: Domain
    evidence: str
    fingerprint: str
    nodes: tuple[str, ...]
    node: str = ""
    rank: int = -1
    set_aside: int = 0
    kernel: bool = False
    weak: bool = False  # the line only wraps or repeats a failure
    shared: bool = False  # by several hosts: software, configuration or the fabric


BENIGN = Verdict("benign", "benign", "none", "unknown", "", "", ())


def verdict(observations: Iterable[Observation]) -> Verdict:
    """The cause among these findings; benign if none reports trouble."""
    seen = sorted(observations, key=lambda one: (one.at, one.node, one.finding.first))
    if not seen:
        return BENIGN
    primary = _primary(seen)
    kind, fingerprint = primary.finding.kind, primary.finding.fingerprint
    same = [one for one in seen if one.finding.fingerprint == fingerprint]
    shared = len({one.host or one.node for one in same}) > 1
    action = _action(primary, seen)
    if action == "evict_restart" and shared:
        action = "restart"
    return Verdict(
        category=kind.category,
        role=kind.role,
        action=action,
        domain=kind.domain,
        evidence=primary.finding.sample,
        fingerprint=fingerprint,
        nodes=tuple(sorted({one.node for one in same})),
        node=primary.node,
        rank=primary.rank,
        set_aside=sum(one.finding.count for one in seen if one.finding.fingerprint != fingerprint),
        kernel=kind.kernel and primary.rank < 0,
        weak=kind.weak,
        shared=shared,
    )


def _primary(seen: Sequence[Observation]) -> Observation:
    roots = [one.at for one in seen if _tier(one.finding.kind) <= 3]
    limit = min(roots) + KERNEL_WINDOW_S if roots else float("inf")

    def order(one: Observation) -> tuple[int, float, str, int]:
        tier = _tier(one.finding.kind)
        if tier == 0 and one.at > limit:
            tier = 1
        return tier, one.at, one.node, one.finding.first

    return min(seen, key=order)


def _tier(kind: Kind) -> int:
    """How far a kind is from being a cause: 0 is a fault in a kernel log, 7 is nothing."""
    if kind.role in {"advice", "benign"}:
        return 7
    if kind.role == "teardown":
        return 6
    if kind.name in _FINAL:
        return 1
    if kind.weak and kind.action == "alert":
        return 5
    if kind.role == "secondary":
        return 4
    if kind.category == "unknown":
        return 3  # a cause that has a name is the better answer
    if kind.action == "alert" or kind.weak:
        return 2
    # The memory of another container may be what the kernel reports: that explains no error text.
    return 0 if kind.kernel and kind.category != "host_oom" else 1


def _action(primary: Observation, seen: Sequence[Observation]) -> Action:
    """What the cause asks for, raised by what other roots of its node ask for.

    Only the cause itself stops a job: a restart may cure what came with it.
    """
    action = primary.finding.kind.action
    kind = primary.finding.kind
    if kind.role != "root" or action in {"none", "stop"} or kind.name in _FINAL:
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
    found = verdict(Observation(node, one, 0.0) for one in matcher.take())
    return _second_look(text, found) if found.category == "unknown" else found


def _mild(action: Action) -> Action:
    """Joined lines may be of different devices: they evict no node."""
    return "restart" if action == "evict_restart" else action


def _second_look(text: str, first: Verdict) -> Verdict:
    """What neighbouring lines say together: texts that are wrapped, or a cause in a second line."""
    lines = [line for line in text.split("\n")[:MAX_JOINED_LINES] if line.strip()]
    for start in range(len(lines)):
        joined = " ".join(" ".join(lines[start : start + JOINED]).split())[:MAX_LINE_BYTES]
        kind = kind_of(joined)
        if kind is not None and kind.role == "root" and kind.category != "unknown":
            return replace(
                first,
                category=kind.category,
                role=kind.role,
                action=_mild(kind.action),
                domain=kind.domain,
                evidence=joined[:MAX_SAMPLE_CHARS],
                fingerprint=kind.name,
                kernel=False,
                weak=kind.weak,
            )
    return first
