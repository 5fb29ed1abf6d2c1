"""The rules whose verdicts an operator may have observed instead of enforced.

In OBSERVE a rule only writes what it would have done. A rule that is about a fact (a dead process,
a failed self-check) is enforced unless somebody says otherwise; one that may cost good nodes their
work (over-eviction) is observed until somebody has it enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Mode = Literal["ENFORCE", "OBSERVE"]
# Every rule with what it does when it is enforced.
RULES: Mapping[str, str] = {
    "silence": "a node without a sign of life is declared dead, and its job leaves it",
    "switch-lost": "the silent nodes of a switch are given up together",
    "hang": "an attempt of which no rank advances is ended",
    "no-workers": "an attempt of which no node reports workers for ten minutes is ended",
    "self-check": "a node that fails a self-check is quarantined",
    "repeated-check": "a node that is slower than the fleet in a check twice in a row is evicted",
    "group-check": "a node that fails checks with good partners is quarantined",
    "kernel-log": "a node whose kernel log has a fatal fault of its hardware is quarantined",
    "log-root": "a job leaves a node whose workers' logs show a fault of its hardware or driver",
    "straggler": "a job leaves a node whose ranks take longer than others for the same work",
    "traffic": "an attempt between whose nodes no byte moves while its ranks wait is ended",
    "over-eviction": "a job leaves the group of nodes that shares an unknown culprit",
    "repeated-failure": "a job leaves a node on which it fails again and again",
    "stop-deadline": "a node that does not stop an attempt is quarantined",
}
# Rules that are observed unless an operator has them enforced.
OBSERVED: frozenset[str] = frozenset(
    {"over-eviction", "log-root", "straggler", "traffic", "repeated-check"}
)


def mode_of(modes: Mapping[str, str], rule: str) -> Mode:
    """How the rule is applied now."""
    default = "OBSERVE" if rule in OBSERVED else "ENFORCE"
    return "OBSERVE" if modes.get(rule, default) == "OBSERVE" else "ENFORCE"
