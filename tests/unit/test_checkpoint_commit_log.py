"""The commit log: a superseded attempt can never commit, however two writers are interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.checkpoint_files import COMMIT
from tests.harness.properties import examples

from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.storage import FileStorage
from megascale_common.service.errors import ServiceError, SupersededError


class MemoryStorage:
    """Storage in a dictionary; ``before`` runs before every operation, as another writer might."""

    uri = "memory"

    def __init__(self, files: dict[str, bytes], before: Callable[[], None] = lambda: None) -> None:
        self.files, self._before = files, before

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        self._before()
        data = b"".join(bytes(chunk) for chunk in chunks)
        if path in self.files:
            raise FileExistsError(path)
        self.files[path] = data
        return len(data)

    def create(self, path: str, data: bytes) -> bool:
        self._before()
        return self.files.setdefault(path, data) is data

    def read(self, path: str) -> bytes:
        self._before()
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        part = self.read(path)[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def check(self) -> None:
        self._before()

    def confirm(self, path: str, data: bytes) -> bool:
        self._before()
        return self.files.get(path) == data

    def delete(self, path: str) -> bool:
        self._before()
        return self.files.pop(path, None) is not None

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def names(self, folder: str, after: str = "") -> list[str]:
        self._before()
        below = [name for name in self.files if name.startswith(f"{folder}/")]
        names = {name.removeprefix(f"{folder}/").partition("/")[0] for name in below}
        return sorted(name for name in names if name > after)

    def remove_unfinished(self, folder: str) -> int:
        return 0  # files appear whole here


def act(log: CommitLog, attempt: int, step: int) -> None:
    """Open (step 0) or commit; a refusal is a valid outcome."""
    try:
        if step == 0:
            log.append_open(attempt, dict)
        else:
            log.append_commit(attempt, step, COMMIT)
    except ServiceError:
        pass


def read_all(files: dict[str, bytes]) -> list[Record]:
    log = CommitLog(MemoryStorage(files))
    log.refresh()
    assert not log.damaged
    return log.records


# Each entry: how many operations of the first writer pass before the second one acts, and its act.
INTERRUPTIONS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=8)


@examples(150)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), INTERRUPTIONS, st.booleans())
def test_no_commit_of_a_lower_attempt_after_a_higher_open(
    steps: list[int], interruptions: list[tuple[int, int]], low_first: bool
) -> None:
    files: dict[str, bytes] = {}
    first, second = (1, 2) if low_first else (2, 1)
    rival = CommitLog(MemoryStorage(files))
    waiting = list(interruptions)

    def interrupt() -> None:
        if waiting and waiting[0][0] > 0:
            waiting[0] = (waiting[0][0] - 1, waiting[0][1])
        elif waiting:
            act(rival, second, waiting.pop(0)[1])

    mine = CommitLog(MemoryStorage(files, interrupt))
    act(mine, first, 0)
    for step in steps:
        act(mine, first, step)
    records = read_all(files)
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    fence = 0
    for record in records:
        assert record.attempt >= fence, [(r.kind, r.attempt) for r in records]
        fence = max(fence, record.attempt)
    for attempt in (1, 2):
        of_attempt = [record for record in records if record.attempt == attempt]
        assert not of_attempt or of_attempt[0].kind == "OPEN"
        assert sum(record.kind == "OPEN" for record in of_attempt) <= 1
        committed = [record.step for record in of_attempt if record.kind == "COMMIT"]
        assert committed == sorted(set(committed))


def test_a_later_attempt_fences_by_name(tmp_path: Path) -> None:
    old, new = CommitLog(FileStorage(tmp_path)), CommitLog(FileStorage(tmp_path))
    old.append_open(1, dict)
    new.append_open(2, dict)
    with pytest.raises(SupersededError, match="attempt 1 is superseded: attempt 2"):
        old.append_commit(1, 10, COMMIT)
    with pytest.raises(ServiceError, match="never opened"):
        new.append_commit(3, 10, COMMIT)
