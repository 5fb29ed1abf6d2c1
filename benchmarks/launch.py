"""Forks the ranks of a benchmark and runs its measurements on them, also past one that fails.

The ranks of a *session* share their start-up over all measurements. A measurement that fails (out
of memory, a rank that hangs) ends the session, because a rank that failed leaves its peers inside
collectives: the failure is recorded, and a new session continues with the next one.

Nothing runs longer than ``budget_s``: ranks start no round that would not end in time, and what
still runs then is killed.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import measure
from benchmarks.options import ConfigurationRefused, Entry, await_turn
from benchmarks.session import Session
from torch._C._distributed_c10d import FileStore, Store

from megascale_common.node.process import arm_parent_death
from megascale_trainer.launch.place import Place

_STORE_TIMEOUT_S = 120.0
_POLL_S = 0.02
_GRACE_S = 2.0  # after one rank failed, how long its peers may take to record their own failure
_CUBLAS_WORKSPACE = ":4096:8"
_TIME_IS_UP = "the time is up (--budget-s)"

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """What to measure, on what, and in which time; ``report`` prints a line as it comes.

    ``turns``: see :func:`benchmarks.options.await_turn`. None: measurements follow at once.
    """

    entries: Sequence[Entry]
    cuda: bool
    ranks: int
    folder: Path
    report: Report
    turns: Path | None = None
    budget_s: float = 0.0
    limit_s: float = 150.0


class Journal:
    """The lines of all measurements so far, in a file that every rank may append to.

    A line has the number of its entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, number: int, line: dict[str, Any]) -> bool:
        """Append the line of an entry, unless it has one; returns whether it had none.

        Of ranks that fail together the first one records why.
        """
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if number in self.done():
                return False
            file.write(json.dumps({"entry": number, **line}) + "\n")
        return True

    def lines(self) -> list[dict[str, Any]]:
        """All lines."""
        return (
            [json.loads(line) for line in self.path.read_text().splitlines()]
            if self.path.exists()
            else []
        )

    def touch(self) -> None:
        """Record progress inside a measurement."""
        self.path.touch()

    def touched(self) -> int:
        """A number that changes with any progress."""
        return self.path.stat().st_mtime_ns if self.path.exists() else 0

    def done(self) -> set[int]:
        """The entries that have a line: measured, failed or skipped."""
        return {line["entry"] for line in self.lines()}


def run(plan: LaunchPlan, results: Path | None) -> tuple[int, list[dict[str, Any]]]:
    """Measure everything.

    Args:
        results: the file of the lines; overwritten. None: they are only reported.

    Returns:
        The exit status, 0 if nothing failed; and all lines.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="megascale-bench-"))
    try:
        journal = Journal(results or folder / "results.jsonl")
        journal.path.unlink(missing_ok=True)
        deadline = time.time() + plan.budget_s if plan.budget_s else 0.0
        for number in itertools.count():
            todo = [index for index in range(len(plan.entries)) if index not in journal.done()]
            if not todo:
                lines = journal.lines()
                return int(any("failed" in line for line in lines)), lines
            if deadline and time.time() > deadline:
                for index in todo:
                    _note(plan, journal, index, {"skipped": _TIME_IS_UP})
                continue
            _fork_session(plan, journal, todo, folder / f"store-{number}", deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("unreachable")


def _fork_session(
    plan: LaunchPlan, journal: Journal, todo: Sequence[int], store: Path, deadline: float
) -> None:
    """Run ``todo`` in one process per rank until all end; at least one entry has its line then."""
    sys.stdout.flush()
    parent = os.getpid()
    running: dict[int, int] = {}
    for rank in range(plan.ranks):
        child = os.fork()
        if child == 0:
            arm_parent_death(expected_parent_pid=parent)
            torch.set_num_threads(1)  # as a job's ranks; and a new pool, as after_fork has it
            os._exit(_forked_rank(plan, journal, todo, rank, store, deadline))
        running[child] = rank
    before = len(journal.lines())
    problem = _wait(running, journal, plan.limit_s, deadline)
    explained = any("rank" in line for line in journal.lines()[before:])
    left = [index for index in todo if index not in journal.done()]
    if problem and left and not explained:
        _note(plan, journal, left[0], {"skipped" if problem == _TIME_IS_UP else "failed": problem})


def _wait(running: dict[int, int], journal: Journal, limit_s: float, end: float) -> str:
    """Wait until all ranks have ended; returns what went wrong, or "".

    It kills the rest when one fails, when there is no progress for ``limit_s``, and at ``end``
    (time.time() of the end of the budget; 0: never).
    """
    problem, touched, deadline = "", journal.touched(), time.monotonic() + limit_s
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = running.pop(child)
            if status and not problem:
                problem = f"rank {rank} ended with status {os.waitstatus_to_exitcode(status)}"
                deadline = time.monotonic() + _GRACE_S
            continue
        if not problem and (now := journal.touched()) != touched:
            touched, deadline = now, time.monotonic() + limit_s
        out_of_budget = bool(end) and time.time() > end
        if deadline < float("inf") and (out_of_budget or time.monotonic() > deadline):
            problem = problem or (
                _TIME_IS_UP if out_of_budget else f"did nothing within {limit_s:.0f} s"
            )
            for child in running:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(_POLL_S)
    return problem


def _forked_rank(
    plan: LaunchPlan, journal: Journal, todo: Sequence[int], rank: int, path: Path, deadline: float
) -> int:
    """Run a forked rank; returns its exit status and never raises."""
    store = FileStore(str(path), plan.ranks)
    store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
    place = Place(rank, plan.ranks, rank, plan.ranks)
    status = _rank(plan, journal, todo, place, store, path.parent, deadline)
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _rank(
    plan: LaunchPlan,
    journal: Journal,
    todo: Sequence[int],
    place: Place,
    store: Store,
    folder: Path,
    deadline: float,
) -> int:
    """Measure ``todo`` in order; a rank that fails records why, rank 0 everything else."""
    number = todo[0] if todo else 0
    try:
        with tempfile.TemporaryDirectory(prefix="megascale-bench-", dir=folder) as own:
            sessions = _session(plan, journal, todo, place, store, Path(own), deadline)
            for session, number in sessions:
                line = _line(session, plan.entries[number], plan.folder)
                session.forget()  # whose turn is next may need all of the device's memory
                if place.rank == 0:
                    _note(plan, journal, number, line)
                session.meet()  # no rank starts the next one before this one is recorded
        return 0
    except BaseException as error:
        traceback.print_exc()
        _note(plan, journal, number, {"failed": _reason(error), "rank": place.rank})
        return 1


def _session(
    plan: LaunchPlan,
    journal: Journal,
    todo: Sequence[int],
    place: Place,
    store: Store,
    folder: Path,
    deadline: float,
) -> Iterator[tuple[Session, int]]:
    entries = [plan.entries[number] for number in todo]
    if any(variant.run.deterministic for entry in entries for variant in entry.variants):
        # cuBLAS reads it once, when the device is first used: too late for a deterministic trainer
        # that comes after a fast one.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    device = torch.device("cuda", place.local_rank) if plan.cuda else torch.device("cpu")
    if plan.cuda:
        torch.cuda.set_device(device)
    session = Session(place, store, device, folder, deadline, journal.touch)
    for number in todo:
        await_turn(plan.turns, number, journal.touch)
        yield session, number
    session.close()


def _line(session: Session, entry: Entry, folder: Path) -> dict[str, Any]:
    if session.out_of_time():
        return {"name": entry.name, "skipped": _TIME_IS_UP}
    try:
        return measure(session, entry, folder)
    except ConfigurationRefused as refusal:  # on every rank alike, and before it starts anything
        return {"name": entry.name, "failed": str(refusal)}


def _note(plan: LaunchPlan, journal: Journal, number: int, line: dict[str, Any]) -> None:
    line = {"name": plan.entries[number].name, **line}
    if journal.add(number, line):
        plan.report(line)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
