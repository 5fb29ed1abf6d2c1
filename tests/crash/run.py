"""Cases by number, in this process or spread over several; a number is always the same case.

Apart from ``__main__``, which a spawned process does not import.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from tests.crash.case import Case
from tests.crash.replica_case import REPLICA_KINDS, ReplicaCase

from megascale_checkpoint import storage
from megascale_checkpoint.commit import commit_log
from megascale_checkpoint.save import persist

REPLICAS_EVERY = 4  # of so many cases one is of replicas
SNAPSHOT_EVERY = 4  # records, so that short logs have snapshots


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case; ``history`` is empty unless it failed."""

    lost: str
    silent: str
    found: bool
    hits: frozenset[tuple[str, str, str]]
    history: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether a checkpoint was lost or silently wrong."""
        return bool(self.lost or self.silent)


def outcomes(seed: int, cases: int, only: tuple[str, ...], jobs: int) -> Iterator[Outcome]:
    """What became of each case, in the order of their numbers; ``jobs`` processes share them."""
    asked = [(seed, number, only) for number in range(cases)]
    if jobs == 1:
        with _prepared():
            yield from map(_numbered, asked)
        return
    # Spawned: each process has an event loop and patches of its own, and no thread of this one.
    # Unlike multiprocessing.Pool, this raises an error where a process dies.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, cases), context)
    try:
        yield from pool.map(_in_process, asked)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_process(asked: tuple[int, int, tuple[str, ...]]) -> Outcome:
    with _prepared():
        return _numbered(asked)


def _numbered(asked: tuple[int, int, tuple[str, ...]]) -> Outcome:
    """The case of this number, which is the same in whatever process it runs."""
    seed, number, only = asked
    of_replicas = number % REPLICAS_EVERY == REPLICAS_EVERY - 1
    if only:
        of_replicas = set(only) <= set(REPLICA_KINDS)
    # Each sort counts on its own.
    own = number // REPLICAS_EVERY if of_replicas else number - number // REPLICAS_EVERY
    own = number if only else own
    case = run_case(seed * 1_000_003 + own, only, of_replicas=of_replicas)
    oracle, machine = case.oracle, case.machine
    return Outcome(
        oracle.lost,
        oracle.silent,
        oracle.found and not oracle.failed,
        frozenset(machine.hits),
        tuple(machine.history) if oracle.failed else (),
    )


def run_case(
    seed: int, only: tuple[str, ...] = (), *, of_replicas: bool = False
) -> Case | ReplicaCase:
    """One case, to its end."""
    case: Case | ReplicaCase
    if of_replicas:
        case = ReplicaCase(seed, only)
    else:
        case = disk_case = Case(seed, only)
        storage.SCHEMES["crash"] = disk_case.open
    try:
        asyncio.run(case.run())
    except Exception as error:  # a defect: whatever it is, the job does not go on
        case.oracle.lost = case.oracle.lost or f"the daemon fails: {error!r}"
    case.machine.note(f"seed of this case: {seed}")
    return case


@contextmanager
def _prepared() -> Iterator[None]:
    """Short logs have snapshots, retries do not wait, and nothing is logged."""
    before = commit_log.SNAPSHOT_EVERY, persist.RETRY_PAUSES_S, structlog.get_config()
    commit_log.SNAPSHOT_EVERY, persist.RETRY_PAUSES_S = SNAPSHOT_EVERY, (0.0, 0.0)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        commit_log.SNAPSHOT_EVERY, persist.RETRY_PAUSES_S = before[0], before[1]
        structlog.configure(**before[2])
        storage.SCHEMES.pop("crash", None)
