"""Tenants: their number, their quotas by order, and the driver's option for all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import Tenant
from megascale_driver.core.values.events import QuotaRequested
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_job.visible import counted

# Limit on tenants, counted over stored jobs and quotas. A tenant is meant to be a team: with one
# tenant per job, queueing, lists and metrics would grow with the number of jobs.
MAX_TENANTS = 1000


def too_many(draft: Draft, tenant: str) -> bool:
    """Refuse a request that would add one tenant too many; True if it was refused."""
    known = {*draft.policy.quotas, *draft.tenants, *(j.config.tenant for j in draft.jobs.values())}
    if tenant in known or len(known) < MAX_TENANTS:
        return False
    draft.refuse(
        "TOO_MANY_TENANTS",
        f"tenant: {tenant} would be one more than {MAX_TENANTS} tenants, which is the limit: use "
        "one that `megascale quota` or `megascale jobs` shows, delete ended jobs of tenants that "
        "are gone, or give up their quotas (`megascale quota TENANT --default`)",
    )
    return True


def in_force(tenants: Mapping[str, Tenant], policy: Policy) -> Mapping[str, int]:
    """Quotas in devices by tenant; a tenant without an entry is not limited."""
    return {**policy.quotas, **{name: tenant.quota for name, tenant in tenants.items()}}


def order(draft: Draft, event: QuotaRequested) -> None:
    """Set the quota of a tenant, or return to the option; nothing happens if it is set already."""
    known = draft.tenants.get(event.tenant)
    if (known.quota if known is not None else None) == event.devices:
        return
    if event.devices is not None and too_many(draft, event.tenant):
        return
    before = in_force(draft.tenants, draft.policy).get(event.tenant)
    if event.devices is None:
        del draft.tenants[event.tenant]
    else:
        draft.tenants[event.tenant] = Tenant(event.tenant, event.devices)
    after = in_force(draft.tenants, draft.policy).get(event.tenant)
    held = devices_held(draft.jobs.values()).get(event.tenant, 0)
    draft.log(
        reasons.QUOTA_SET,
        f"the quota of tenant {event.tenant} is {_limit(after)}: {event.reason}",
        subject="cluster",
        actor=event.actor,
        policy="quota",
        outcome=f"it was {_limit(before)}; {_what_follows(held, after)}",
    )
    draft.queue_due_s = draft.now_s  # a job may start that waited for it


def devices_held(jobs: Iterable[Job]) -> dict[str, int]:
    """Devices that the jobs of each tenant hold now."""
    held: dict[str, int] = {}
    for job in jobs:
        if job.active:
            tenant = job.config.tenant
            held[tenant] = held.get(tenant, 0) + job.config.layout.world_size
    return held


def _limit(devices: int | None) -> str:
    if devices is None:
        return "not limited"
    return counted(devices, "device")


def _what_follows(held: int, quota: int | None) -> str:
    if quota is not None and held > quota:
        return f"its jobs hold {held} and continue; none of them starts again above the quota"
    return f"its jobs hold {held}"
