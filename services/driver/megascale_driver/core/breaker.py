"""The breaker against mass eviction: it holds back inferred verdicts when many nodes were lost.

A driver that is cut off from the network sees all nodes as silent and must not tear running jobs
apart. Evictions and deaths of nodes that run a job are counted over a window, by hard fact or
inferred. Above max(share of the nodes, number of nodes), inferred verdicts are only observed. When
the window has passed, silence is counted from zero: no verdict that was held back is made up for.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.events import Evidence
from megascale_driver.core.state import Breaker


def limit(draft: Draft) -> int:
    """Number of evictions allowed in one window."""
    return max(int(draft.policy.breaker_share * len(draft.nodes)), draft.policy.breaker_nodes)


def count(draft: Draft, node: str) -> None:
    """Count an eviction or a death; a node counts once in a window."""
    recent = draft.breaker.evictions
    if not any(name == node for _, name in recent):
        draft.breaker = replace(draft.breaker, evictions=(*recent, (draft.now_s, node)))


def allows(draft: Draft, node: str) -> bool:
    """Whether an inferred verdict on ``node`` may take effect; counts it or trips the breaker."""
    breaker = draft.breaker
    if breaker.tripped_at_s:
        return False
    if len(breaker.evictions) < limit(draft):
        count(draft, node)
        return True
    draft.breaker = replace(breaker, tripped_at_s=draft.now_s)
    names = ", ".join(name for _, name in breaker.evictions)
    draft.log(
        "BREAKER_TRIPPED",
        f"{len(breaker.evictions)} nodes were lost within {draft.policy.breaker_window_s:g} s; "
        f"node {node} and others that are only silent are observed, not evicted, "
        "until that window has passed",
        subject="cluster",
        policy="breaker",
        mode="OBSERVE",
        evidence=(Evidence("evictions", "driver", names),),
    )
    return False


def refresh(draft: Draft) -> None:
    """Forget evictions outside the window, and reset the breaker once its window has passed."""
    breaker = draft.breaker
    since_s = draft.now_s - draft.policy.breaker_window_s
    recent = tuple(item for item in breaker.evictions if item[0] > since_s)
    if breaker.tripped_at_s and breaker.tripped_at_s <= since_s:
        draft.breaker = Breaker(recent)
        # Every node gets a full term of silence from now on; else all that were observed meanwhile
        # would be declared dead in this very event.
        draft.silence_hold_until_s = draft.now_s + draft.policy.heartbeat_interval_s
        for name, node in list(draft.nodes.items()):
            draft.node(name, last_seen_s=max(node.last_seen_s, draft.now_s), probe_failed_at_s=0.0)
        draft.log(
            "BREAKER_RESET",
            "inferred verdicts are enforced again",
            subject="cluster",
            policy="breaker",
        )
    elif recent != breaker.evictions:
        draft.breaker = replace(breaker, evictions=recent)
