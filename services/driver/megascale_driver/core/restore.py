"""Which snapshot all ranks still hold in the memory of their own nodes."""

from __future__ import annotations

from collections.abc import Mapping

from megascale_driver.core.state import Job, Node


def sealed_everywhere(job: Job, nodes: Mapping[str, Node]) -> tuple[int, int]:
    """(step, attempt) of the newest snapshot that every rank has sealed on its node; (0, 0): none.

    It counts only if one attempt wrote it on all ranks: two attempts may have reached the same step
    with different states. Refused steps, and attempts that were never issued, do not count.
    """
    common: set[tuple[int, int]] | None = None
    for slot in job.slots:
        node = nodes.get(slot.node)
        held: dict[int, set[tuple[int, int]]] = {rank: set() for rank in slot.ranks}
        for progress in (
            node.report.progress if node is not None and node.report is not None else ()
        ):
            for sealed in progress.sealed if progress.job == job.name else ():
                if (
                    sealed.rank in held
                    and sealed.layout_digest
                    and 0 < sealed.attempt < job.attempt
                ):
                    held[sealed.rank].add((sealed.step, sealed.attempt))
        for steps in held.values():
            common = set(steps) if common is None else common & steps
    usable = [item for item in common or () if item[0] not in job.refused_steps]
    return max(usable, default=(0, 0))
