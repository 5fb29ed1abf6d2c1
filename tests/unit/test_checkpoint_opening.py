"""Attempts that are opened by hand, without a number, and by a driver, which issues one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_checkpoint_log_holes import opened, prepared

from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.commit_record import Record
from megascale_checkpoint.commit.restore_decision import SealedStep
from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.opening import HELD, Opening, holders_in, runs_of
from megascale_checkpoint.storage import FileStorage
from megascale_common.service.errors import ForbiddenError, RequestError, SupersededError
from megascale_job.config import CheckpointConfig


def committer() -> Committer:
    """A committer without workers."""
    return Committer(lambda job: None)


async def test_attempts_by_hand_are_numbered_by_the_log_however_many_start_at_once(
    tmp_path: Path,
) -> None:
    wanted = Opening("job", CheckpointConfig(uri=str(tmp_path)), 1)
    found = await asyncio.gather(*(committer().open_next_attempt(wanted) for _ in range(8)))
    assert sorted(record.attempt for record, _ in found) == list(range(1, 9))
    log = CommitLog(FileStorage(tmp_path))
    log.refresh()
    assert [record.attempt for record in log.records] == list(range(1, 9))
    with pytest.raises(RequestError, match="belongs to job job"):
        await committer().open_next_attempt(
            Opening("other", CheckpointConfig(uri=str(tmp_path)), 1)
        )


async def test_a_driver_goes_on_behind_an_attempt_by_hand_and_never_as_the_same_one(
    tmp_path: Path,
) -> None:
    by_hand = committer()
    record, _ = await by_hand.open_next_attempt(
        Opening("job", CheckpointConfig(uri=str(tmp_path)), 1)
    )
    assert await by_hand.report(prepared(tmp_path, 10))
    # Before, the driver got the record of the run by hand, which starts from nothing.
    with pytest.raises(SupersededError, match="by hand") as refused:
        await opened(committer(), tmp_path, record.attempt)
    assert refused.value.metadata == {"attempt": "1"}
    await opened(committer(), tmp_path, 2)
    decision = await committer().next_restore(
        Opening("job", CheckpointConfig(uri=str(tmp_path)), 1)
    )
    assert decision.plan.step == 10
    record, decision = await committer().open_next_attempt(
        Opening("job", CheckpointConfig(uri=str(tmp_path)), 1)
    )
    assert (record.attempt, decision.plan.step) == (3, 10)
    # The epoch of the driver stays, so that it may go on with the job.
    assert record.values["epoch"] == [1, 2]
    await opened(committer(), tmp_path, 4)


async def test_a_job_that_is_submitted_again_does_not_start_over_from_its_first_attempt(
    tmp_path: Path,
) -> None:
    first = committer()
    seq = await opened(first, tmp_path, 1)
    assert await opened(committer(), tmp_path, 1) == seq  # a repeated call
    assert await first.report(prepared(tmp_path, 10))
    with pytest.raises(SupersededError, match="has committed") as refused:
        await opened(committer(), tmp_path, 1)
    assert refused.value.metadata == {"attempt": "1"}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_daemon_reports_its_own_ranks_alone_also_to_a_committer_that_was_restarted(
    tmp_path: Path, restarted: bool
) -> None:
    """Before, one that was restarted within the attempt took in the ranks of any node."""
    uri = str(tmp_path)
    wanted = Opening("job", CheckpointConfig(uri=uri), 1, holders={0: "n1"})
    first = committer()
    await first.open_attempt(wanted, 1, SealedStep(0, 0), frozenset(), (1, 1))
    worker: Any = SimpleNamespace(attempt=1, uri=uri, world_size=1, layout_info={})
    asked = Committer(lambda job: worker) if restarted else first
    report = prepared(tmp_path, 10)
    with pytest.raises(ForbiddenError, match="node n2 holds no rank 0") as refused:
        await asked.report(report, "n2")
    assert refused.value.reason == "NOT_ITS_JOB"
    assert await asked.report(report, "n1")


async def test_an_attempt_that_an_earlier_build_opened_goes_on_under_this_one(
    tmp_path: Path,
) -> None:
    await opened(committer(), tmp_path, 1)  # which did not write who holds which rank
    worker: Any = SimpleNamespace(attempt=1, uri=str(tmp_path), world_size=1, layout_info={})
    assert await Committer(lambda job: worker).report(prepared(tmp_path, 10), "n1")


def test_which_node_holds_which_ranks_is_kept_as_runs() -> None:
    holders = {0: "n1", 1: "n1", 2: "n2", 3: "n1"} | {4 + rank: "n3" for rank in range(8)}
    runs = runs_of(holders)
    assert runs == {"n1": [[0, 1], [3, 3]], "n2": [[2, 2]], "n3": [[4, 11]]}
    assert holders_in(Record(1, "OPEN", 1, {HELD: runs})) == holders
    assert holders_in(Record(1, "OPEN", 1, {})) == holders_in(None) == {}
