"""The rules whose verdicts an operator may have observed instead of enforced.

In OBSERVE a rule only writes what it would have done. A rule that is about a fact (a dead process,
a failed self-check) is enforced unless somebody says otherwise, like all rules of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Mode = Literal["ENFORCE", "OBSERVE"]
MODES: tuple[Mode, ...] = ("ENFORCE", "OBSERVE")
# Every rule with what it does when it is enforced.
RULES: Mapping[str, str] = {
    "silence": "a node without a sign of life is declared dead, and its job leaves it",
    "switch-lost": "the silent nodes of a switch are given up together",
    "hang": "an attempt of which no rank advances is ended",
    "self-check": "a node that fails a self-check is quarantined",
    "repeated-failure": "a job leaves a node on which it fails again and again",
    "stop-deadline": "a node that does not stop an attempt is quarantined",
}


def mode_of(modes: Mapping[str, str], rule: str) -> Mode:
    """How the rule is applied now."""
    return "OBSERVE" if modes.get(rule) == "OBSERVE" else "ENFORCE"
