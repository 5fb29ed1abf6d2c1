"""Simulated operators: every verb is ordered and answered, and jobs go on where they saved."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.simulation.seed_csv import SeedCsv
from tests.simulation.shell.faults import DAY_S, Fault
from tests.simulation.shell.fleet import run_all
from tests.simulation.shell.people import PEOPLE
from tests.simulation.shell.run import Result, Setup

MINUTES = 4.0


def orders(*kinds: str) -> Result:
    """A small fleet on which these orders are given one after another, and nothing else happens."""
    faults = [Fault(60.0, "small_job", 1.0, 1)]
    faults += [
        Fault(120.0 + 60.0 * MINUTES * number, kind, 2.0, 6 * number + 4)
        for number, kind in enumerate(kinds)
    ]
    days = (faults[-1].at_s + 60.0) / DAY_S
    (result,) = run_all([Setup(1, nodes=12, days=days, faults=tuple(faults))], 1)
    return result


def test_every_verb_is_ordered_and_carried_out() -> None:
    result = orders(*(kind for kind, _ in PEOPLE))
    assert not result.broken
    done = {method for method, code in result.answers if code == "OK"}
    assert done >= {
        "SubmitJob", "SuspendJob", "ResumeJob", "RestartJob", "UpdateJob", "DrainNode", "EvictNode",
        "UncordonNode", "SetPolicy", "ResetBreaker", "DeleteJob",
    }  # fmt: skip
    refused = {code for _, code in result.answers} - {"OK"}
    assert refused == {"NOT_FOUND", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
    reasons = {line.split(" ")[2] for line in result.log}
    assert reasons >= {"NODE_DRAINING", "SUSPEND_REQUESTED", "UPDATE_REQUESTED", "POLICY_SET"}


def test_a_drained_job_saves_and_goes_on_with_the_next_step(tmp_path: Path) -> None:
    """Its executors carry out the order: nothing waits for the deadline, no step is lost."""
    result = orders("restart", "drain", "suspend")
    assert not result.broken and result.recoveries == 3
    reasons = [line.split(" ")[2] for line in result.log if line.startswith("main ")]
    for order in ("RESTART_REQUESTED", "NODE_DRAINING", "SUSPEND_REQUESTED"):
        then = reasons[reasons.index(order) :]
        assert then.index("CHECKPOINT_COMMITTED") < then.index("ATTEMPT_STOPPED")
    assert "JOB_SUSPENDED" in reasons and "JOB_RESUMED" in reasons
    assert result.ettr > 0.95, "waiting for the deadline of 420 s would cost 0.2"
    SeedCsv(str(tmp_path / "seeds.csv"), Setup(1)).add(result)
    (row,) = csv.DictReader((tmp_path / "seeds.csv").open())
    assert (row["seed"], row["recoveries"], row["broken"]) == ("1", "3", "")
