"""Copies are cut where one pinned part of a slot ends, and prepare the wanted slot first."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_trainer.save import mapped_slots
from megascale_trainer.save.host_copy import PINNED_AT_ONCE, parts


@given(st.integers(0, 5 * PINNED_AT_ONCE), st.integers(0, 5 * PINNED_AT_ONCE))
def test_parts_cover_the_range_and_none_crosses_a_border(start: int, size: int) -> None:
    found = list(parts(start, start + size))
    assert sum(stop - begin for begin, stop in found) == size
    at = start
    for begin, stop in found:
        assert begin == at < stop and begin // PINNED_AT_ONCE == (stop - 1) // PINNED_AT_ONCE
        at = stop


def test_the_slot_that_is_wanted_is_prepared_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 4 * (1 << 20)
    monkeypatch.setattr("megascale_trainer.save.host_copy.PINNED_AT_ONCE", 1 << 20)
    descriptors = [os.memfd_create(f"slot-{number}") for number in range(3)]
    for descriptor in descriptors:
        os.ftruncate(descriptor, size)
    landing_at = size - mapped_slots.LANDING_BYTES  # prepared with the slot's last part
    slots = mapped_slots.MappedSlots(descriptors, landing_at, landing_at, torch.device("cpu"))
    order: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def populate(part: torch.Tensor) -> None:
        number = next(
            index
            for index, slot in enumerate(slots.tensors)
            if slot.data_ptr() <= part.data_ptr() < slot.data_ptr() + size
        )
        order.append(number)
        first.set()
        assert go_on.wait(30)

    monkeypatch.setattr(mapped_slots, "_populate", populate)
    thread = threading.Thread(target=slots.prepare)
    thread.start()
    assert not first.wait(0.1), "nothing was asked for"
    slots.prepare_next(0)
    assert first.wait(30)
    slots.prepare_next(2)  # while the first part of slot 0 is being populated
    assert not slots.wait(2, 1, 0.0)
    go_on.set()
    assert slots.wait(2, landing_at, 30.0)
    assert not slots.prepared.wait(0.1), "the others wait until all are asked for"
    slots.prepare_all()
    thread.join(30)
    assert order[:5] == [0, 2, 2, 2, 2] and sorted(order) == [0] * 4 + [1] * 4 + [2] * 4
    assert slots.prepared.is_set()
    slots.drop()
