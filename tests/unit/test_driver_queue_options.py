"""The driver's options about the queue, and what a deleted job leaves in its memory."""

from __future__ import annotations

import argparse

import pytest

from megascale_driver.core.values.events import Audit
from megascale_driver.journal.audit_log import AuditLog, token_of
from megascale_driver.service.queue_options import add_queue_options
from megascale_driver.shell.feeds import JobFeeds


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    add_queue_options(made)
    return made


def test_the_options_have_defaults_and_quotas_repeat(parser: argparse.ArgumentParser) -> None:
    found = parser.parse_args([])
    assert (found.quota, found.preemption) == ([], True)
    assert (found.keep_ended_jobs, found.keep_ended_days) == (1000, 30.0)
    words = ["--quota", "red=8", "--quota", "blue=0", "--no-preemption", "--keep-ended-jobs", "5"]
    found = parser.parse_args([*words, "--keep-ended-days", "0.5"])
    assert dict(found.quota) == {"red": 8, "blue": 0} and not found.preemption
    assert (found.keep_ended_jobs, found.keep_ended_days) == (5, 0.5)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--quota", "red", "give TENANT=DEVICES"),
        ("--quota", "Red=8", "a-z, 0-9"),
        ("--quota", "red=-1", "a whole number"),
        ("--quota", "red=8.5", "a whole number"),
        ("--keep-ended-jobs", "many", "a whole number"),
        ("--keep-ended-days", "0", "a positive number"),
        ("--keep-ended-days", "nan", "a positive number"),
    ],
)
def test_a_bad_value_is_refused_with_its_remedy(
    parser: argparse.ArgumentParser, option: str, value: str, remedy: str
) -> None:
    with pytest.raises(argparse.ArgumentError) as refused:
        parser.parse_args([f"{option}={value}"])
    assert option in str(refused.value) and remedy in str(refused.value)


def line(log: str, seq: int) -> Audit:
    return Audit(log, seq, 1.0, "driver", f"jobs/{log}", "PLACED", f"line {seq}")


def test_a_new_job_of_a_deleted_name_begins_its_log_again() -> None:
    log = AuditLog()
    log.load([line("a", 1), line("b", 1), line("a", 2)])
    behind = token_of(line("b", 1))
    log.extend([], gone=["a"])
    assert [each.log for each in log] == ["b"]
    log.extend([line("a", 1)])
    assert log.behind(behind) == [line("a", 1)]
    with pytest.raises(ValueError, match="names no line"):
        log.behind(token_of(line("a", 2)))
    feeds = JobFeeds()
    feed = feeds.of("a")
    feeds.forget(["a"])
    assert feeds.of("a") is not feed
