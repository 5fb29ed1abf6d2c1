"""Attempts that are opened by hand, without a number, and by a driver, which issues one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.test_checkpoint_log_holes import opened, prepared

from megascale_checkpoint.commit_log import CommitLog
from megascale_checkpoint.committer import Committer
from megascale_checkpoint.opening import Opening
from megascale_checkpoint.storage import FileStorage
from megascale_common.service.errors import RequestError, SupersededError


def committer() -> Committer:
    """A committer without workers."""
    return Committer(lambda job: None)


async def test_attempts_by_hand_are_numbered_by_the_log_however_many_start_at_once(
    tmp_path: Path,
) -> None:
    wanted = Opening("job", str(tmp_path), 1)
    found = await asyncio.gather(*(committer().open_next_attempt(wanted) for _ in range(8)))
    assert sorted(record.attempt for record, _ in found) == list(range(1, 9))
    log = CommitLog(FileStorage(tmp_path))
    log.refresh()
    assert [record.attempt for record in log.records] == list(range(1, 9))
    with pytest.raises(RequestError, match="belongs to job job"):
        await committer().open_next_attempt(Opening("other", str(tmp_path), 1))


async def test_a_driver_goes_on_behind_an_attempt_by_hand_and_never_as_the_same_one(
    tmp_path: Path,
) -> None:
    by_hand = committer()
    record, _ = await by_hand.open_next_attempt(Opening("job", str(tmp_path), 1))
    assert await by_hand.report(prepared(tmp_path, 10))
    # Before, the driver got the record of the run by hand, which starts from nothing.
    with pytest.raises(SupersededError, match="by hand") as refused:
        await opened(committer(), tmp_path, record.attempt)
    assert refused.value.metadata == {"attempt": "1"}
    await opened(committer(), tmp_path, 2)
    decision = await committer().next_restore(Opening("job", str(tmp_path), 1))
    assert decision.plan.step == 10
    record, decision = await committer().open_next_attempt(Opening("job", str(tmp_path), 1))
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
