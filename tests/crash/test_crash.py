"""Crash cases in a short form, and sabotages: without any one of its guards the daemon fails them.

`make crash` runs as many cases as one likes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.crash.__main__ import main
from tests.crash.machine import (
    CHANGES,
    FAILED_SYNC,
    KILL,
    LOST_REPLY,
    NO_SPACE,
    POWER,
    STALL,
    SYNCS,
)
from tests.crash.sabotage import (
    SABOTAGES,
    collected_before_the_record,
    copy_given_up,
    create_overwrites,
    end_not_confirmed,
    manifest_not_confirmed,
    replica_age_ignored,
    two_writers,
)

CASES = 54
# Sabotages are found within 100 cases; what else a case does may change, so there is room.
MOST_CASES, MOST_CASES_OF_RARE = 600, 3000
RARE = (create_overwrites, manifest_not_confirmed, end_not_confirmed)  # after hundreds of cases
LONG = (*RARE, copy_given_up, replica_age_ignored)  # more than four seconds each
# With which some are found within ten cases instead of forty to eighty.
SEEDS = {two_writers: 2, collected_before_the_record: 20}


def test_no_case_is_lost_or_silent(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--cases", str(CASES), "--seed", "3"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert result == {"cases": CASES, "lost": 0, "silent": 0, "newest_complete_found": CASES}
    hits = captured.err.splitlines()[-1]
    for kind in (POWER, KILL, FAILED_SYNC, NO_SPACE, LOST_REPLY, STALL, "flip"):
        assert kind in hits, f"no fault of the kind {kind} has hit: {hits}"
    for call in (*SYNCS, *(set(CHANGES) - {"rmdir"}), "write", "message"):
        assert call in hits, f"no fault has hit {call}: {hits}"


def test_processes_share_the_cases_and_find_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    # Without stalls: where those are given up depends on the clock.
    only = [word for kind in (KILL, FAILED_SYNC, LOST_REPLY) for word in ("--only", kind)]
    printed = []
    for jobs in ("1", "2"):
        assert main(["--cases", "6", "--seed", "3", "--jobs", jobs, *only]) == 0
        captured = capsys.readouterr()
        printed.append((captured.out, captured.err.splitlines()[-1]))
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(
            sabotage, id=sabotage.__name__, marks=[pytest.mark.slow] if sabotage in LONG else []
        )
        for sabotage in SABOTAGES
    ],
)
def test_without_this_guard_a_case_fails(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sabotage(monkeypatch)
    only = [word for kind in SABOTAGES[sabotage] for word in ("--only", kind)]
    cases = MOST_CASES_OF_RARE if sabotage in RARE else MOST_CASES
    seed = str(SEEDS.get(sabotage, 0))
    status = main(["--cases", str(cases), "--seed", seed, "--first", *only])
    captured = capsys.readouterr()
    assert status == 1, f"nothing was found: {sabotage.__doc__}"
    result = json.loads(captured.out.splitlines()[-1])
    assert result["lost"] + result["silent"] == 1
    assert "the shortest history that fails:" in captured.err
    assert "seed of this case" in captured.err


@pytest.mark.parametrize(
    "arguments", [["--cases", "0"], ["--cases", "many"], ["--seed", "x"], ["--jobs", "0"]]
)
def test_wrong_arguments_have_a_status_of_their_own(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert arguments[0] in captured.err
