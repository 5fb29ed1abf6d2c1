"""Rules that decide about nodes and jobs, each observed or enforced.

In OBSERVE a rule only writes what it would have done. A rule about a fact (a dead process, a
failed self-check) is enforced by default; a rule that can cost good nodes their work
(over-eviction) is observed until an operator has it enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Mode = Literal["ENFORCE", "OBSERVE"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that operators can have observed or enforced: its effect, and its default mode."""

    name: str
    effect: str  # when it is enforced
    default: Mode = "ENFORCE"


RULES: Final[dict[str, Rule]] = {}


def define_rule(name: str, effect: str, default: Mode = "ENFORCE") -> Rule:
    """Make a rule known.

    Raises:
        ValueError: there is one of this name.
    """
    if name in RULES:
        raise ValueError(f"rule {name} is defined twice")
    rule = RULES[name] = Rule(name, effect, default)
    return rule


def mode_of(modes: Mapping[str, str], rule: str) -> Mode:
    """The current mode of the rule; ``modes``: those that operators have set."""
    known = RULES.get(rule)
    default = known.default if known is not None else "ENFORCE"
    return "OBSERVE" if modes.get(rule, default) == "OBSERVE" else "ENFORCE"


define_rule("silence", "a node without a sign of life is declared dead, and its job leaves it")
define_rule("switch-lost", "the silent nodes of a switch are given up together")
define_rule("hang", "an attempt of which no rank advances is ended")
define_rule("no-workers", "an attempt of which no node reports workers for ten minutes is ended")
define_rule("self-check", "a node that fails a self-check is quarantined")
define_rule(
    "repeated-check",
    "a node that is slower than the fleet in a check twice in a row is evicted",
    default="OBSERVE",
)
define_rule("group-check", "a node that fails checks with good partners is quarantined")
define_rule(
    "kernel-log", "a node whose kernel log has a fatal fault of its hardware is quarantined"
)
define_rule(
    "log-root",
    "a job leaves a node whose workers' logs show a fault of its hardware or driver",
    default="OBSERVE",
)
define_rule(
    "straggler",
    "a job leaves a node whose ranks take longer than others for the same work",
    default="OBSERVE",
)
define_rule(
    "traffic",
    "an attempt between whose nodes no byte moves while its ranks wait is ended",
    default="OBSERVE",
)
define_rule(
    "over-eviction",
    "a job leaves the group of nodes that shares an unknown culprit",
    default="OBSERVE",
)
define_rule("repeated-failure", "a job leaves a node on which it fails again and again")
define_rule("stop-deadline", "a node that does not stop an attempt is quarantined")
