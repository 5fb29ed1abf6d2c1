"""Decisions about thousands of nodes do not stop the event loop, and are the same as in it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.unit.test_attempts_at_scale import running

from megascale_driver.core import machine
from megascale_driver.core.values.cluster import Identity
from megascale_driver.core.values.events import CancelRequested, Event, NodeHello, Outcome, Tick
from megascale_driver.core.values.overlay import LAYER, Layers, Working, changed_keys
from megascale_driver.core.values.policy import Policy
from megascale_driver.shell import decisions


async def test_only_decisions_about_many_nodes_leave_the_loops_thread() -> None:
    here = threading.get_ident()
    assert await decisions.off_loop(decisions.LARGE_NODES - 1, threading.get_ident) == here
    assert await decisions.off_loop(decisions.LARGE_NODES, threading.get_ident) != here


async def test_events_of_a_large_fleet_gather_and_those_of_a_small_one_do_not_wait() -> None:
    turned: list[int] = []
    asyncio.get_running_loop().call_soon(turned.append, 1)
    await decisions.gather_events(decisions.LARGE_NODES - 1)
    assert not turned
    began_s = asyncio.get_running_loop().time()
    await decisions.gather_events(decisions.LARGE_NODES)
    assert turned and asyncio.get_running_loop().time() - began_s >= 0.9 * decisions.GATHER_S


async def test_the_loop_turns_while_a_decision_is_computed() -> None:
    turned = threading.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    # Computed in the loop's own thread it would wait for a turn that cannot come.
    assert await decisions.off_loop(decisions.LARGE_NODES, lambda: turned.wait(60.0))


def test_a_decision_that_fails_leaves_those_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, policy = running(4), Policy()
    events: list[Event] = [
        Tick(1001.0),
        NodeHello(1002.0, "new", Identity("i")),
        CancelRequested(1003.0, "a", "why", "me"),
    ]
    original = machine.step

    def step(*arguments: Any) -> Any:
        if isinstance(arguments[1], NodeHello):
            raise RuntimeError("a defect")
        return original(*arguments)

    monkeypatch.setattr(machine, "step", step)
    found, outcomes = decisions.decide(state, events, policy)
    assert [type(outcome) for outcome in outcomes] == [Outcome, RuntimeError, Outcome]
    assert "new" not in found.nodes and found.jobs["a"].phase is not state.jobs["a"].phase


def test_maps_that_two_threads_read_lose_nothing() -> None:
    """Reading all of a map merges its layers, which another thread may do at the same time."""
    base = Layers({f"n{number}": 0 for number in range(2000)})
    for round_ in range(1, 60):
        work = Working(base)
        for number in range(LAYER - 8):
            work[f"n{number * 7 % 2000}"] = round_
        shared = work.frozen()
        start = threading.Barrier(3)
        found: list[Any] = []

        def reads(
            shared: Layers[int], base: Layers[int], start: threading.Barrier, found: list[Any]
        ) -> None:
            start.wait()
            keys = set(changed_keys(base, shared))
            total, count = sum(shared.values()), len(shared)
            more = Working(shared)
            more["n1999"] = -1
            kept = sum(value for key, value in more.frozen().items() if key != "n1999")
            found.append((len(keys), total, count, kept))

        threads = [
            threading.Thread(target=reads, args=(shared, base, start, found)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = shared["n1999"]
        total = sum(shared[key] for key in shared)
        assert found == [(LAYER - 8, total, 2000, total - last)] * 3
        base = shared


def test_what_changed_is_found_across_a_new_base_without_reading_all() -> None:
    class Unread(dict[str, int]):
        def __iter__(self) -> Any:
            raise AssertionError("all keys were read")

    state: Layers[int] = Layers({f"n{number}": 0 for number in range(5000)})
    before = state
    for number in range(LAYER):
        work = Working(state)
        work[f"n{number}"] = 1
        state = work.frozen()
    work = Working(state)
    work["n4000"], work["n4001"] = 2, 2
    after = work.frozen()  # the layer is full: a new base
    assert after._base is not before._base and set(changed_keys(state, after)) == {"n4000", "n4001"}
    plain = set(changed_keys(dict(before), dict(after)))
    assert set(changed_keys(before, after)) == plain == set(changed_keys(after, before))
    for layers in (before, after):
        layers._base = Unread(layers._base)
    after._origin = before._base, after._origin[1]  # type: ignore[index]
    assert set(changed_keys(before, after)) == plain
