"""Self-checks that run in one process per device: compute, and all-reduce among the devices.

The processes run :mod:`megascale_trainer.process.self_check`. The agent starts them and turns their
answers into findings with :func:`evaluate`; a missing answer is a FAIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megascale_common.node.messages import SelfChecked
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding, verdict_of

COMPUTE, ALL_REDUCE, GROUP_ALL_REDUCE = "compute", "all_reduce", "group_all_reduce"
# The agent bounds each step of the probe, including the wait for a new template process. This limit
# is longer, so that the error of the step that was too slow is reported.
_PROBE_TIMEOUT_S = 300.0


class Compute(Diagnostic):
    """Every device computes a GEMM of known result."""

    name = COMPUTE
    timeout_s = _PROBE_TIMEOUT_S

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per device."""
        return [each for each in await node.probe_ranks() if each.name == self.name]


class GroupAllReduce(Diagnostic):
    """The devices of several nodes sum a vector of known result, on the driver's request."""

    name = GROUP_ALL_REDUCE
    before_attempts = False
    on_demand = False
    with_nodes = True
    timeout_s = _PROBE_TIMEOUT_S

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per device: the worst of its compute and of the sum."""
        found = await node.probe_ranks()
        bad = {each.target: each for each in reversed(found) if each.verdict == "FAIL"}
        rest = {each.target: each for each in found}
        return [replace(bad.get(key, each), name=self.name) for key, each in rest.items()]


class AllReduce(Diagnostic):
    """The devices of the node sum a vector of known result."""

    name = ALL_REDUCE
    timeout_s = _PROBE_TIMEOUT_S

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per device that answered."""
        return [each for each in await node.probe_ranks() if each.name == self.name]


def evaluate(
    targets: Sequence[str],
    answers: Mapping[int, SelfChecked | str],
    elapsed_s: float,
    world_size: int | None = None,
) -> list[Finding]:
    """Findings for the devices ``targets``.

    ``answers`` has, by local rank, the answer or the reason why there is none. ``world_size`` is
    that of the whole check if other nodes take part.
    """
    findings: list[Finding] = []
    for rank, target in enumerate(targets):
        answer = answers.get(rank, "no answer")
        if isinstance(answer, str):
            findings.append(Finding(COMPUTE, target, "FAIL", answer, elapsed_s))
            continue
        for each in answer.results:
            verdict = verdict_of(each.verdict)
            finding = Finding(each.name, each.target, verdict, each.detail, each.elapsed_s)
            if each.bus_gb_s is not None:
                ranks = f"{world_size or len(targets)} ranks"
                finding = replace(finding, value=each.bus_gb_s, unit="GB/s", target_class=ranks)
            findings.append(finding)
    if (world_size or len(targets)) == 1:
        findings.append(Finding(ALL_REDUCE, targets[0], "SKIPPED", "one rank"))
    return findings
