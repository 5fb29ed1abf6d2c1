"""Probes of a fleet that is silent: so many at once, and no more than one that waits per node."""

from __future__ import annotations

import asyncio

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_driver.core.values.events import Probe
from megascale_driver.nodes import probes
from megascale_driver.nodes.probes import AT_ONCE, Probed, Prober

NODES = 1536


def wanted(node: int, incarnation: str = "i") -> Probe:
    return Probe(f"n{node}", incarnation, "127.0.0.1:9")


async def test_probes_are_bounded_however_often_they_are_ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = asyncio.Event()
    running, most = 0, 0
    outcomes: list[tuple[str, str, str]] = []
    all_done = asyncio.Event()

    async def slow(probe: Probe, token: str) -> Probed:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        if probe.node == "n7":
            raise OSError("no descriptor is left")
        return Probed("alive")

    def done(probe: Probe, found: Probed) -> None:
        outcomes.append((probe.node, probe.incarnation, found.outcome))
        if len(outcomes) == NODES - 1 + AT_ONCE - 1:
            all_done.set()

    monkeypatch.setattr(probes, "probe", slow)
    prober = Prober("token", done)
    for round_ in range(30):  # a minute of silence
        for node in range(NODES):
            prober.order(wanted(node, f"i{round_}"))
        await asyncio.sleep(0)
    assert running == AT_ONCE and prober.pending <= NODES + AT_ONCE
    go.set()
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await all_done.wait()
    assert most == AT_ONCE and prober.pending == 0
    # Those that ran at first ran again, for what had been ordered meanwhile; of the others only the
    # newest did. One that fails stops no other.
    first = [each for each in outcomes if each[1] == "i0"]
    assert len(first) == AT_ONCE - 1 and {each[1] for each in outcomes} == {"i0", "i29"}


async def test_no_probe_survives_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(probe: Probe, token: str) -> Probed:
        await asyncio.Event().wait()
        return Probed("alive")

    monkeypatch.setattr(probes, "probe", never)
    prober = Prober("token", lambda probe, outcome: None)
    for node in range(2 * AT_ONCE):
        prober.order(wanted(node))
    await asyncio.sleep(0)
    prober.close()
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while prober.pending:  # noqa: ASYNC110 - tasks end with the next turns
            await asyncio.sleep(0)
