"""Where the ranks of a job that hung were: the stacks that its nodes took when they stopped it.

The verdict on the culprit is that of status pages (:mod:`megascale_driver.core.signs.hang`). The
stacks show where its code was, and beside it where most others waited (MegaScale, section 5.2). On
GPUs NCCL's records say who did not enter what (:mod:`megascale_driver.core.signs.hang_records`).
"""

from __future__ import annotations

from typing import Final

from megascale_driver.core.draft import Draft
from megascale_driver.core.signs import hang_records
from megascale_driver.core.values.attempt import FaultKind
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.state import Job

REASON: Final = "HANG_STACKS"
MAX_OTHERS = 8  # ranks beside the suspect whose stacks are attached
MAX_IN_MESSAGE = 200  # characters of a stack
_SEPARATOR = " < "


def write(draft: Draft, job: Job) -> None:
    """Write where the suspect and others were to the job's log, if its attempt ended in a hang."""
    fault = next((f for f in job.current.faults if f.kind is FaultKind.HANG), None)
    if fault is None:
        return
    found = _stacks(draft, job)
    said = hang_records.found(draft, job)
    if not found and said is None:
        return
    innermost = {rank: frames.partition(_SEPARATOR)[0] for rank, (_, frames) in found.items()}
    common: dict[str, int] = {}
    for rank, frame in innermost.items():
        if rank != fault.rank:
            common[frame] = common.get(frame, 0) + 1
    # The suspect, then ranks in places that few others share: most only wait.
    order = sorted(
        found, key=lambda rank: (rank != fault.rank, common.get(innermost[rank], 0), rank)
    )
    evidence = tuple(
        Evidence("stack", f"nodes/{node}/ranks/{rank}", frames)
        for rank in order[: 1 + MAX_OTHERS]
        for node, frames in [found[rank]]
    )
    text = f"rank {fault.rank}: {found.get(fault.rank, ('', 'no stack'))[1][:MAX_IN_MESSAGE]}"
    if common:
        place, count = max(common.items(), key=lambda item: item[1])
        text += f"; {count} of {sum(common.values())} others: {place}"
    if said is not None:
        text += f"; NCCL's records: {said.sentence.rstrip('.')}"
        evidence += hang_records.evidence(job, said)
    subject = f"jobs/{job.name}"
    draft.log(
        REASON, text, subject=subject, job=job.name, attempt=job.attempt, evidence=evidence,
        outcome="nothing: evidence for people",
    )  # fmt: skip


def _stacks(draft: Draft, job: Job) -> dict[int, tuple[str, str]]:
    """By rank, its node and frames, of the nodes of the attempt that has stopped."""
    found: dict[int, tuple[str, str]] = {}
    for slot in job.slots:
        node = draft.nodes.get(slot.node)
        stopped = node.report.stopped if node is not None and node.report is not None else None
        if stopped is None or (stopped.job, stopped.attempt) != (job.name, job.attempt):
            continue
        found |= {rank: (slot.node, text) for rank, text in stopped.stacks if rank in slot.ranks}
    return found
