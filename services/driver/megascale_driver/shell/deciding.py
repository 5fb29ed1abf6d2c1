"""Decisions on a batch of events, and how they are kept from stopping the event loop.

A decision is a pure function of values, so where it is computed does not matter. For thousands of
nodes a single one takes up to a third of a second (a job is placed on all of them), and what it
changes as long again to be encoded; no heartbeat would be acknowledged meanwhile. Such decisions
are computed in a thread, which gives way to the loop every few milliseconds; the engine awaits it
before it takes anything else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from megascale_common.service import logs
from megascale_driver.core import machine
from megascale_driver.core.values.events import Event, NodeReport, Outcome
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.state import Cluster

# Nodes from which on decisions are computed in a thread: below, the dearest takes some 100 ms, and
# the way to the thread and back would cost more than most.
LARGE_NODES = 4096
# For which events of so many nodes gather before they are decided on together. Where thousands link
# to a new leader, each turn of the engine had one or two, and the turns cost more than the events.
GATHER_S = 0.02

T = TypeVar("T")

_log = logs.get(__name__)


async def gathered(nodes: int) -> None:
    """Wait until events of so many nodes have gathered; of fewer they are decided on at once."""
    if nodes >= LARGE_NODES:
        await asyncio.sleep(GATHER_S)


async def beside(nodes: int, work: Callable[[], T]) -> T:
    """The result of pure work on the state of so many nodes, which does not stop the loop."""
    if nodes < LARGE_NODES:
        return work()
    return await asyncio.to_thread(work)


def decide(
    state: Cluster, events: Iterable[Event], policy: Policy
) -> tuple[Cluster, list[Outcome | Exception]]:
    """The state after the events in order, and what follows from each.

    An event on which the core fails is dropped, and has the error as its outcome: a defect that one
    event exposes must not stop all other decisions. ``state`` is a value, so the failed step has
    left nothing behind.
    """
    outcomes: list[Outcome | Exception] = []
    for reports, group in itertools.groupby(events, lambda event: isinstance(event, NodeReport)):
        if reports:
            found: Sequence[Outcome | Exception]
            state, found = _reports(state, list(group), policy)
        else:
            state, found = _one_by_one(state, group, policy)
        outcomes += found
    return state, outcomes


def _reports(
    state: Cluster, events: list[Any], policy: Policy
) -> tuple[Cluster, Sequence[Outcome | Exception]]:
    try:
        return machine.reports(state, events, policy)
    except Exception:  # of which nobody knows which one it was
        return _one_by_one(state, events, policy)


def _one_by_one(
    state: Cluster, events: Iterable[Event], policy: Policy
) -> tuple[Cluster, list[Outcome | Exception]]:
    outcomes: list[Outcome | Exception] = []
    for event in events:
        try:
            state, outcome = machine.step(state, event, policy)
        except Exception as error:
            kind = type(event).__name__
            _log.exception("the core failed on an event; it is dropped", event_kind=kind)
            outcomes.append(error)
        else:
            outcomes.append(outcome)
    return state, outcomes
