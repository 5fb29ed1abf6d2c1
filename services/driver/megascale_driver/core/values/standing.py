"""What operators have ordered once and for longer: quotas of tenants, silences of alerts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """What was ordered about a tenant: the devices that its jobs may hold at once."""

    name: str
    quota: int = 0


@dataclass(frozen=True, slots=True)
class Silence:
    """An order to alert nobody of ``subject`` until a time: a node, a job, or a reason."""

    subject: str
    until_s: float
    reason: str = ""
    actor: str = ""


def in_force(silences: Mapping[str, Silence], now_s: float) -> list[Silence]:
    """Those that have not ended, by subject."""
    return [each for _, each in sorted(silences.items()) if each.until_s > now_s]
