"""What NCCL's records say of a job that hung, beside the status pages and after them.

They come with the stacks when the attempt has stopped. A host is ahead of its device, so on GPUs a
page can show that all have entered what some device never reached; the record shows that. Where the
pages blamed no node and the records name ranks of one, that node is blamed (MegaScale, section
5.2); a node that the pages have blamed stays blamed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megascale_common.node.flight_record import RankRecord
from megascale_driver.analysis.flight_recorder import Verdict, verdict
from megascale_driver.core.draft import Draft
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.state import Job

KIND: Final = "nccl_record"
# A rank without a record counts as the silent one. Of more than these no record can have come in
# time, and then it says nothing.
MAX_SILENT: Final = 4


def found(draft: Draft, job: Job) -> Verdict | None:
    """The verdict on the attempt that has stopped; None without records, or with too few."""
    records: list[RankRecord] = []
    for slot in job.slots:
        node = draft.nodes.get(slot.node)
        stopped = node.report.stopped if node is not None and node.report is not None else None
        if stopped is not None and (stopped.job, stopped.attempt) == (job.name, job.attempt):
            records += [each for each in stopped.records if each.rank in slot.ranks]
    world_size = job.config.layout.world_size
    if not records or world_size - len({each.rank for each in records}) > MAX_SILENT:
        return None
    return verdict(records, world_size)


def evidence(job: Job, said: Verdict) -> tuple[Evidence, ...]:
    """A line for each rank that is named, with what it has not entered."""
    lines = []
    for rank in said.culprits[:MAX_SILENT]:
        one = next(each for each in said.missing if rank in each.missing)
        digest = f"has not entered {one.operation} {one.number} of {one.group}"
        if rank in said.without_dump:
            digest = f"wrote no record; others wait for it in {one.operation} of {one.group}"
        lines.append(Evidence(KIND, f"nodes/{_node_of(job, rank)}/ranks/{rank}", digest))
    return tuple(lines)


def complete(draft: Draft, job: Job) -> Job:
    """Blame the one node whose ranks the records name, where a hang is blamed on none.

    Before the search for an unnamed culprit, which then need not begin.
    """
    if job.current.searching is not None or not any(map(_is_open, job.current.faults)):
        return job
    said = found(draft, job)
    nodes = {_node_of(job, rank) for rank in said.culprits} if said is not None else set()
    if said is None or len(nodes) != 1:
        return job
    (node,) = nodes
    faults = tuple(
        _completed(fault, node, said) if _is_open(fault) else fault for fault in job.current.faults
    )
    return draft.attempt(job.name, faults=faults)


def _is_open(fault: Fault) -> bool:
    return fault.kind is FaultKind.HANG and not fault.node


def _completed(fault: Fault, node: str, said: Verdict) -> Fault:
    message = f"{fault.message}; by NCCL's records {said.sentence.rstrip('.')}"
    return replace(fault, node=node, rank=said.culprits[0], message=message)


def _node_of(job: Job, rank: int) -> str:
    return next((slot.node for slot in job.slots if rank in slot.ranks), "")
