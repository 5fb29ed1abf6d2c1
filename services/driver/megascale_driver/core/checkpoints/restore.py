"""Which snapshot all ranks still have in memory: of their own node, or of one with a replica."""

from __future__ import annotations

from collections.abc import Mapping

from megascale_driver.core.checkpoints import replicas
from megascale_driver.core.values.state import Job, Node


def sealed_everywhere(job: Job, nodes: Mapping[str, Node]) -> tuple[int, int]:
    """(step, attempt) of the newest snapshot that every rank has in memory; (0, 0): none.

    A rank has it sealed on its own node, or a node that lives keeps its replica. It counts only if
    one attempt wrote it on all ranks: two attempts may have reached the same step with different
    states. Refused steps, and attempts that were never issued, do not count.
    """
    copies = replicas.kept(job, nodes)
    common: set[tuple[int, int]] | None = None
    for rank, own in replicas.sealed_here(job, nodes).items():
        steps = {item for item in own | set(copies.get(rank, {})) if item[1] < job.attempt}
        common = steps if common is None else common & steps
    usable = [
        item
        for item in common or ()
        if item[0] not in job.refused_steps and not job.abandoned(*item)
    ]
    return max(usable, default=(0, 0))
