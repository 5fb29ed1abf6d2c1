"""The breaker against mass eviction: it holds back inferred verdicts when many nodes were lost.

A driver that is cut off from the network sees all nodes as silent, and must not tear running jobs
apart. Counted over a window are decisions of the driver itself: evictions, and deaths of nodes that
run a job. Evictions by operators are not counted. Two limits hold:

- of the fleet: above max(share of the nodes, number of nodes), or with several switches silent at
  once, inferred verdicts on any node are only observed until the window has passed;
- of a switch: if half of its nodes are silent, its network may have failed, and not the nodes. They
  are observed for longer. If they are still silent then, while the rest of the fleet sends
  heartbeats, the switch is lost: its nodes are given up, and count as one.

When a window has passed, silence is counted from zero, so no verdict that was held back takes
effect late.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import Liveness, Node, SwitchTrip
from megascale_driver.core.values.events import Evidence, listed
from megascale_job.visible import agreed, counted

MAX_NAMED = 16
_SILENT = (Liveness.SUSPECT, Liveness.DEAD)


def limit(draft: Draft) -> int:
    """Number of evictions allowed in one window."""
    return max(int(draft.policy.breaker_share * len(draft.nodes)), draft.policy.breaker_nodes)


def count(draft: Draft, node: str) -> None:
    """Count an eviction or a death that the driver decided; a node counts once in a window."""
    recent = draft.breaker.evictions
    if not any(name == node for _, name in recent):
        draft.breaker = replace(draft.breaker, evictions=(*recent, (draft.now_s, node)))


def allows(draft: Draft, node: str, rule: str = "silence") -> bool:
    """True if an inferred verdict on ``node`` can take effect; counts it, or trips the breaker.

    ``rule``: the rule that gives the verdict; held back while operators have it observed.
    """
    if draft.breaker.tripped_at_s:
        return False
    if rule and not draft.enforced(rule):
        return False
    # Silence of a whole switch may be the fault of its network, so it has limits of its own.
    known = draft.nodes.get(node)
    if known is not None and known.liveness in _SILENT:
        silent = _silent_switches(draft)
        if _too_many(draft, silent):
            return False
        if _switch_of(known) in silent:
            return _allows_of_switch(draft, known, silent)
    if len(draft.breaker.evictions) < limit(draft):
        count(draft, node)
        return True
    names = [name for _, name in draft.breaker.evictions]
    _trip(
        draft,
        f"{counted(len(names), 'node')} {agreed(len(names), 'were')} lost within "
        f"{draft.policy.breaker_window_s:g} s; node {node} and "
        "others that are only silent are observed, not evicted, until that window has passed",
        names,
    )
    return False


def refresh(draft: Draft) -> None:
    """Forget evictions outside the window; reset the breaker when its window has passed."""
    breaker = draft.breaker
    since_s = draft.now_s - draft.policy.breaker_window_s
    recent = tuple(item for item in breaker.evictions if item[0] > since_s)
    switches = tuple(trip for trip in breaker.switches if trip.at_s > since_s)
    if breaker.tripped_at_s and breaker.tripped_at_s <= since_s:
        reset(draft, "its window has passed", recent)
    elif (recent, switches) != (breaker.evictions, breaker.switches):
        draft.breaker = replace(breaker, evictions=recent, switches=switches)


def reset(
    draft: Draft, why: str, recent: tuple[tuple[float, str], ...] = (), actor: str = "driver"
) -> None:
    """Enforce inferred verdicts again; a node that is silent now gets its full time first.

    Otherwise all nodes that were observed meanwhile would be declared dead in this same event.
    """
    draft.breaker = replace(draft.breaker, evictions=recent, tripped_at_s=0.0, switches=())
    draft.silence_hold_until_s = draft.now_s + draft.policy.heartbeat_interval_s
    for name, node in draft.nodes.items():
        if node.liveness is not Liveness.DEAD:
            seen_s = max(node.last_seen_s, draft.now_s)
            draft.put_node(replace(draft.nodes[name], last_seen_s=seen_s, probe_failed_at_s=0.0))
    draft.log(
        reasons.BREAKER_RESET,
        f"inferred verdicts are enforced again: {why}",
        subject="cluster",
        policy="breaker" if actor == "driver" else "manual",
        actor=actor,
    )


def _too_many(draft: Draft, silent: dict[str, list[str]]) -> bool:
    """True if so many switches are silent that silence is no evidence; trips the breaker."""
    policy = draft.policy
    if len(silent) < 2:
        return False
    switches = {_switch_of(other) for other in draft.nodes.values()}
    if len(silent) <= int(policy.breaker_share * len(switches)):
        return False
    names = [name for members in silent.values() for name in members]
    what = ", ".join(sorted(silent)[:MAX_NAMED])
    _trip(
        draft,
        f"{counted(len(names), 'node')} of {counted(len(silent), 'switch')} ({what}) "
        "are silent at once: the "
        "driver's own network may have failed; silent nodes are observed, not evicted, for "
        f"{policy.breaker_window_s:g} s",
        names,
    )
    return True


def _allows_of_switch(draft: Draft, node: Node, silent: dict[str, list[str]]) -> bool:
    """True if a node of a silent switch can be given up."""
    switch, policy = _switch_of(node), draft.policy
    trip = next((item for item in draft.breaker.switches if item.switch == switch), None)
    if trip is None:
        trip = SwitchTrip(switch, draft.now_s)
        draft.breaker = replace(draft.breaker, switches=(*draft.breaker.switches, trip))
        _log_tripped(
            draft,
            f"{counted(len(silent[switch]), 'node')} of switch {switch} "
            f"{agreed(len(silent[switch]), 'are')} silent at once: its network may "
            f"have failed; they are observed until {policy.dead_uncorroborated_after_s:g} s of "
            "silence",
            silent[switch],
        )
    if draft.now_s - node.last_seen_s < policy.dead_uncorroborated_after_s:
        return False
    if not draft.enforced("switch-lost"):
        return False
    if not trip.lost:
        others = tuple(item for item in draft.breaker.switches if item.switch != switch)
        draft.breaker = replace(draft.breaker, switches=(*others, replace(trip, lost=True)))
        draft.log(
            reasons.SWITCH_LOST,
            f"switch {switch} is lost: {len(silent[switch])} of its nodes are silent for "
            f"{draft.now_s - node.last_seen_s:.0f} s, and the rest of the fleet is heard",
            subject="cluster",
            policy="breaker",
            evidence=(_named(silent[switch]),),
            outcome="its silent nodes are given up together",
        )
    return True


def _silent_switches(draft: Draft) -> dict[str, list[str]]:
    """The silent nodes of each switch with half of its nodes silent; small switches are left out.

    One pass over all nodes, only in events that evaluate a silent node of a job.
    """
    if draft.silent_switches is None:
        members = Counter(_switch_of(node) for node in draft.nodes.values())
        silent: dict[str, list[str]] = {}
        for node in draft.nodes.values():
            if node.liveness in _SILENT:
                silent.setdefault(_switch_of(node), []).append(node.name)
        draft.silent_switches = {
            switch: names
            for switch, names in silent.items()
            if switch
            and members[switch] >= draft.policy.switch_nodes
            and 2 * len(names) >= members[switch]
        }
    return draft.silent_switches


def _switch_of(node: Node) -> str:
    return node.identity.topology.get("switch", "")


def _trip(draft: Draft, message: str, names: list[str]) -> None:
    draft.breaker = replace(draft.breaker, tripped_at_s=draft.now_s)
    _log_tripped(draft, message, names)


def _log_tripped(draft: Draft, message: str, names: list[str]) -> None:
    draft.log(
        reasons.BREAKER_TRIPPED,
        message,
        subject="cluster",
        policy="breaker",
        mode="OBSERVE",
        evidence=(_named(names),),
    )


def _named(names: list[str]) -> Evidence:
    return Evidence("evictions", "driver", listed(names, MAX_NAMED))
