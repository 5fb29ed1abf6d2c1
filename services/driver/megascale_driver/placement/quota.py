"""Devices that the jobs of each tenant hold or are promised, against the tenant's quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megascale_driver.placement.queue_values import RunningJob, WaitingJob
from megascale_job.visible import counted


class Ledger:
    """What each tenant's jobs use during one decision of the queue.

    A job that waits for nodes is promised its devices, so that later jobs of the same tenant cannot
    use its quota up before it starts.
    """

    def __init__(self, quotas: Mapping[str, int], running: Iterable[RunningJob]) -> None:
        self._quotas = quotas
        self._used: Counter[str] = Counter()
        self._promised: Counter[str] = Counter()
        for job in running:
            self._used[job.tenant] += job.world_size

    def never(self, job: WaitingJob) -> str:
        """Why the quota can never admit the job; "" if it can."""
        quota = self._quotas.get(job.tenant)
        if quota is None or job.world_size <= quota:
            return ""
        return (
            f"it needs {_devices(job.world_size)}, and the quota of tenant {job.tenant} is "
            f"{_devices(quota)}"
        )

    def short(self, job: WaitingJob) -> int:
        """How many devices the tenant must give up before the job may start; 0: none."""
        quota = self._quotas.get(job.tenant)
        if quota is None:
            return 0
        taken = self._used[job.tenant] + self._promised[job.tenant]
        return max(0, taken + job.world_size - quota)

    def why(self, job: WaitingJob) -> str:
        """Why the quota does not admit the job now."""
        used, promised = self._used[job.tenant], self._promised[job.tenant]
        text = (
            f"tenant {job.tenant} has a quota of {_devices(self._quotas[job.tenant])}: {used} are "
            f"in use"
        )
        text += f" and {promised} are promised to jobs before it" if promised else ""
        return f"{text}, and it needs {job.world_size}"

    def use(self, job: WaitingJob) -> None:
        """The job starts."""
        self._used[job.tenant] += job.world_size

    def promise(self, job: WaitingJob) -> None:
        """The job is the next of its tenant to start."""
        self._promised[job.tenant] += job.world_size


def _devices(count: int) -> str:
    return counted(count, "device")
