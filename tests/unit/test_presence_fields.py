"""evidence.FIELDS is what evidence.of reads.

With a field more, heartbeats would differ for nothing; with one less, a change would be overlooked.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from megascale.v1 import link_pb2
from megascale_driver.presence import evidence


class Watched:
    """A message that notes which of its fields are read."""

    def __init__(self, message: Any, path: str, read: set[str]) -> None:
        self._message, self._path, self._read = message, path, read

    def HasField(self, name: str) -> bool:
        self._read.add(f"{self._path}{name}")
        return bool(self._message.HasField(name))

    def SerializeToString(self) -> bytes:
        return bytes(self._message.SerializeToString())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._message, name)
        self._read.add(f"{self._path}{name}")
        if isinstance(value, Message):
            return Watched(value, f"{self._path}{name}.", self._read)
        if self._message.DESCRIPTOR.fields_by_name[name].is_repeated:
            return [Watched(item, f"{self._path}{name}.", self._read) for item in value]
        return value


def beat(phase: int) -> link_pb2.Heartbeat:
    """A heartbeat with one of everything."""
    made = link_pb2.Heartbeat(phase=phase)  # type: ignore[arg-type]
    made.workers.add(state=link_pb2.WORKER_STATE_EXITED)
    made.logs.add()
    made.checks.add()
    made.traces.add()
    for name in ("stopped", "leave_failure", "checkpoint_daemon"):
        getattr(made, name).SetInParent()
    progress = made.checkpoints.add(committed_step=1, skipped_step=1)
    progress.sealed.add()
    progress.replicas.add()
    progress.damaged.add()
    progress.failure.SetInParent()
    progress.replica_failure.SetInParent()
    return made


def read() -> set[str]:
    found: set[str] = set()
    for phase in link_pb2.AttemptPhase.values():
        evidence.of(Watched(beat(phase), "", found))  # type: ignore[arg-type]
    return found


def test_the_fields_are_those_that_are_read() -> None:
    # Above a path that is listed its own list is read, below one that is compared whole its parts.
    above = {path.partition(".")[0] for path in evidence.FIELDS if "." in path}
    whole = {path for path in evidence.FIELDS if "." not in path}
    paths = {
        path for path in read() - above if path.partition(".")[0] not in whole or path in whole
    }
    assert paths == set(evidence.FIELDS)


def test_what_lies_in_memory_is_among_them() -> None:
    assert {f"checkpoints.{name}" for name in evidence.MEMORY_FIELDS} <= set(evidence.FIELDS)
