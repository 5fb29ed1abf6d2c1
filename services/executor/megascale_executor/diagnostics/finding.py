"""The result of a check. SKIPPED never counts as PASS; its detail says why nothing was checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale.v1 import types_pb2
from megascale_common.service.wire_text import encodable

Verdict = Literal["PASS", "DEGRADED", "FAIL", "SKIPPED"]
VERDICTS: dict[Verdict, types_pb2.CheckVerdict.ValueType] = {
    "PASS": types_pb2.CHECK_VERDICT_PASS,
    "DEGRADED": types_pb2.CHECK_VERDICT_DEGRADED,
    "FAIL": types_pb2.CHECK_VERDICT_FAIL,
    "SKIPPED": types_pb2.CHECK_VERDICT_SKIPPED,
}
MAX_DETAIL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check of one ``target`` (a device, a mount point): megascale.v1.CheckResult.

    Args:
        value: the measured figure, in ``unit``; the driver compares it with the fleet's figures of
            the same device model, name and ``target_class``.
        tools: versions of the tools that measured it.
    """

    name: str
    target: str
    verdict: Verdict
    detail: str
    elapsed_s: float = 0.0
    value: float | None = None
    unit: str = ""
    target_class: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)

    def to_proto(self) -> types_pb2.CheckResult:
        """The wire form; a long detail is cut."""
        result = types_pb2.CheckResult(
            name=self.name,
            target=encodable(self.target),
            verdict=VERDICTS[self.verdict],
            detail=encodable(self.detail[:MAX_DETAIL_CHARS]),
            value=self.value,
            unit=self.unit,
            target_class=self.target_class,
            tools={key: encodable(text) for key, text in self.tools.items()},
        )
        result.elapsed.FromNanoseconds(round(self.elapsed_s * 1e9))
        return result


def verdict_of(text: str) -> Verdict:
    """The verdict named ``text``; an unknown one is a FAIL, because it must not count as a PASS."""
    return next((verdict for verdict in VERDICTS if verdict == text), "FAIL")


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that forbid the attempt."""
    return [finding for finding in findings if finding.verdict == "FAIL"]
