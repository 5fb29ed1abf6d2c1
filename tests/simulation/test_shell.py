"""The whole-shell simulation in its short form: seeds, replays, skips, mutants, shortest histories.

``make simulate`` and ``make mutants`` are the long forms.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation import mutants
from tests.simulation.hints import HINTS
from tests.simulation.hunt import AFTER_S, NODES
from tests.simulation.mutant_list import MUTANTS
from tests.simulation.shell.drills import drills
from tests.simulation.shell.faults import DAY_S, HARDWARE, STORM, Fault, history
from tests.simulation.shell.fleet import run_all, shortest
from tests.simulation.shell.people import PEOPLE
from tests.simulation.shell.run import SETTLE_S, Result, Setup
from tests.simulation.shell.scenarios import REPEATED, SCENARIOS, scenario

SHORT = Setup(0, nodes=16, days=0.03, storms=100.0)
# Lines that report what daemons have done, and not what a driver has decided.
_REPORTS = ("CHECKPOINT_COMMITTED", "CHECKPOINT_SKIPPED")


def run(*setups: Setup) -> list[Result]:
    return sorted(run_all(list(setups), 2), key=lambda result: result.seed)


def decisions(result: Result) -> list[str]:
    """The decision log without its numbers, which reports share with decisions.

    Orders to take nodes back are sent at once, and arrive in any order: theirs is that of names.
    """
    split = [line.split(" ") for line in result.log]
    lines = [" ".join([line[0], *line[2:]]) for line in split if not set(line) & set(_REPORTS)]
    runs = itertools.groupby(lines, lambda line: "NODE_UNCORDONED" in line)
    return [line for taken_back, run in runs for line in (sorted(run) if taken_back else run)]


def command(*arguments: str) -> tuple[int, dict[str, Any], str]:
    found = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.returncode, json.loads(found.stdout.splitlines()[-1]), found.stderr


def test_short_histories_break_no_rule() -> None:
    status, figures, errors = command(
        "--nodes", "16", "--days", "0.03", "--storms", "100", "--first", "1", "--seeds", "2"
    )
    assert status == 0, errors
    assert figures["seeds"] == 2 and figures["broken"] == 0 and figures["recoveries"] > 3
    assert 0.5 < figures["ettr"] < 1.0 and 0.0 < figures["detect_p50_s"] < 60.0


def test_a_seed_twice_gives_one_log() -> None:
    eventful = replace(SHORT, seed=2)
    first, second = run(eventful, eventful)
    assert first.digest == second.digest and first.log == second.log and len(first.log) > 50


def test_another_seed_is_another_history() -> None:
    assert history(1, 16, 1.0, 0.0, 4.0) != history(2, 16, 1.0, 0.0, 4.0)
    assert history(1, 16, 1.0, 0.0, 4.0) == history(1, 16, 1.0, 0.0, 4.0)


# They hit after a number of callbacks, and ticks that are left out are callbacks, too.
_BY_CALLBACKS = ("driver_crash", "crash_on_commit")


@pytest.mark.parametrize(
    ("seeds", "days", "rest", "settle_s"),
    [
        pytest.param([18], 0.01, SHORT.rest, SETTLE_S, marks=pytest.mark.slow),
        pytest.param([14], 0.01, 1, SETTLE_S / 2, marks=pytest.mark.slow),
        pytest.param(range(40), 0.02, SHORT.rest, SETTLE_S, marks=pytest.mark.slow),
        pytest.param(range(20), 0.02, 1, SETTLE_S, marks=pytest.mark.slow),
    ],
    ids=["skips", "skips and rests", "forty", "twenty that rest"],
)
def test_skips_change_no_decision(
    seeds: Sequence[int], days: float, rest: int, settle_s: float
) -> None:
    """Nor do resting nodes."""
    for number in seeds:
        drawn = history(number, 16, days, 0.0, 100.0)
        faults = tuple(fault for fault in drawn if fault.kind not in _BY_CALLBACKS)
        wanted = replace(SHORT, seed=number, days=days, rest=rest, settle_s=settle_s, faults=faults)
        skipped, lived = run_all([wanted, replace(wanted, skip=False)], 1)
        assert not skipped.broken and not lived.broken, (skipped.broken, lived.broken)
        assert decisions(skipped) == decisions(lived), f"seed {number}"


@pytest.mark.slow
def test_no_skip_passes_the_end_of_a_wait() -> None:
    """A job whose attempts make no progress waits longer each time, and then begins."""
    faults = tuple(Fault(100.0 + 7.0 * n, "kill_worker", 1.0, 4 * n + 1) for n in range(40))
    wanted = replace(SHORT, days=0.006, settle_s=SETTLE_S / 2, faults=faults)
    skipped, lived = run_all([wanted, replace(wanted, skip=False)], 1)
    assert not skipped.broken and not lived.broken, (skipped.broken, lived.broken)
    assert lived.recoveries > 5
    assert abs(skipped.ettr - lived.ettr) < 0.01


@pytest.mark.slow
def test_rest_changes_no_decision_of_a_large_fleet() -> None:
    drawn = history(0, 256, 0.003, 0.0, 300.0)
    faults = tuple(fault for fault in drawn if fault.kind not in _BY_CALLBACKS)
    wanted = replace(SHORT, nodes=256, days=0.003, faults=faults)
    rested, lived = run_all([wanted, replace(wanted, skip=False)], 1)
    assert not rested.broken and not lived.broken and len(rested.log) > 250
    assert decisions(rested) == decisions(lived)


@pytest.mark.parametrize(
    "shorter", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["each kind once", "all"]
)
def test_drills_break_no_rule(shorter: bool) -> None:
    """Every kind of fault, with the bounds on detection: the code as it is keeps them all."""
    faults = drills(0, each_kind_once=shorter)
    wanted = {*STORM, *HARDWARE} - {*PEOPLE}  # what people order comes in storms
    assert {fault.kind for fault in faults} >= {kind for kind, _ in wanted}
    days = (faults[-1].at_s + AFTER_S) / DAY_S
    (result,) = run(Setup(0, NODES, days, faults=faults))
    assert not result.broken and result.recoveries > 5, result.broken


# They take more than a second of processor time each.
LONG = {"astray", "back", "gone", "kept", "link", "pair", "pair_alone", "rolling", "team"}
NAMES = (*SCENARIOS, *REPEATED)


@pytest.mark.parametrize(
    "names",
    [
        [name for name in NAMES if name not in LONG],
        pytest.param([name for name in NAMES if name in LONG], marks=pytest.mark.slow),
    ],
    ids=["short", "long"],
)
def test_scenarios_break_no_rule(names: list[str]) -> None:
    """Each leads to its state and back: its watches end, and every rule of the others holds."""
    setups = [replace(scenario(name), point=n) for n, name in enumerate(names)]
    broken = {result.point: result.broken for result in run_all(setups, 2)}
    assert len(broken) == len(names) >= 8
    assert {names[n]: what for n, what in broken.items() if what} == {}


QUICK = ("drop the fence", "never report silence", "a restarted node is no fault")


def test_mutants_are_caught() -> None:
    chosen = [mutant for mutant in MUTANTS if mutant.name in QUICK]
    assert len(chosen) == len(QUICK)
    histories = mutants.searched(range(4))
    survivors = [str(v) for v in mutants.run_all(chosen, histories, 2, HINTS) if not v.caught]
    assert not survivors, survivors


@pytest.mark.slow
def test_a_mutant_that_its_hint_does_not_catch_is_searched_for() -> None:
    (mutant,) = [each for each in MUTANTS if each.name == "name no spares by the rule"]
    verdict = mutants.run(mutant, ["back", "auto"], "back")
    assert verdict.caught and verdict.what.startswith("history auto"), verdict
    assert verdict.hint == "back" and "renew it" in str(verdict)


def test_every_mutant_still_applies() -> None:
    assert len(MUTANTS) >= 30 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if not mutants.applies(mutant)] == []
    assert {*HINTS} <= {mutant.name for mutant in MUTANTS}


def test_a_broken_history_is_cut_to_the_faults_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rule that a crash breaks, only one crash is left of a history."""
    from tests.simulation.shell import faults

    def crash(self: faults.Weather, fault: Fault) -> None:
        self._world.invariants.breaks("test", "a node crashed")

    monkeypatch.setattr(faults.Weather, "_crash", crash)
    others = [Fault(40.0 + number, "flap", 2.0, number) for number in range(5)]
    setup = replace(SHORT, days=0.002, faults=(*others, Fault(60.0, "crash", 1.0, 7)))
    assert shortest(setup, "test") == (Fault(60.0, "crash", 1.0, 7),)
