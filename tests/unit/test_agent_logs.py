"""Last lines, following, and classes of trouble in the ranks' logs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_executor.agent.rank_logs import follow, tail


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
