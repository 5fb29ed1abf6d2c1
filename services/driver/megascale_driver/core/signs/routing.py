"""Ranks with hot experts: one line for each in an attempt, and what explains the job's pace.

The verdict comes from :mod:`megascale_driver.analysis.spans.routing`, based on spans that the core
never sees. It is always observed, and no node is left for it: such a rank does more work than the
others, wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from megascale_driver.analysis.hot_experts import REMEDY, HotRank
from megascale_driver.core.draft import Draft
from megascale_driver.core.values.events import Evidence, Finding
from megascale_driver.core.values.reasons import Reason

ROUTING: Final = "routing"
MAX_NAMED = 8  # ranks in an attempt; that many show what the router does
EXPERTS_HOT: Final = Reason(
    "EXPERTS_HOT",
    meaning=(
        "a rank takes longer because the router sends its experts more rows than those of other "
        "ranks: its share of the rows, its hottest experts, how much longer, since which step. "
        "Logged once for each rank and attempt, at most 8 times"
    ),
    response=(
        "only this line (policy `routing`, always observed): the rank keeps its node. Its time is "
        "not counted as that of a slow node, except where it exceeds what the rows explain"
    ),
    remedy=(
        "see [Hot experts](spans.md#hot-experts): raise the balance coefficients of "
        "`trainer.loss`, or `trainer.model.experts.bias_rate`; `megascale heat JOB` shows the "
        "share of each rank"
    ),
    severity="warning",
)


@dataclass(frozen=True, slots=True)
class HotRanksFound(Finding):
    """Ranks of an attempt whose experts are hot, the hottest first; none: no longer."""

    ranks: tuple[HotRank, ...]


def found(draft: Draft, event: HotRanksFound) -> None:
    """Keep the hottest rank's verdict while it holds, and log each rank once."""
    job = draft.running(event)
    if job is None:
        return
    sentence = f"{event.ranks[0].sentence}; {REMEDY}" if event.ranks else ""
    if sentence != job.current.hot_experts:
        attempt = draft.jobs[job.name].current
        draft.put_attempt(job.name, replace(attempt, hot_experts=sentence))
    for hot in event.ranks[:MAX_NAMED]:
        written = draft.jobs[job.name].current.written
        named = sum(line.startswith(EXPERTS_HOT.name) for line in written)
        if named >= MAX_NAMED or not draft.once(job, f"{EXPERTS_HOT.name} {hot.rank}"):
            continue
        where = f"nodes/{hot.node}/ranks/{hot.rank}"
        share = Evidence("spans", where, "expert_share", f"{hot.share:.3f}")
        experts = (Evidence("spans", where, str(one), f"{one.load:.3f}") for one in hot.experts)
        draft.log_job(
            job,
            EXPERTS_HOT,
            f"{hot.sentence}; {REMEDY}",
            policy=ROUTING,
            mode="OBSERVE",
            evidence=(share, *experts),
            outcome="the job continues: its router decides how much work the rank has",
        )


# The handlers of findings, by type.
HANDLERS: Final = {HotRanksFound: found}
