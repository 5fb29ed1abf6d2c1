"""Last lines, following, and classes of trouble in the ranks' logs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_executor.agent.rank_logs import MAX_SIGNATURES, LogScanner, follow, signature, tail


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=20)),
    st.integers(0, 30),
)
def test_tail_is_the_end_of_the_file(tmp_path: Path, lines: list[str], count: int) -> None:
    path = tmp_path / "rank.log"
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text + "unfinished")
    found, offset = tail(path, count)
    assert found == (lines[-count:] if count else [])
    assert offset == len(text)


def test_tail_reads_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_text("".join(f"line {number:06d} {'x' * 50}\n" for number in range(20_000)))
    found, _ = tail(path, 5_000)
    assert (
        len(found) == 5_000
        and found[0].startswith("line 015000")
        and found[-1].startswith("line 019999")
    )


async def test_follow_gives_what_is_written_up_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_text("old\nha")
    over = False

    async def write() -> None:
        nonlocal over
        with path.open("a") as log:
            for text in ("lf\n", "next\n", "last without newline"):
                log.write(text)
                log.flush()
                await asyncio.sleep(0.05)
        over = True

    writer = asyncio.create_task(write())
    _, offset = tail(path, 1)
    lines = [line async for line in follow(path, offset, lambda: over)]
    await writer
    assert lines == ["half", "next", "last without newline"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("RuntimeError: rank 3 failed at 0x7f00", "RuntimeError: rank 12 failed at 0x7fab"),
        ("NCCL WARN socket to 10.0.0.1:4242 closed", "NCCL WARN socket to 10.0.0.77:9 closed"),
        ("FileNotFoundError: '/data/a.bin'", "FileNotFoundError: '/other/b.bin'"),
    ],
)
def test_lines_of_one_class_share_a_signature(first: str, second: str) -> None:
    assert signature(first) == signature(second) is not None


def test_other_lines_have_none() -> None:
    assert signature("step 12 loss 3.4") is None
    assert signature("ValueError: a") != signature("KeyError: a")


def test_scanner_counts_each_line_once_and_is_bounded(tmp_path: Path) -> None:
    logs = {rank: tmp_path / f"rank-{rank}.log" for rank in (0, 1)}
    scanner = LogScanner()
    scanner.watch(logs)
    assert scanner.collect() == []  # no file yet
    logs[0].write_text("step 1\nValueError: 1 is bad\nValueErr")
    logs[1].write_text("ValueError: 2 is bad " + "x" * 5000 + "\nValueError: 3 is bad\n")
    found = {each.signature: each for each in scanner.collect()}
    assert found["ValueError: # is bad"].count == 2
    assert found["ValueError: # is bad"].first_rank == 0
    assert max(len(each.sample_line.encode()) for each in found.values()) <= 512
    with logs[0].open("a") as log:
        log.write("or: 9 is bad\n")
    assert [(each.signature, each.count) for each in scanner.collect()] == [
        ("ValueError: # is bad", 1)
    ]
    with logs[0].open("a") as log:
        log.writelines(
            f"error of kind {chr(97 + number // 26)}{chr(97 + number % 26)}\n"
            for number in range(600)
        )
    assert len(scanner.collect()) == MAX_SIGNATURES
