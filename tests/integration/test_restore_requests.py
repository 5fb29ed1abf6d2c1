"""What ranks that restore together ask of a daemon: windows of a checkpoint, in a slot."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.harness.checkpoint_node import DaemonProcess, WorkerClient
from tests.integration.test_checkpoint_daemon import commit_steps, open_attempt

from megascale_job.sizes.read_plan import decode, hexadecimal


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


class Reader:
    """A worker of a fresh daemon that has opened the checkpoint of step 10."""

    def __init__(self, daemon: DaemonProcess, uri: str, plan: Any) -> None:
        self.worker = WorkerClient(daemon)
        self.worker.register(attempt=2, uri=uri, committer=daemon.address, slots=2)
        self.plan = {
            "source": "storage",
            "step": plan.step,
            "written_by_attempt": plan.written_by_attempt,
            "manifest_uri": plan.manifest_uri,
            "manifest_xxh3": plan.manifest_xxh3,
        }
        self.opened = self.worker.ask("restore_open", plan=self.plan)
        assert self.opened["kind"] == "stored_state", self.opened

    def units(self) -> list[list[int | str]]:
        """File, first byte, size and checksum of each stored piece."""
        answer = self.worker.ask("restore_index", file=0, first=0)
        assert answer["kind"] == "stored_index" and answer["following"] == -1
        runs = decode(base64.b64decode(answer["runs"]))
        return [[*unit[:3], hexadecimal(*unit[3:])] for unit in runs.units.tolist()]

    def read(self, *reads: list[int | str], at: int = 0) -> dict[str, Any]:
        return self.worker.ask("restore_read", at=at, reads=list(reads))


@pytest.fixture
async def reader(tmp_path: Path, stack: ExitStack) -> Reader:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    await commit_steps(daemon, stack.enter_context(WorkerClient(daemon)), uri, 10)
    fresh = stack.enter_context(DaemonProcess(tmp_path, "n1"))
    plan = (await open_attempt(fresh, uri, 2)).restore
    found = Reader(fresh, uri, plan)
    stack.enter_context(found.worker)
    found.daemon, found.uri = fresh, uri  # type: ignore[attr-defined]
    return found


async def test_a_piece_is_read_in_parts_and_verified_at_its_last(reader: Reader) -> None:
    assert reader.opened["files"] == 1
    assert reader.opened["small_state"] == {"position": 10, "random": 0}
    matrix, bias = reader.units()
    size = int(matrix[2])
    assert reader.read([*matrix, 0, 8, 0]) == {"kind": "did_read", "bytes_read": 8}
    assert reader.read([*matrix, 8, size, 8], [*bias, 0, int(bias[2]), size])["kind"] == "did_read"
    assert reader.worker.holds(reader.opened["slot"], 10)
    # The same parts, of a piece that is another one than the index has.
    wrong = [*matrix[:3], "0" * 32]
    assert reader.read([*wrong, 0, 8, 0])["kind"] == "did_read", "not complete yet"
    answer = reader.read([*wrong, 8, size, 8])
    assert (answer["kind"], answer["error_kind"]) == ("refused", "CHECKPOINT_CORRUPT")
    assert "matrix (master) fails its checksum" in answer["error"]
    answer = reader.read([*matrix, 8, size, 8])
    assert answer["error_kind"] == "BAD_JOB" and "is read after 0" in answer["error"]


async def test_a_connection_that_ends_gives_its_window_back(reader: Reader) -> None:
    slots = [0, 1]
    slots.remove(reader.opened["slot"])
    reader.worker.close()
    again = Reader(reader.daemon, reader.uri, Plan(reader.plan))  # type: ignore[attr-defined]
    assert again.worker.ask("release", slot=again.opened["slot"])["kind"] == "released"
    taken = [again.worker.ask("acquire", step=step)["kind"] for step in (11, 12, 13)]
    assert taken == ["acquired", "acquired", "busy"]
    again.worker.close()


class Plan:
    """A plan's values as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("restore_read", {"at": 1 << 20, "reads": "whole"}, "outside its"),
        ("restore_read", {"at": 0, "reads": [[0, 0, 4, "", 2, 1, 0]]}, "is not a part of a piece"),
        ("restore_read", {"at": 0, "reads": [[0, 0, 4, "", 0, "4", 0]]}, "is not a part"),
        ("restore_read", {"at": 0, "reads": [[7, 0, 4, "", 0, 4, 0]]}, "names a file"),
        ("restore_index", {"file": 1, "first": 0}, "there is 1 file"),
        ("restore_open", {"plan": "same"}, "is open already"),
        ("restore_memory", {"plan": {"source": "none"}}, "restore plan"),
        ("restore_verify", {}, "nothing is being verified"),
    ],
)
async def test_a_bad_request_is_refused(
    reader: Reader, kind: str, fields: dict[str, Any], words: str
) -> None:
    if fields.get("reads") == "whole":
        unit = reader.units()[0]
        fields = {**fields, "reads": [[*unit, 0, unit[2], 0]]}
    if fields.get("plan") == "same":
        fields = {"plan": reader.plan}
    answer = reader.worker.ask(kind, **fields)
    assert answer["kind"] == "error" and words in answer["error"], answer


@pytest.mark.parametrize("damaged", [False, True])
def test_a_state_is_lent_before_its_checksums_are_compared(tmp_path: Path, damaged: bool) -> None:
    """A worker may copy it meanwhile; a damaged slot is free again and not the worker's."""
    plan = {"source": "memory", "step": 1, "written_by_attempt": 1, "manifest_uri": ""}
    with DaemonProcess(tmp_path, "n0") as daemon, WorkerClient(daemon) as worker:
        worker.register(slots=2)
        assert worker.write(1)["kind"] == "sealed"
        if damaged:
            assert worker.ask("restore_memory", plan=plan)["slot"] == 0
            worker.ask("release", slot=0)
            worker.slots[0][3] += 1
        found = worker.ask("restore_memory", plan=plan, verified_later=True)
        assert (found["slot"], found["problem"]) == (0, "")
        verdict = worker.ask("restore_verify")
        assert ("changed after it was sealed" in verdict["problem"]) is damaged, verdict
        assert bool(verdict["file"]) is damaged
        if damaged:
            assert worker.ask("restore_memory", plan=plan)["slot"] == -1
            taken = [worker.ask("acquire", step=step)["kind"] for step in (2, 3)]
            assert taken == ["acquired", "acquired"], "nothing holds the damaged slot"
        else:
            assert worker.ask("release", slot=0) == {"kind": "released"}
