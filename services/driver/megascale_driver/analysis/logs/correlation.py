"""The cause among the findings in the logs of all nodes, and the action for it.

Evidence is ranked: a fault in a kernel log outranks texts of workers, a root cause outranks its
consequences, and among equals the earliest counts. A text never evicts a node other than the one
that wrote it (``NEVER_EVICT`` in the vocabulary). A root that appears on several hosts at once is
software, configuration or the fabric; it restarts the attempt and evicts no node.
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
JOINED = 8  # lines that are joined if no single line has a known cause
MAX_JOINED_LINES = 200  # first lines of an excerpt that are joined; the rest only counts singly
# Lines that explain the failures after them: a host without NVSwitch needs no fabric manager.
_FINAL = frozenset({"fabric-no-switch"})


@dataclass(frozen=True, slots=True)
class Observation:
    """A finding on one node. ``at`` orders findings: seconds on one clock, or line numbers.

    ``rank``: the rank whose log has the finding; -1: the kernel log. Nodes on one ``host`` share
    its kernel log and hardware; empty: the node is its own host.
    """

    node: str
    finding: Finding
    at: float
    rank: int = -1
    host: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The primary category and its action; ``nodes``: all nodes with the same root.

    ``node`` and ``rank``: where the line is. ``set_aside``: number of lines of other kinds, which
    are consequences or weaker evidence. ``kernel``: reported by a driver in the kernel.
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
    weak: bool = False  # the line only wraps or repeats another failure
    shared: bool = False  # on several hosts: software, configuration or the fabric


BENIGN = Verdict("benign", "benign", "none", "unknown", "", "", ())


def verdict(observations: Iterable[Observation]) -> Verdict:
    """The cause among these findings; benign if none reports a problem."""
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
    # A kernel line long after the first root is rather its consequence: beyond the window it only
    # ranks as another root.
    roots = [one.at for one in seen if _tier(one.finding.kind) <= 3]
    limit = min(roots) + KERNEL_WINDOW_S if roots else float("inf")

    def order(one: Observation) -> tuple[int, float, str, int]:
        tier = _tier(one.finding.kind)
        if tier == 0 and one.at > limit:
            tier = 1
        return tier, one.at, one.node, one.finding.first

    return min(seen, key=order)


def _tier(kind: Kind) -> int:
    """Rank of a kind as a cause: 0 is a fault in a kernel log, 7 is no cause at all."""
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
        return 3  # a cause with a known name is a better answer
    if kind.action == "alert" or kind.weak:
        return 2
    # The kernel may have reported memory of another container, which explains no error text here.
    return 0 if kind.kernel and kind.category != "host_oom" else 1


def _action(primary: Observation, seen: Sequence[Observation]) -> Action:
    """The action for the cause, or a stronger action of another root on the same node.

    ``stop`` is only taken from the cause itself: a restart may remove the other problems.
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
    """The verdict on one excerpt, with lines in the order in which they were written."""
    matcher = Matcher()
    matcher.feed(text.encode(errors="replace"))
    matcher.close()
    # There are no clocks: line numbers order the findings, and all are within the kernel window.
    found = verdict(Observation(node, one, 0.0) for one in matcher.take())
    return _second_look(text, found) if found.category == "unknown" else found


def _mild(action: Action) -> Action:
    """The action for joined lines, which can be about different devices: they evict no node."""
    return "restart" if action == "evict_restart" else action


def _second_look(text: str, first: Verdict) -> Verdict:
    """Classify joined neighbouring lines: wrapped texts, or a cause in the second line."""
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
