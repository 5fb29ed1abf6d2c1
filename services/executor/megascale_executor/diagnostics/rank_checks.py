"""Self-checks that run in a process per device (compute, all_reduce): their answers turned into
findings.

The processes run :mod:`megascale_trainer.process.self_check`; whoever starts them hands their
answers here. An answer that is missing is a finding too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megascale_common.node.messages import SelfChecked
from megascale_executor.diagnostics.finding import Finding, verdict_of

COMPUTE, ALL_REDUCE = "compute", "all_reduce"


def judge(
    targets: Sequence[str], answers: Mapping[int, SelfChecked | str], elapsed_s: float
) -> list[Finding]:
    """Findings for the devices ``targets``; ``answers`` holds by local rank an answer, or why there
    is none.
    """
    findings: list[Finding] = []
    for rank, target in enumerate(targets):
        answer = answers.get(rank, "no answer")
        if isinstance(answer, str):
            findings.append(Finding(COMPUTE, target, "FAIL", answer, elapsed_s))
            continue
        findings += [
            Finding(
                each["name"],
                each["target"],
                verdict_of(each["verdict"]),
                each["detail"],
                each["elapsed_s"],
            )
            for each in answer["results"]
        ]
    if len(targets) == 1:
        findings.append(Finding(ALL_REDUCE, targets[0], "SKIPPED", "one rank"))
    return findings
