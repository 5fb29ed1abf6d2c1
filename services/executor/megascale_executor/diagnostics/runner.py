"""Runs diagnostics one after the other: each within its time, none able to end the agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from megascale_common.service import logs
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import VERDICTS, Finding

_log = logs.get(__name__)


# Less is not enough for any check that measures.
MIN_REST_S = 2.0


async def run_diagnostics(
    diagnostics: Iterable[Diagnostic], node: NodeView, limit_s: float | None = None
) -> list[Finding]:
    """Findings of all ``diagnostics``, by stage and then in their order.

    One at a time: checks that load the same devices would disturb each other. A failure leaves out
    the later stages, whose results it would falsify. What has not begun within ``limit_s`` is left
    out too, and ends then if it has.
    """
    findings: list[Finding] = []
    failed: tuple[int, str] | None = None
    end_s = None if limit_s is None else time.monotonic() + limit_s
    for diagnostic in sorted(diagnostics, key=lambda each: each.stage):
        rest_s = None if end_s is None else end_s - time.monotonic()
        if failed is not None and diagnostic.stage > failed[0]:
            reason = f"not run: {failed[1]} failed first"
        elif rest_s is not None and rest_s < MIN_REST_S:
            reason = f"not run: the {limit_s:g} s of all checks are over"
        else:
            found = await _run(diagnostic, node, rest_s)
            findings += found
            if failed is None and any(each.verdict == "FAIL" for each in found):
                failed = diagnostic.stage, diagnostic.name
            continue
        findings.append(Finding(diagnostic.name, "node", "SKIPPED", reason))
    return findings


async def _run(diagnostic: Diagnostic, node: NodeView, rest_s: float | None) -> Sequence[Finding]:
    begin = time.monotonic()
    cut_short = rest_s is not None and rest_s < diagnostic.timeout_s
    limit_s = rest_s if rest_s is not None and cut_short else diagnostic.timeout_s
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            found = list(await diagnostic.run(node))
            _check(diagnostic.name, found)
            return found
    # SystemExit as well: left alone, it would end the event loop, and the node with it.
    except (Exception, SystemExit) as error:
        if limit.expired() and cut_short:
            # Not the check's own limit: what it would have found is unknown.
            detail = f"cut short after {limit_s:.0f} s: the time of all checks is over"
            return [Finding(diagnostic.name, "node", "SKIPPED", detail, time.monotonic() - begin)]
        if limit.expired():
            detail = f"no result within {diagnostic.timeout_s:g} s"
        else:
            detail = f"{type(error).__name__}: {error}"
        _log.exception("diagnostic failed", diagnostic=diagnostic.name, reason=detail)
        return [Finding(diagnostic.name, "node", "FAIL", detail, time.monotonic() - begin)]


def _check(name: str, found: Sequence[object]) -> None:
    """Raises TypeError for what is not a finding of this diagnostic."""
    for each in found:
        if not isinstance(each, Finding) or each.name != name or each.verdict not in VERDICTS:
            raise TypeError(f"{each!r} is not a Finding named {name!r} with a known verdict")
