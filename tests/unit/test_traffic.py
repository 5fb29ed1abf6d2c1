"""Traffic between the nodes of a job: what is said of a standstill, a decline, a fluctuation."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.harness.desk import POLICY, Desk

from megascale.v1 import link_pb2
from megascale_driver.analysis.traffic import (
    Bytes,
    Change,
    Look,
    Standstill,
    TrafficRule,
    TrafficTrack,
    counted,
)
from megascale_driver.core.queue.explain import explain
from megascale_driver.core.values.events import Event, PolicyRequested, TrafficChanged, TrafficStood
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.reasons import severity_of
from megascale_driver.presence import reports
from megascale_driver.presence.intake import Seat
from megascale_driver.shell import decisions, traffic_watch
from megascale_driver.shell.traffic_watch import STALE_INTERVALS, TrafficWatch
from megascale_executor.agent.link.heartbeat import host_counters
from megascale_executor.counters.sampler import read_all, sources

NODES = ("n1", "n2", "n3")
BEAT_S, STEP_S = 5.0, 2.0
RATE = 400e6  # bytes/s of a node
RULE = TrafficRule()


class Wire:
    """Heartbeats of three nodes whose ports move bytes with the steps of a job."""

    def __init__(self, source: str = "rdma", nodes: tuple[str, ...] = NODES) -> None:
        self.now_s, self.step = 1000.0, 0.0
        self.source, self.bytes = source, dict.fromkeys(nodes, 1e12)
        self.rate = dict.fromkeys(nodes, RATE)
        self.last_step_s = self.now_s
        self.training = self.waiting = True
        self.track = TrafficTrack(nodes)
        self.changes: list[Change] = []
        self.step_times: tuple[float, ...] = (STEP_S,) * 8

    def run(
        self, seconds: float, steps: bool = True, share: Callable[[int], float] = lambda _: 1.0
    ) -> Standstill | None:
        """Heartbeats for so long; ``share`` of the rate by number of the heartbeat."""
        found = None
        for beat in range(int(seconds / BEAT_S)):
            self.now_s += BEAT_S
            for name in self.bytes:
                self.bytes[name] += self.rate[name] * BEAT_S * share(beat)
            if steps:
                self.step += BEAT_S / STEP_S
                self.last_step_s = self.now_s
            self.changes += self.track.look(self.look())
            found = found or self.track.standstill(self.last_step_s)
        return found

    def look(self, **changes: Any) -> Look:
        nodes = {name: self.of(value) for name, value in self.bytes.items()}
        found = Look(self.now_s, nodes, self.training, self.waiting, int(self.step),
                     self.step_times)  # fmt: skip
        return replace(found, **changes)

    def of(self, value: float) -> Bytes:
        names = (f"{self.source}_received_bytes_total", f"{self.source}_sent_bytes_total")
        return counted(self.now_s, [(name, value / 2) for name in names])


def learned(source: str = "rdma") -> Wire:
    wire = Wire(source)
    assert wire.run(400.0) is None and not wire.changes
    assert wire.track.source == source and wire.track.unseen == ""
    return wire


@pytest.mark.parametrize("source", ["rdma", "network"])
def test_no_byte_and_no_step_while_ranks_wait_is_a_standstill(source: str) -> None:
    wire = learned(source)
    stopped_s = wire.now_s
    found = wire.run(60.0, steps=False, share=lambda _: 0.0)
    assert found is not None and (found.source, found.limit_s) == (source, RULE.still_floor_s)
    assert RULE.still_floor_s <= found.still_s <= RULE.still_floor_s + BEAT_S
    assert wire.last_step_s == stopped_s
    assert "1.2 GB/s" in found.sentence and "stands still for 30 s" in found.sentence
    assert not wire.changes, "a standstill is no decline"


def test_what_an_idle_port_carries_is_no_traffic_of_the_job() -> None:
    """Heartbeats, logs and ssh go on through an Ethernet port while the job stands still."""
    wire = learned("network")
    assert wire.run(60.0, steps=False, share=lambda _: 0.9 * RULE.quiet_share) is not None
    wire = learned("network")
    assert wire.run(60.0, steps=False, share=lambda _: 0.05) is None, "it still moves"


@pytest.mark.parametrize("what", ["evaluation, snapshot or restore", "nobody waits", "stale"])
def test_quiet_phases_are_no_standstill(what: str) -> None:
    wire = learned()
    if what == "nobody waits":  # all ranks compute, or wait for data
        wire.waiting = False
    elif what == "stale":
        wire.step_times = (STEP_S, STEP_S)  # the pace is not known
    else:
        wire.training = False
    assert wire.run(600.0, steps=False, share=lambda _: 0.0) is None
    assert not wire.changes


def test_the_clock_starts_anew_behind_an_evaluation() -> None:
    wire = learned()
    wire.training = False
    wire.run(300.0, steps=False, share=lambda _: 0.0)
    wire.training = True
    assert wire.run(25.0, steps=False, share=lambda _: 0.0) is None
    assert wire.run(20.0, steps=False, share=lambda _: 0.0) is not None


def test_long_steps_that_communicate_at_their_end_are_no_standstill() -> None:
    wire = Wire()
    wire.step_times = (60.0,) * 8
    bursts: Callable[[int], float] = lambda beat: 12.0 if beat % 12 == 11 else 0.0  # noqa: E731
    for _ in range(60):
        assert wire.run(60.0, steps=False, share=bursts) is None
        wire.step += 1
        wire.last_step_s = wire.now_s
    assert wire.track.source == "rdma" and not wire.changes
    assert wire.run(170.0, steps=False, share=lambda _: 0.0) is None
    assert wire.run(30.0, steps=False, share=lambda _: 0.0) is not None, "three steps' time"


def test_one_node_that_still_sends_makes_no_standstill_of_the_job() -> None:
    wire = learned()
    for name in NODES[1:]:
        wire.rate[name] = 0.0
    assert wire.run(60.0, steps=False) is None


def test_a_node_without_a_heartbeat_or_with_a_counter_that_fell_proves_nothing() -> None:
    wire = learned()
    wire.run(20.0, steps=False, share=lambda _: 0.0)
    wire.now_s += BEAT_S
    nodes = dict(wire.look().nodes)
    wire.track.look(wire.look(nodes={**nodes, "n2": None}))
    assert wire.run(25.0, steps=False, share=lambda _: 0.0) is None
    wire.bytes["n3"] = 0.0  # its driver was loaded anew
    assert wire.run(25.0, steps=False, share=lambda _: 0.0) is None
    assert wire.run(20.0, steps=False, share=lambda _: 0.0) is not None


def test_before_a_job_was_seen_to_communicate_nothing_is_said() -> None:
    wire = Wire()
    wire.run(100.0)
    assert wire.track.source is None
    assert wire.run(600.0, steps=False, share=lambda _: 0.0) is None and not wire.changes


def test_hosts_without_counters_and_jobs_over_the_loopback_are_not_seen() -> None:
    wire = Wire()
    wire.rate = dict.fromkeys(NODES, 20e3)  # heartbeats alone
    assert wire.run(600.0) is None and wire.track.source is None
    assert "exchange less than 1.05 MB/s" in wire.track.unseen
    assert wire.run(600.0, steps=False, share=lambda _: 0.0) is None and not wire.changes
    wire = Wire()
    wire.now_s += BEAT_S
    wire.track.look(wire.look(nodes={name: counted(wire.now_s, []) for name in NODES}))
    assert wire.track.unseen == "node n1 shows no counters of ports"


def test_rdma_ports_that_the_job_does_not_use_leave_it_to_the_others() -> None:
    wire = Wire("network")
    for _ in range(80):
        wire.now_s += BEAT_S
        wire.step += BEAT_S / STEP_S
        for name in NODES:
            wire.bytes[name] += RATE * BEAT_S
        nodes = {
            name: counted(wire.now_s, [("rdma_sent_bytes_total", 7.0),
                                       ("network_sent_bytes_total", value)])
            for name, value in wire.bytes.items()
        }  # fmt: skip
        wire.track.look(wire.look(nodes=nodes))
    assert wire.track.source == "network"


def test_a_decline_is_reported_once_with_its_figures_and_again_after_it_was_over() -> None:
    wire = learned()
    wire.run(400.0, share=lambda _: 0.6)
    (change,) = wire.changes
    assert (change.kind, change.nodes) == ("decline", ())
    assert "of all its nodes has declined to 60%" in change.sentence
    assert "720 MB/s, usually 1.2 GB/s" in change.sentence and "a step of" in change.sentence
    wire.run(200.0)
    wire.run(200.0, share=lambda _: 0.6)
    assert [each.kind for each in wire.changes] == ["decline", "decline"]


def test_a_decline_of_one_node_names_it_and_a_short_one_is_none() -> None:
    wire = learned()
    wire.rate["n2"] = 0.5 * RATE
    wire.run(200.0)
    (change,) = wire.changes
    assert change.nodes == ("n2",) and "of node n2 has declined to 50%" in change.sentence
    wire = learned()
    wire.run(60.0, share=lambda _: 0.5)
    wire.run(300.0)
    assert not wire.changes


def test_a_fluctuation_is_reported_once_and_a_checkpoints_burst_is_none() -> None:
    def swings(beat: int) -> float:
        return 1.5 if beat // 12 % 2 else 0.8

    wire = learned()
    wire.run(900.0, share=swings)
    (change,) = wire.changes
    assert change.kind == "fluctuation" and "between" in change.sentence
    wire = learned("network")
    wire.run(1800.0, share=lambda beat: 4.0 if beat % 60 < 6 else 1.0)
    assert not wire.changes, "storage is written through the same ports now and then"


def test_noise_of_a_tenth_is_neither() -> None:
    wire = learned()
    wire.run(7200.0, share=lambda beat: 1 + 0.1 * math.sin(beat * 1.7))
    assert not wire.changes


# What follows in the core.


def running(*nodes: str) -> Desk:
    desk = Desk(*nodes)
    desk.submit()
    desk.run()
    return desk


def stood(desk: Desk, attempt: int = 0) -> TrafficStood:
    job = desk.job()
    return TrafficStood(
        desk.now_s, job.name, attempt or job.attempt, 30.0, "the rdma traffic stands still", ()
    )


def at_work(desk: Desk) -> None:
    """Heartbeats with status pages: rank 0 computes, all others wait for it."""
    from megascale_driver.analysis.progress import OperationCount, RankStatus
    from megascale_driver.core.values.cluster import AttemptPhase

    for slot in desk.job().slots:
        pages = tuple(
            RankStatus(rank, 4, "STEP", 40.0, (OperationCount("world", 4 + (rank > 0), 4),))
            for rank in slot.ranks
        )
        desk.report(slot.node, AttemptPhase.RUNNING, statuses=pages)


def lines(desk: Desk, reason: str) -> list[Any]:
    return [line for line in desk.audit if line.reason == reason]


def test_a_standstill_is_observed_with_one_line_unless_the_rule_is_enforced() -> None:
    desk = running("n1", "n2")
    desk.wait(40.0)
    at_work(desk)
    for _ in range(3):
        desk.feed(stood(desk))
    (line,) = lines(desk, "TRAFFIC_STOPPED")
    assert (line.mode, line.policy) == ("OBSERVE", "traffic")
    assert line.message.startswith("the rdma traffic stands still: rank 0 on node n1")
    assert desk.job().phase is JobPhase.RUNNING


def test_an_enforced_standstill_takes_the_way_of_a_hang() -> None:
    desk = running("n1", "n2")
    desk.feed(PolicyRequested(desk.now_s, "traffic", "ENFORCE", "a test", "me"))
    desk.feed(stood(desk, attempt=7))
    desk.feed(stood(desk))
    assert not lines(desk, "TRAFFIC_STOPPED"), "another attempt, or a step within the limit"
    desk.wait(40.0)
    at_work(desk)
    desk.feed(stood(desk))
    (line,) = lines(desk, "TRAFFIC_STOPPED")
    assert line.mode == "ENFORCE" and "check themselves" in line.outcome
    (fault,) = desk.job().current.faults
    assert (fault.kind, fault.node, fault.hard) == ("HANG", "n1", False)
    assert desk.job().phase is JobPhase.STOPPING and desk.job().evicted == ()
    assert explain(desk.state, "a", desk.now_s, POLICY).count("traffic")


def test_a_decline_alerts_and_ends_nothing() -> None:
    desk = running("n1", "n2")
    job = desk.job()
    for kind in ("decline", "fluctuation"):
        desk.feed(TrafficChanged(desk.now_s, "a", job.attempt, kind, "rdma", "it is less", ("n2",)))
        desk.feed(TrafficChanged(desk.now_s, "a", 9, kind, "rdma", "of another attempt"))
    for reason in ("TRAFFIC_DECLINED", "TRAFFIC_FLUCTUATES"):
        (line,) = lines(desk, reason)
        assert (line.mode, line.message) == ("OBSERVE", "it is less")
        assert [one.source for one in line.evidence] == ["nodes/n2"]
        assert severity_of(reason) == "warning"
    assert severity_of("TRAFFIC_STOPPED") == "warning"
    assert desk.job().phase is JobPhase.RUNNING
    for _ in range(40):
        desk.feed(TrafficChanged(desk.now_s, "a", job.attempt, "decline", "rdma", "again"))
    assert len(lines(desk, "TRAFFIC_DECLINED")) < 20


# From a synthetic tree of counters through heartbeats to the event.


def beats(root: Path, desk: Desk, phase: str, sent: int) -> Iterator[Seat]:
    """Heartbeats as agents build them of a host with an RDMA port; rank 0 is not inside."""
    port = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True, exist_ok=True)
    for name in ("port_rcv_data", "port_xmit_data"):
        (port / name).write_text(f"{sent // 8}\n")
    job = desk.job()
    for slot in job.slots:
        beat = link_pb2.Heartbeat(
            job=job.name, attempt=job.attempt, phase=link_pb2.ATTEMPT_PHASE_RUNNING,
            host=host_counters(counters=read_all(sources(root))),
        )  # fmt: skip
        for rank in slot.ranks:
            page = beat.workers.add(rank=rank, step=int(desk.now_s), phase=phase)
            page.operations.add(group="world", entered=5, completed=4 if rank else 5)
        seat = Seat(slot.node, desk.state.nodes[slot.node].identity.incarnation, desk.now_s)
        seat.raw = link_pb2.ConnectRequest(heartbeat=beat).SerializeToString()
        yield seat


async def test_counters_of_a_synthetic_host_lead_from_heartbeats_to_the_event(
    tmp_path: Path,
) -> None:
    desk, seats, posted = running("n1", "n2"), dict[str, Seat](), list[Event]()
    watch = TrafficWatch(lambda: desk.state, seats.get, lambda: desk.now_s, posted.append, POLICY)

    sent = 0

    async def run(seconds: float, rate: float, phase: str = "STEP") -> None:
        nonlocal sent
        for _ in range(int(seconds / BEAT_S)):
            desk.now_s += BEAT_S
            sent += int(rate * BEAT_S)
            seats.update({seat.node: seat for seat in beats(tmp_path, desk, phase, sent)})
            await watch.look()

    times = desk.job().step_times
    assert not times
    job = replace(desk.job(), step_times=(1.0,) * 8)
    desk.state = replace(desk.state, jobs={"a": job})
    await run(300.0, RATE)
    await run(120.0, 0.0, "EVAL")
    assert not posted
    await run(20.0, 0.0)
    assert not posted
    await run(30.0, 0.0)
    found = posted[0]
    assert isinstance(found, TrafficStood) and {page.node for page in found.pages} == {"n1", "n2"}
    posted.clear()
    desk.now_s += STALE_INTERVALS * POLICY.heartbeat_interval_s + 1
    await watch.look()
    assert not posted, "heartbeats that are old say nothing of now"


class Counting(TrafficTrack):
    """Notes the threads in which it looks."""

    threads: ClassVar[list[int]] = []

    def look(self, look: Look) -> tuple[Change, ...]:
        """Take in the newest heartbeats."""
        self.threads.append(threading.get_ident())
        return super().look(look)


async def test_a_look_at_a_job_that_trains_reads_no_status_page_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12,288 ranks they took a third of a second every interval, and a piece of it at once."""
    desk, read, pages = running("n1", "n2"), list[str](), reports.pages

    def pages_read(beat: link_pb2.Heartbeat) -> Any:
        read.append(beat.job)
        return pages(beat)

    monkeypatch.setattr(reports, "pages", pages_read)
    monkeypatch.setattr(traffic_watch, "TrafficTrack", Counting)
    monkeypatch.setattr(decisions, "LARGE_NODES", 2)
    monkeypatch.setattr(Counting, "threads", [])
    seats, posted = dict[str, Seat](), list[Event]()
    watch = TrafficWatch(lambda: desk.state, seats.get, lambda: desk.now_s, posted.append, POLICY)
    job = replace(desk.job(), step_times=(1.0,) * 8)
    desk.state = replace(desk.state, jobs={"a": job})
    for beat in range(80):
        desk.now_s += BEAT_S
        sent = int(RATE * BEAT_S * min(beat, 60))
        seats.update({seat.node: seat for seat in beats(tmp_path, desk, "STEP", sent)})
        await watch.look()
        assert bool(read) == bool(posted), "only of a standstill"
    assert isinstance(posted[0], TrafficStood) and len(posted[0].pages) == 2
    assert len(Counting.threads) == 80 and threading.get_ident() not in Counting.threads


async def test_a_large_job_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number of nodes: the driver reads so many a second, whatever the interval."""
    monkeypatch.setattr(traffic_watch, "NODES_PER_S", 2 / (2.5 * BEAT_S))
    desk, asked = running("n1", "n2"), list[float]()

    def seat_of(node: str) -> None:
        asked.append(desk.now_s)

    watch = TrafficWatch(lambda: desk.state, seat_of, lambda: desk.now_s, lambda _: None, POLICY)
    began_s = desk.now_s
    for _ in range(7):
        await watch.look()
        desk.now_s += BEAT_S
    assert [at_s - began_s for at_s in asked[::2]] == [0.0, 3 * BEAT_S, 6 * BEAT_S]


async def test_a_job_on_one_host_is_not_looked_at_and_one_without_counters_says_so() -> None:
    desk, posted = running("n1", "n2"), list[Event]()
    asked: list[str] = []

    def seat_of(node: str) -> Seat:
        asked.append(node)
        seat = Seat(node, "x", desk.now_s)
        beat = link_pb2.Heartbeat(job="a", attempt=1)
        seat.raw = link_pb2.ConnectRequest(heartbeat=beat).SerializeToString()
        return seat

    watch = TrafficWatch(lambda: desk.state, seat_of, lambda: desk.now_s, posted.append, POLICY)
    for _ in range(4):
        await watch.look()
        desk.now_s += BEAT_S
    (event,) = posted
    assert isinstance(event, TrafficChanged) and event.kind == "unseen" and len(asked) == 2
    desk.feed(event)
    text = explain(desk.state, "a", desk.now_s, POLICY)
    assert "its traffic is not watched: node n1 shows no counters of ports" in text
    nodes = {
        name: replace(node, identity=replace(node.identity, boot_id="one"))
        for name, node in desk.state.nodes.items()
    }
    desk.state, asked[:] = replace(desk.state, nodes=nodes), []
    desk.now_s += 100.0
    await watch.look()
    assert not asked
