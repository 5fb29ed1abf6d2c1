"""`make bench-heartbeats` in short: real streams to a real driver, and all figures of the verb."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.harness.driver import here

from megascale_common.node.link_limits import HELLO_S

SHORT = ["--window", "2", "--windows", "1", "--warmup", "0.5"]
FIGURES = {
    "nodes",
    "interval_s",
    "core_share",
    "echo_share",
    "p99_ms",
    "rss_mib",
    "longest_stall_ms",
}


def measured(*options: str) -> tuple[int, dict[str, float], str]:
    command = [sys.executable, "benchmarks/heartbeats.py", *SHORT, *options]
    done = subprocess.run(  # noqa: PLW1510 - the status is what is tested
        command, cwd=here(), capture_output=True, text=True, timeout=240
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return done.returncode, figures, done.stderr


@pytest.mark.slow
def test_the_verb_prints_its_figures_of_a_driver_with_a_job_on_all_nodes() -> None:
    # The machine may be busy: what must hold is measured by the verb itself.
    status, figures, story = measured(
        "--nodes", "24", "--interval", "0.5", "--reconnect", "--max-p99-ms", "10000"
    )
    assert status in (0, 1), story
    assert figures.keys() == FIGURES | {"reconnect_s", "hello_max_s", "gave_up"}, story
    assert 0 < figures["hello_max_s"] < HELLO_S and figures["gave_up"] == 0, story
    assert figures["nodes"] == 24 and 0 < figures["core_share"] < 2
    assert 0 < figures["echo_share"] < 2 and figures["p99_ms"] > 0
    assert figures["longest_stall_ms"] > 0, "the driver's own measurement"
    assert "the job runs on all of them" in story and "a new driver sees all nodes" in story


def test_a_property_that_does_not_hold_is_status_1_with_the_figures() -> None:
    status, figures, story = measured("--nodes", "4", "--interval", "0.5", "--max-p99-ms", "0.001")
    assert (status, figures.keys()) == (1, FIGURES), story


@pytest.mark.parametrize("option", ["--nodes", "--interval", "--window"])
def test_wrong_options_are_status_2(option: str) -> None:
    status, figures, story = measured(option, "0")
    assert (status, figures) == (2, {}) and "give positive numbers" in story
