"""Checks of groups of nodes: the effect that has one carried out, and the event of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_driver.analysis.group_search import Answer


@dataclass(frozen=True, slots=True)
class CheckRepeated:
    """A target of a node failed the same check by comparison with the fleet again and again."""

    now_s: float
    node: str
    check: str
    detail: str


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
