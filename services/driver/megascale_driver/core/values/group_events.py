"""Checks of groups of nodes and what comparisons found: the effect of the first, and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_driver.analysis.group_search import Answer


@dataclass(frozen=True, slots=True)
class CheckCompared:
    """A target of a node was compared with the fleet: it FAILED, or is good again after that.

    ``origin``: the attempt (JOB/NUMBER) that began with the check, of which each leader hears;
    "" for one on demand.
    """

    now_s: float
    node: str
    check: str
    target: str
    failed: bool
    detail: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class GroupChecked:
    """Group ``group`` of a round of checks has answered; ``details``: what its nodes said."""

    now_s: float
    job: str
    attempt: int
    round: int
    group: int
    answers: Mapping[str, Answer]
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A node of a group that is checked, with those of its devices that take part."""

    node: str
    incarnation: str
    endpoint: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Have the members all-reduce a known payload together; the answer is a GroupChecked."""

    job: str
    attempt: int
    round: int
    group: int
    members: tuple[GroupMember, ...]
