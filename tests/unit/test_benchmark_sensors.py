"""Sensors of a device: the samples of the timed steps alone count, and energy is by token."""

from __future__ import annotations

import pytest
import torch
from benchmarks.sensors import THROTTLES, Sample, Sensors, Window, shared, summary, window


def sample(at_s: float, *, power_w: float = 700.0, throttles: int = 0) -> Sample:
    return Sample(at_s, 1500.0 + at_s, power_w, 60.0 + at_s, power_w * at_s, throttles)


def test_samples_of_the_warm_up_do_not_count() -> None:
    samples = [sample(float(at), throttles=0x8) for at in range(5)]
    samples += [sample(float(at), throttles=0x4) for at in range(5, 9)]
    found = window(samples, 5.0)
    assert found == Window(1506.5, 700.0, 68.0, 2100.0, 0x4)


def test_energy_is_that_of_the_whole_window_though_the_first_sample_comes_later() -> None:
    found = window([sample(1.5), sample(3.0)], 1.0)
    assert found is not None
    assert found.energy_j == pytest.approx(700.0 * 2.0)


def test_one_sample_is_no_window() -> None:
    assert window([sample(1.0)], 0.0) is None


def test_ranks_are_put_together_by_the_largest_of_each_number() -> None:
    power_cap, hot = THROTTLES["sw_power_cap"], THROTTLES["hw_thermal_slowdown"]
    one = shared(Window(1400.0, 690.0, 61.0, 1000.0, power_cap), 0, 2)
    two = shared(Window(1500.0, 700.0, 66.0, 1200.0, power_cap | hot), 1, 2)
    numbers = [max(pair) for pair in zip(one, two, strict=True)]
    assert summary(numbers, 2, 110_000) == {
        "clock_mhz": 1450,
        "power_w": 695,
        "temperature_c": 66,
        "joules_per_token": 0.02,
        "throttled_by": ["sw_power_cap", "hw_thermal_slowdown"],
    }


def test_a_rank_without_sensors_leaves_no_half_truth() -> None:
    one = shared(Window(1400.0, 690.0, 61.0, 1000.0, 0), 0, 2)
    two = shared(None, 1, 2)
    assert summary([max(pair) for pair in zip(one, two, strict=True)], 2, 100) is None


def test_a_processor_has_no_sensors_and_its_times_stand_alone() -> None:
    with Sensors(torch.device("cpu")) as sensors:
        assert sensors.over(1.0) is None
