"""Runs diagnostics one after the other: each within its time, none able to end the agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from megascale_common.service import logs
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import VERDICTS, Finding

_log = logs.get(__name__)


async def run_diagnostics(diagnostics: Iterable[Diagnostic], node: NodeView) -> list[Finding]:
    """Findings of all ``diagnostics``, in their order.

    One at a time: checks that load the same devices would disturb each other.
    """
    findings: list[Finding] = []
    for diagnostic in diagnostics:
        findings += await _run(diagnostic, node)
    return findings


async def _run(diagnostic: Diagnostic, node: NodeView) -> Sequence[Finding]:
    begin = time.monotonic()
    limit = asyncio.timeout(diagnostic.timeout_s)
    try:
        async with limit:
            found = list(await diagnostic.run(node))
            _check(diagnostic.name, found)
            return found
    # SystemExit as well: left alone, it would end the event loop, and the node with it.
    except (Exception, SystemExit) as error:
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
