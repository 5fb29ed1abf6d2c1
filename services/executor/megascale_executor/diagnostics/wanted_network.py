"""The NCCL settings and network cards that the driver wants of a node, within bounds. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megascale_job.visible import counted

MAX_SETTINGS = 64  # of NCCL in an assignment; a profile has about twenty
MAX_CARDS = 64  # of a node, in an assignment
MAX_VALUE_CHARS = 1024  # of a setting: 64 cards by name
MAX_REASON_CHARS = 1024  # of a setting: one sentence
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,59}")
_CARD = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True)
class WantedSetting:
    """One variable; ``default`` is NCCL's own value for it, "" if it has none."""

    name: str
    value: str
    reason: str
    default: str


@dataclass(frozen=True, slots=True)
class WantedNetwork:
    """The settings for an NCCL release, and the RDMA devices that the node must have.

    Raises:
        ValueError: too many of them, or one is not a setting of NCCL.
    """

    nccl: str
    cards: tuple[str, ...]
    settings: tuple[WantedSetting, ...]

    def __post_init__(self) -> None:
        if len(self.settings) > MAX_SETTINGS or len(self.cards) > MAX_CARDS:
            raise ValueError(
                f"{counted(len(self.settings), 'setting')} and "
                f"{counted(len(self.cards), 'card')}: at most "
                f"{MAX_SETTINGS} and {MAX_CARDS}"
            )
        for card in self.cards:
            if not _CARD.fullmatch(card):
                raise ValueError(f"{card[:80]!r} is not the name of an RDMA device")
        for each in self.settings:
            if not _NAME.fullmatch(each.name):
                raise ValueError(f"{each.name[:80]!r} is not a variable of NCCL")
            if len(each.value) > MAX_VALUE_CHARS or len(each.reason) > MAX_REASON_CHARS:
                raise ValueError(f"{each.name}: value or reason is too long")
            if "\0" in each.value:
                raise ValueError(f"{each.name}: its value has a zero byte")

    def for_workers(self, own: Mapping[str, str]) -> dict[str, str]:
        """Variables for the workers, without those that the job sets itself (``own``)."""
        return {each.name: each.value for each in self.settings if each.name not in own}
