"""Profiles at the agent: handed to the workers once, and what they answer put into heartbeats."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node import framing
from megascale_common.node.messages import Accepted, Profiled
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.workers.orders import MAX_DETAIL_CHARS, Profiles, part_of
from megascale_executor.agent.workers.workers import Worker

KEY = AttemptKey("demo", 3)


class Desk:
    """Ranks 4 and 5 of a node, with the workers' ends of their sockets."""

    def __init__(self, folder: Path) -> None:
        self.reported = 0
        self.ends: dict[int, socket.socket] = {}
        self.workers: list[Worker] = []
        for rank in (4, 5):
            channel, self.ends[rank] = MessageChannel.pair()
            self.ends[rank].setblocking(False)
            self.workers.append(Worker(rank, channel, folder / "log", folder / "page"))
        self.profiles = Profiles(folder, self._note)

    def _note(self) -> None:
        self.reported += 1

    def want(self, profile: str, *ranks: int) -> None:
        command = link_pb2.ProfileCommand(id=profile, first_step=7, last_step=8, ranks=ranks)
        command.not_after.FromSeconds(1000)
        self.profiles.want(KEY, command, self.workers)

    def received(self, rank: int) -> framing.Message | None:
        try:
            received = framing.receive(self.ends[rank])
        except BlockingIOError:
            return None
        return received[0] if received is not None else None

    def answer(self, rank: int, profile: str, state: str, detail: str = "") -> None:
        message = {"kind": "profiled", "id": profile, "state": state, "size_bytes": 9}
        read = Accepted("the agent", Profiled).read({**message, "detail": detail})
        self.profiles.take(rank, read)

    def reports(self) -> list[tuple[str, int, str]]:
        return [
            (r.profile, r.rank, types_pb2.TraceState.Name(r.state)) for r in self.profiles.reports
        ]


def test_a_command_goes_once_to_the_workers_of_its_ranks_and_their_answers_are_kept(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    for _ in range(3):  # the desired state comes again and again
        desk.want("p1", 5, 9)
    assert desk.received(4) is None
    path = tmp_path / "jobs/demo/attempt-000003/trace-steps-7-8-rank-00005.json.gz"
    assert desk.received(5) == {
        "kind": "profile",
        "id": "p1",
        "first_step": 7,
        "last_step": 8,
        "path": str(path),
        "not_after_s": 1000.0,
    }
    assert desk.received(5) is None
    desk.answer(5, "p1", "written")
    desk.answer(5, "older", "written")
    assert (desk.reports(), desk.reported) == ([("p1", 5, "TRACE_STATE_WRITTEN")], 1)
    desk.want("p2", 4, 5)
    assert desk.reports() == []
    desk.answer(4, "p2", "failed", "x" * 1000)
    assert desk.reports() == [("p2", 4, "TRACE_STATE_FAILED")]
    assert len(desk.profiles.reports[0].detail) == MAX_DETAIL_CHARS
    with pytest.raises(framing.FramingError, match=r"profiled\.state is 'nonsense'"):
        desk.answer(4, "p2", "nonsense")


def test_a_worker_that_is_gone_has_failed_and_an_ended_attempt_leaves_no_half_file(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    desk.ends[5].close()
    desk.want("p1", 5)
    assert (
        desk.reports() == [("p1", 5, "TRACE_STATE_FAILED")]
        and "the peer is gone" in desk.profiles.reports[0].detail
    )
    (tmp_path / ".trace-steps-7-8-rank-00005.json.gz.raw").touch()
    (tmp_path / "trace-steps-1-2-rank-00005.json.gz").touch()
    desk.profiles.forget(tmp_path)
    assert desk.reports() == []
    assert [path.name for path in tmp_path.iterdir()] == ["trace-steps-1-2-rank-00005.json.gz"]


def test_workers_that_have_not_reported_are_ordered_not_to_begin(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.want("p1", 4, 5)
    assert desk.received(4) is not None and desk.received(5) is not None
    desk.answer(4, "p1", "written")
    for _ in range(2):  # the desired state without a profile comes again and again
        desk.profiles.unwant(desk.workers)
    assert desk.received(4) is None
    assert desk.received(5) == {"kind": "cancel_profile", "id": "p1"}
    assert desk.received(5) is None
    desk.answer(5, "p1", "skipped")
    assert desk.reports() == [("p1", 4, "TRACE_STATE_WRITTEN")]
    desk.want("p2", 5)
    assert desk.received(5) is not None


def test_only_the_present_attempts_profile_counts() -> None:
    desired = link_pb2.DesiredState(assignment=link_pb2.AttemptAssignment(job="demo", attempt=3))
    assert part_of(desired, KEY) is None
    desired.profile.id = "p1"
    found = part_of(desired, KEY)
    assert found is not None and found.id == "p1"
    assert part_of(desired, AttemptKey("demo", 2)) is None
