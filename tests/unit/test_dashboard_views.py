"""What the dashboard's pages say, from the driver's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from tests.harness.recorded_fleet import (
    DP,
    HOT,
    HOT_RATIO,
    HOT_SHARE,
    JOB,
    LOST,
    PP,
    SILENT,
    SLOW,
    SLOW_RATIO,
    STEP,
    STEPS,
    TP,
    RecordedCluster,
)

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import InvalidRequest, Job, Node, NotPossible
from megascale_client.messages import WatchJobResponse
from megascale_dashboard import (
    cluster_reader,
    grid_view,
    incident_view,
    job_view,
    node_view,
    timeline_view,
)
from megascale_dashboard.cluster_reader import ClusterReader
from megascale_dashboard.incident_view import ClusterState
from megascale_dashboard.page_values import Page
from megascale_dashboard.timeline_view import Wanted
from megascale_job.layout import RankLayout

ALIVE = types_pb2.NODE_LIVENESS_ALIVE


def node(**fields: object) -> Node:
    return Node(driver_pb2.Node(**{"name": "n1", "liveness": ALIVE, **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "idle"),
        ({"assignment": types_pb2.NODE_ASSIGNMENT_ACTIVE}, "active"),
        (
            {
                "assignment": types_pb2.NODE_ASSIGNMENT_ACTIVE,
                "disposition": types_pb2.NODE_DISPOSITION_CORDONED,
            },
            "cordoned",
        ),
        (
            {
                "disposition": types_pb2.NODE_DISPOSITION_QUARANTINED,
                "liveness": types_pb2.NODE_LIVENESS_DEAD,
            },
            "dead",
        ),
        ({"liveness": 99}, "idle"),  # of a later build of the driver
    ],
)
def test_the_worst_axis_names_a_nodes_state(fields: dict[str, object], state: str) -> None:
    assert node_view.state(node(**fields)) == state


def test_a_node_that_is_not_as_usual_says_why() -> None:
    slow = node()
    slow.proto.checks.add(name="disk", target="host", verdict=types_pb2.CHECK_VERDICT_SKIPPED)
    assert (node_view.health(slow), node_view.fleet([slow])["unhealthy"]) == ("", [])
    slow.proto.checks.add(
        name="gpu-gemm", target="cuda:3", verdict=types_pb2.CHECK_VERDICT_DEGRADED, detail="slow"
    )
    listed = node_view.fleet([slow, node(name="n2")])
    assert [each["why"] for each in listed["unhealthy"]] == ["gpu-gemm cuda:3: slow"]


def test_a_node_that_is_gone_says_why_and_has_no_sound_checks() -> None:
    why = "its link broke and its port refuses connections"
    gone = node(liveness=types_pb2.NODE_LIVENESS_DEAD, liveness_reason=why)
    gone.proto.checks.add(name="disk", verdict=types_pb2.CHECK_VERDICT_PASS)
    (listed,) = node_view.fleet([gone])["unhealthy"]
    assert (listed["why"], listed["health"]) == (why, "")
    page = incident_view.now(ClusterState(driver_pb2.GetClusterInfoResponse(), [gone]), 0.0)
    assert page["incidents"][0]["title"] == f"Node n1 is dead: {why}"


async def test_the_fleet_stands_by_switch_in_the_order_of_numbers() -> None:
    page = await ClusterReader(RecordedCluster("node lost")).fleet()
    assert (page["nodes"], page["devices"]) == (1536, 12288)
    assert [each["name"] for each in page["switches"]] == [f"s{index}" for index in range(24)]
    first = page["switches"][0]["nodes"]
    assert [each["name"] for each in first] == [f"n{index}" for index in range(64)]
    assert page["states"]["dead"] == 1 and page["unhealthy"][0]["name"] == f"n{LOST}"


@pytest.mark.parametrize("rank", [0, 3336, TP * DP * PP - 1])
async def test_a_ranks_lines_are_its_groups(rank: int) -> None:
    page = await ClusterReader(RecordedCluster()).grid(JOB)
    layout = RankLayout(tp=TP, dp=DP, pp=PP)
    at = layout.coordinates(rank)
    for axis in ("tp", "dp", "pp"):
        stride = page["strides"][axis]
        first = rank - getattr(at, axis) * stride
        line = [first + position * stride for position in range(page["axes"][axis])]
        assert line == list(layout.members(rank, axis))


async def test_ranks_of_a_dead_node_are_lost_and_the_others_wait() -> None:
    page = await ClusterReader(RecordedCluster("switch lost")).grid(JOB)
    assert page["world"] == TP * DP * PP
    assert {page["state"][rank] for rank in range(384 * 8, 448 * 8)} == {"lost"}
    assert page["state"].count("waiting") == page["world"] - 64 * 8
    assert page["names"][page["node"][384 * 8]] == "n384"
    running = await ClusterReader(RecordedCluster("node lost")).grid(JOB)
    assert set(running["state"]) == {"training"}  # the spare has the ranks of the dead node
    assert running["names"][running["node"][LOST * 8]] == "n1520"


async def test_a_job_page_has_curves_attempts_and_the_time_to_the_end() -> None:
    source = RecordedCluster("node lost")
    reader = ClusterReader(source)
    page = await reader.job(JOB)
    await reader.close()
    curves = page["curves"]
    assert len(curves["step"]) <= job_view.CURVE_POINTS and curves["step"][-1] == STEP
    assert {len(column) for column in curves.values()} == {len(curves["step"])}
    assert page["remaining_s"] == pytest.approx((STEPS - STEP) * 6.31, rel=0.02)
    assert [each["attempt"] for each in page["attempts"]] == [1, 2, 3, 4, 5]
    assert [each["ended_s"] is None for each in page["attempts"]] == [False] * 4 + [True]
    assert "its node is dead" in page["attempts"][3]["ending"]
    assert page["attempts"][4]["running_s"] - page["attempts"][4]["opened_s"] == pytest.approx(46)


def test_a_job_that_does_not_run_has_no_time_to_the_end() -> None:
    job = Job(driver_pb2.Job(phase=types_pb2.JOB_PHASE_QUEUED))
    assert job_view.remaining_s(job) is None
    assert job_view.curves([])["step"] == []


def test_a_loss_that_is_no_number_is_null_in_json() -> None:
    record = types_pb2.StepRecord(attempt=1, step=3, loss=float("nan"))
    job = Job(driver_pb2.Job(last_record=record, step=3))
    row, curves = job_view.figures(job), job_view.curves([record])
    assert (row["loss"], curves["loss"]) == (None, [None])
    assert json.dumps([row, curves], allow_nan=False)


async def read_now(situation: str) -> Page:
    return await ClusterReader(RecordedCluster(situation)).now()  # type: ignore[arg-type]


async def test_a_lost_node_is_watched_and_the_job_has_recovered() -> None:
    page = await read_now("node lost")
    by_title = {each["title"]: each for each in page["incidents"]}
    dead = by_title[f"Node n{LOST} is dead"]
    assert dead["urgency"] == "watch" and dead["since_s"]
    assert any("spare n1520 takes over" in text for text in dead["doing"])
    recovered = next(each for title, each in by_title.items() if "has recovered" in title)
    assert recovered["urgency"] == "handled" and len(recovered["doing"]) == 4
    # The most urgent stands first, whatever is newer.
    assert page["incidents"][0]["title"].startswith("Node n1535 is quarantined")
    assert page["sentence"] == "1 problem needs attention."


async def test_a_switch_that_dies_is_one_incident_and_the_job_says_what_to_do() -> None:
    page = await read_now("switch lost")
    dead = [each for each in page["incidents"] if "are dead" in each["title"]]
    assert len(dead) == 1 and dead[0]["title"].startswith("64 nodes of switch s6 are dead: n384")
    waits = next(each for each in page["incidents"] if "waits for nodes" in each["title"])
    assert waits["may_do"][0]["command"] == "megascale nodes"
    assert waits["urgency"] == "act"  # it waits for somebody
    assert "64 nodes of switch s6 are dead" in dead[0]["doing"][0]


def test_a_quiet_cluster_and_an_empty_one_say_so() -> None:
    info = driver_pb2.GetClusterInfoResponse()
    empty = incident_view.now(ClusterState(info), 0.0)
    assert empty["sentence"] == "No node has joined the cluster yet."
    quiet = incident_view.now(ClusterState(info, [node()]), 0.0)
    assert (quiet["sentence"], quiet["incidents"]) == ("All is well: no jobs run, on 1 node.", [])


async def test_a_driver_without_a_term_is_the_first_line() -> None:
    source = RecordedCluster("node lost")
    quorum = "this driver does not lead: etcd has no leader; what it shows is 38 s old"
    source.notes = [quorum]
    page = await ClusterReader(source).now()
    assert page["sentence"] == "This" + quorum.removeprefix("this")
    first = page["incidents"][0]
    assert (first["urgency"], first["title"]) == ("act", page["sentence"])
    assert first["may_do"][0]["command"].startswith("etcdctl endpoint status --cluster")
    led = await ClusterReader(RecordedCluster("node lost")).now()
    assert page["counts"]["act"] == led["counts"]["act"] + 1
    assert "does not lead" not in str(led)


def test_the_breaker_and_failing_checkpoints_need_a_person() -> None:
    info = driver_pb2.GetClusterInfoResponse()
    info.breaker_tripped_at.FromSeconds(1000)
    job = driver_pb2.Job(phase=types_pb2.JOB_PHASE_RUNNING)
    job.spec.name = "a"
    condition = job.conditions.add(
        type=types_pb2.JOB_CONDITION_TYPE_CHECKPOINT_FAILING, message="the disk is full"
    )
    condition.since.FromSeconds(2000)
    page = incident_view.now(ClusterState(info, [], [Job(job)]), 3000.0)
    assert [each["urgency"] for each in page["incidents"]] == ["act", "act"]
    assert page["incidents"][0]["title"] == "Job a: the disk is full"  # the newer first
    assert page["sentence"] == "2 problems need attention."


NOW_S = 10_000.0


def line(
    ago_s: float, reason: str, message: str, attempt: int = 1, subject: str = "jobs/a"
) -> types_pb2.Event:
    found = types_pb2.Event(
        reason=reason, message=message, attempt=attempt, subject=subject, actor="driver"
    )
    found.time.FromNanoseconds(int((NOW_S - ago_s) * 1e9))
    return found


def running_job(restarts: int = 1, step: int = 20, steps: int = 100) -> Job:
    job = driver_pb2.Job(phase=types_pb2.JOB_PHASE_RUNNING, restarts=restarts, step=step)
    job.spec.name, job.spec.trainer.training.steps = "a", steps
    return Job(job)


def now_of(
    job: Job,
    explanation: driver_pb2.ExplainJobResponse,
    log: list[types_pb2.Event] | None = None,
    nodes: list[Node] | None = None,
) -> Page:
    info = driver_pb2.GetClusterInfoResponse()
    lines = log or []
    told = {"a": explanation}
    state = ClusterState(info, nodes or [node()], [job], lines, told, {"a": lines})
    return incident_view.now(state, NOW_S)


# Three faults of one job: a killed worker, a lost node, a hang; and an order, which is none.
THREE_FAULTS = [
    line(3500, "WORKER_EXITED", "rank 5 on node n2 was killed by SIGKILL", 1, "nodes/n2"),
    line(3499, "ATTEMPT_STOPPED", "attempt 1 has stopped: rank 5 on node n2 was killed by SIGKILL"),
    line(3498, "ATTEMPT_STARTED", "all 8 workers of attempt 2 run", 2),
    line(1800, "NODE_DEAD", "node n2 is dead: its link broke", 2, "nodes/n2"),
    line(1800, "NODE_EVICTED", "node n2 is dead", 2, "nodes/n2"),
    line(1799, "ATTEMPT_STOPPED", "attempt 2 has stopped: node n2 is dead", 2),
    line(1798, "SPARE_ASSIGNED", "spare n3 takes over", 3, "nodes/n3"),
    line(1797, "ATTEMPT_STARTED", "all 8 workers of attempt 3 run", 3),
    line(1000, "RESTART_REQUESTED", "ada asked to restart the job: new code", 3),
    line(999, "ATTEMPT_STOPPED", "attempt 3 has stopped: its state after step 9 is saved", 3),
    line(998, "ATTEMPT_STARTED", "all 8 workers of attempt 4 run", 4),
    line(600, "HANG_SUSPECTED", "no rank has advanced for 60 s: rank 2 on node n1", 4),
    line(590, "ATTEMPT_STOPPED", "attempt 4 has stopped: no rank has advanced for 60 s", 4),
    line(589, "ATTEMPT_STARTED", "all 8 workers of attempt 5 run", 5),
]


def test_a_job_that_fails_again_and_again_needs_a_person() -> None:
    told = driver_pb2.ExplainJobResponse(explanation="job a runs attempt 4")
    told.cause.message = "rank 0 cannot run the job: vocab_size: 4096 is too small"
    told.cause.time.FromNanoseconds(int((NOW_S - 30) * 1e9))
    told.suggestions.add(text="read the log", command="megascale logs a --rank 0")
    told.setback.failures, told.setback.step = 3, 23
    told.setback.sentence = "3 attempts in a row came no further than step 23; the newest failed"
    page = now_of(running_job(restarts=3), told)
    assert page["sentence"] == "1 problem needs attention." and page["counts"]["handled"] == 0
    (loop,) = page["incidents"]
    assert loop["urgency"] == "act"
    assert loop["title"] == f"Job a fails again and again: {told.setback.sentence}"
    assert loop["may_do"][0]["command"] == "megascale logs a --rank 0"


def test_a_job_has_not_recovered_before_it_comes_further() -> None:
    told = driver_pb2.ExplainJobResponse()
    told.setback.failures, told.setback.step = 1, 23
    told.setback.sentence = "it has not come past step 23 again since an attempt failed"
    told.setback.reason = "no rank has advanced for 60 s"
    page = now_of(running_job(), told, THREE_FAULTS)
    assert not page["sentence"].startswith("All is well")
    (behind, *handled) = page["incidents"]
    assert behind["urgency"] == "watch" and "has not recovered yet" in behind["title"]
    assert "no rank has advanced for 60 s" in behind["title"]
    # The newest fault is not behind the job; the two before it are.
    assert [each["urgency"] for each in handled] == ["handled"] * 2
    assert page["counts"] == {"act": 0, "watch": 1, "handled": 2}
    told.setback.failures = 2
    assert now_of(running_job(), told, THREE_FAULTS)["counts"]["handled"] == 1


def test_faults_are_counted_and_each_has_its_own_lines() -> None:
    page = now_of(running_job(restarts=3), driver_pb2.ExplainJobResponse(), THREE_FAULTS)
    assert page["counts"]["handled"] == 3 and page["sentence"].startswith("All is well")
    by_title = {each["title"]: each["doing"] for each in page["incidents"]}
    assert list(by_title) == [
        "Job a has recovered: no rank has advanced for 60 s: rank 2 on node n1",
        "Job a has recovered: node n2 is dead: its link broke",
        "Job a has recovered: rank 5 on node n2 was killed by SIGKILL",
    ]
    dead = by_title["Job a has recovered: node n2 is dead: its link broke"]
    assert dead == [
        "attempt 2 has stopped: node n2 is dead",
        "spare n3 takes over",
        "all 8 workers of attempt 3 run",
    ]
    state = ClusterState(
        driver_pb2.GetClusterInfoResponse(),
        [node()],
        [running_job()],
        THREE_FAULTS,
        {"a": driver_pb2.ExplainJobResponse()},
        {"a": THREE_FAULTS},
    )
    later = incident_view.now(state, NOW_S + 2000.0)
    assert later["counts"]["handled"] == 1


def test_the_card_of_a_dead_node_has_no_line_of_an_earlier_fault() -> None:
    dead = node(name="n2", liveness=types_pb2.NODE_LIVENESS_DEAD)
    dead.proto.last_heartbeat_at.FromNanoseconds(int((NOW_S - 1805) * 1e9))
    page = now_of(running_job(), driver_pb2.ExplainJobResponse(), THREE_FAULTS, [dead])
    card = next(each for each in page["incidents"] if each["title"].startswith("Node n2"))
    assert not any("SIGKILL" in text for text in card["doing"])
    assert "node n2 is dead: its link broke" in card["doing"]


def test_a_job_that_stands_still_is_watched_before_the_verdict() -> None:
    told = driver_pb2.ExplainJobResponse(still_s=27.2, held_up_by="rank 2 on n1 holds it up")
    told.suggestions.add(text="read the log of rank 2", command="megascale logs a --rank 2")
    page = now_of(running_job(restarts=0), told)
    assert page["sentence"] == "No action needed; 1 thing to watch."
    (still,) = page["incidents"]
    assert still["title"] == "Job a has completed no step for 27 s; rank 2 on n1 holds it up"
    assert (still["urgency"], still["page"]) == ("watch", "/jobs/a/ranks")
    assert still["since_s"] == pytest.approx(NOW_S - 27.2)


@pytest.mark.parametrize(
    ("step", "said"), [(79, "training continues"), (80, "it has no more steps to train")]
)
def test_a_failing_save_of_the_last_step_does_not_promise_training(step: int, said: str) -> None:
    job = running_job(step=step, steps=80)
    job.proto.conditions.add(
        type=types_pb2.JOB_CONDITION_TYPE_CHECKPOINT_FAILING, message="the disk is full"
    )
    (failing,) = now_of(job, driver_pb2.ExplainJobResponse())["incidents"]
    assert said in failing["doing"][0]


def test_failed_attempts_are_marked_in_the_ribbon() -> None:
    opened = [line(4000 - 1000 * n, "ATTEMPT_PREPARING", "prepares", n) for n in range(1, 6)]
    log = sorted([*THREE_FAULTS, *opened], key=lambda each: each.attempt)
    found = {each["attempt"]: each["failed"] for each in job_view.attempts(log)}
    assert found == {1: True, 2: True, 3: False, 4: True, 5: False}


def test_the_curve_leads_to_the_present_and_its_end_is_the_heading() -> None:
    def record(attempt: int, step: int, loss: float) -> types_pb2.StepRecord:
        return types_pb2.StepRecord(attempt=attempt, step=step, loss=loss)

    failed = [record(1, step, 10.0 + step) for step in range(1, 65)]
    again = [record(2, step, 5.0) for step in range(1, 13)]
    job = running_job(step=12)
    job.proto.last_record.CopyFrom(record(2, 12, 4.5))
    told = driver_pb2.ExplainJobResponse()
    page = job_view.one(job, [*failed, *again[:-1], record(2, 12, 4.5)], [], [], told)
    assert page["curves"]["step"] == list(range(1, 13))
    assert set(page["curves"]["attempt"]) == {2}
    assert page["curves"]["loss"][-1] == page["loss"] == 4.5
    # The stream is behind the job's state, or before it: the end is that of the heading.
    behind = job_view.one(job, [*failed, *again[:5]], [], [], told)
    assert behind["curves"]["loss"][-1] == 4.5
    ahead = job_view.one(job, [*failed, *again, record(2, 13, 4.0)], [], [], told)
    assert ahead["curves"]["step"][-1] == 12


def test_the_held_out_loss_has_a_figure_and_a_curve() -> None:
    records = [types_pb2.StepRecord(attempt=1, step=step, loss=5.0) for step in range(1, 4001)]
    for record in records[24::25]:
        record.evaluation_loss = 4.0 + 1 / record.step
    job = running_job(step=4000, steps=5000)
    job.proto.last_record.CopyFrom(records[-2])
    job.proto.last_evaluation.CopyFrom(records[3974])
    page = job_view.one(job, records, [], [], driver_pb2.ExplainJobResponse())
    assert (page["held_out_step"], page["held_out_loss"]) == (3975, 4.0 + 1 / 3975)
    curve = page["held_out_curve"]
    assert curve["step"] == list(range(25, 4000, 25)), "none is lost between points"
    assert curve["loss"][-1] == page["held_out_loss"]
    assert job_view.figures(running_job())["held_out_loss"] is None


async def test_the_records_of_a_job_that_was_restarted_are_followed_again() -> None:
    class Restarted(RecordedCluster):
        held = 10  # steps that the driver holds
        attempt = 1

        async def get(self, name: str) -> Job:
            job = self._job()
            job.attempt, job.step = self.attempt, self.held
            job.last_record.step, job.last_record.attempt = self.held, self.attempt
            return Job(job)

        async def watch(self, name: str) -> AsyncIterator[WatchJobResponse]:
            for step in range(1, self.held + 1):  # and then the stream ends, as the job has
                record = types_pb2.StepRecord(attempt=1, step=step)
                yield WatchJobResponse(driver_pb2.WatchJobResponse(step=record))

    source = Restarted(nodes=2)
    reader = ClusterReader(source)
    assert (await reader.job(JOB))["curves"]["step"][-1] == 10
    source.held, source.attempt = 25, 2
    reader._answers.clear()  # what is kept for a moment
    page = await reader.job(JOB)
    assert page["curves"]["step"] == list(range(1, 26))
    followed = reader._followed[JOB]
    await reader.job(JOB)
    assert reader._followed[JOB] is followed, "a job that has ended is followed once"
    await reader.close()


def test_a_node_name_within_another_is_not_that_node() -> None:
    dead = node(name="n1", liveness=types_pb2.NODE_LIVENESS_DEAD)
    lines = [
        types_pb2.Event(seq=1, subject="jobs/a", message="node n12 is dead"),
        types_pb2.Event(seq=2, subject="jobs/a", message="spare n3 takes over for n1."),
    ]
    page = incident_view.now(
        ClusterState(driver_pb2.GetClusterInfoResponse(), [dead], events=lines), 0.0
    )
    assert page["incidents"][0]["doing"] == [
        "spare n3 takes over for n1.",
        "gives it no work until it is back",
    ]


async def test_the_rank_that_holds_the_others_up_stands_out() -> None:
    page = await ClusterReader(RecordedCluster("hang")).grid(JOB)
    assert [rank for rank, state in enumerate(page["state"]) if state == "culprit"] == [SILENT]
    assert page["state"].count("waiting") == DP - 1 and page["state"][SILENT + TP] == "waiting"
    assert f"71 s: rank {SILENT} on node" in page["standstill"]
    assert page["waits"][str(SILENT + TP)] == f"inside dp, waits for {SILENT}"
    # All that wait for it, each with an arrow, and how far both got.
    mates = RankLayout(tp=TP, dp=DP, pp=PP).members(SILENT, "dp")
    assert page["edges"] == [[rank, SILENT] for rank in mates if rank != SILENT]
    culprit, waiting = page["behind"][:2]
    assert (culprit["rank"], culprit["holds_up"]) == (SILENT, True)
    assert [each["lags"] for each in culprit["operations"]] == [False, True]
    assert not any(each["lags"] for each in waiting["operations"])
    healthy = await ClusterReader(RecordedCluster()).grid(JOB)
    nothing = [healthy[name] for name in ("standstill", "waits", "edges", "behind")]
    assert nothing == ["", {}, [], []]


async def test_the_heat_map_shows_the_slow_host_and_what_was_not_measured() -> None:
    page = await ClusterReader(RecordedCluster("slow host")).heat(JOB)
    names = [each["name"] for each in page["nodes"]]
    assert names == [f"n{index}" for index in range(1520)]
    assert page["nodes"][SLOW]["switch"] == f"s{SLOW // 64}"
    assert page["worst"].index(max(page["worst"])) == SLOW
    by_operation = {each["operation"]: each for each in page["operations"]}
    assert by_operation["forward"]["ratios"][SLOW] == pytest.approx(SLOW_RATIO)
    assert by_operation["data_wait"]["ratios"][SLOW] < 1.02
    assert page["slow"][0]["node"] == f"n{SLOW}"


def test_a_node_without_figures_is_not_measured_in_the_heat_map() -> None:
    nan = float("nan")
    answer = driver_pb2.GetHeatMapResponse(rank_nodes=["n1", "n1", "n2"])
    answer.rows.add(operation="forward", ratio=[nan, 1.25, nan], median_ms=[nan, 5.0, nan])
    page = grid_view.heat(Job(), answer, [])
    assert page["operations"][0]["ratios"] == [1.25, None] and page["worst"] == [1.25, None]
    assert "Only" not in page["headline"]
    empty = grid_view.heat(Job(), driver_pb2.GetHeatMapResponse(), [])
    assert (empty["operations"], empty["worst"]) == ([], [])


@pytest.mark.parametrize(
    ("nodes", "ratio", "headline"),
    [
        (["n1", "n2"], [1.0, 1.09], "No node was slow in these steps."),
        (["n1", "n2"], [1.0, 1.12], "No node is slow for long enough to be named; n2 takes up to"),
        (["n1", "n1"], [1.0, 1.5], "Only n1 runs the job: there is no other node"),
    ],
)
def test_the_headline_of_the_heat_map_is_what_its_tiles_show(
    nodes: list[str], ratio: list[float], headline: str
) -> None:
    answer = driver_pb2.GetHeatMapResponse(rank_nodes=nodes)
    answer.rows.add(operation="forward", ratio=ratio, median_ms=[1.0, 1.0])
    assert grid_view.heat(Job(), answer, [])["headline"].startswith(headline)


async def test_a_slow_host_stands_on_the_first_page_for_an_hour() -> None:
    source = RecordedCluster("slow host")
    page = await ClusterReader(source).now()
    (slow,) = page["incidents"]
    assert (slow["urgency"], slow["page"]) == ("watch", f"/jobs/{JOB}/heat")
    assert "OBSERVE" in slow["doing"][0]
    later = ClusterReader(source, clock=lambda: source.now_s + 3600)
    assert (await later.now())["incidents"] == []


async def test_a_rank_with_hot_experts_is_a_thing_to_watch_and_no_slow_node() -> None:
    source = RecordedCluster("hot experts")
    page = await ClusterReader(source).now()
    (hot,) = page["incidents"]
    assert (hot["urgency"], hot["page"]) == ("watch", f"/jobs/{JOB}/heat")
    assert f"rank {HOT} on node n311 has hot experts" in hot["title"]
    commands = [each["command"] for each in hot["may_do"]]
    assert commands == [f"megascale heat {JOB}"], "no node is to be evicted or diagnosed"
    later = ClusterReader(source, clock=lambda: source.now_s + 3600)
    assert (await later.now())["incidents"] == []


async def test_the_heat_map_says_which_node_has_hot_experts() -> None:
    page = await ClusterReader(RecordedCluster("hot experts")).heat(JOB)
    assert page["hot_nodes"] == {"n311": "hot experts (1.8 times the mean rows)"}
    assert page["headline"].startswith("Rank 2491 on node n311 has hot experts")
    (row,) = page["hot"]
    assert (row["rank"], row["rows"], row["operation"]) == (HOT, HOT_SHARE, "forward")
    assert page["slow"] == [] and max(page["worst"]) == pytest.approx(HOT_RATIO)
    dense = await ClusterReader(RecordedCluster("slow host")).heat(JOB)
    assert not {"hot", "hot_nodes"} & set(dense)


async def read_timeline(wanted: Wanted, source: RecordedCluster | None = None) -> Page:
    return await ClusterReader(source or RecordedCluster("slow host")).timeline(JOB, wanted)


async def test_the_timeline_has_the_ranks_of_one_group_on_one_clock() -> None:
    page = await read_timeline(Wanted(rank=SLOW * 8 + 1, steps=2))
    layout = RankLayout(tp=TP, dp=DP, pp=PP)
    assert [each["rank"] for each in page["rows"]] == list(layout.members(SLOW * 8 + 1, "pp"))
    assert (page["group"], page["members"], len(page["steps"])) == ("pp", PP, 2)
    assert page["lanes"] == ["compute", "collective", "p2p", "host"]
    spans = page["spans"]
    assert {len(column) for column in spans.values()} == {len(spans["row"])}
    # Micro-batches of each step are there once for each rank, forward and backward.
    forward = page["names"].index("forward")
    of_first = [
        (batch, step)
        for row, name, batch, step in zip(
            spans["row"], spans["name"], spans["batch"], spans["step"], strict=True
        )
        if row == 0 and name == forward
    ]
    assert sorted(of_first) == sorted((b, STEP - 2 + s) for b in range(16) for s in range(2))
    # The slow host computes for longer, and the others wait for it.
    slow = next(each for each in page["rows"] if each["node"] == f"n{SLOW}")
    others = [each for each in page["rows"] if each is not slow]
    assert slow["computes"] > 1.1 * max(each["computes"] for each in others)
    assert slow["waits"] < min(each["waits"] for each in others)
    assert all("within 0.040 ms" in each["clock"] for each in page["rows"])
    assert {name for *_, name in page["arrows"]} == {"activation", "gradient"}
    assert page["command"].endswith(f"--first-step {STEP - 2} --open")


async def test_a_long_group_is_shown_around_the_rank_and_a_page_has_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = 100 * TP
    page = await read_timeline(Wanted(rank=rank, group="dp"))
    ranks = [each["rank"] for each in page["rows"]]
    assert page["members"] == DP and len(ranks) == timeline_view.MOST_RANKS
    assert ranks == [TP * each for each in range(92, 108)] and not page["left_out"]
    last = await read_timeline(Wanted(rank=TP * DP - 1, group="dp"))
    assert last["rows"][-1]["rank"] == TP * DP - 1
    monkeypatch.setattr(timeline_view, "SHOWN_SPANS", 100)
    cut = await read_timeline(Wanted(rank=rank, group="dp"))
    assert len(cut["spans"]["row"]) == 100 and cut["left_out"] == len(page["spans"]["row"]) - 100
    assert min(cut["spans"]["for_us"]) > 2000  # the shortest are left out
    monkeypatch.setattr(timeline_view, "MAX_TRACE_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="give fewer"):
        await read_timeline(Wanted(rank=rank, group="dp", steps=2))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rank": "x"}, "rank: 'x' is not a number from 0"),
        ({"steps": "11"}, "steps: '11' is not a number from 1 to 10"),
        ({"group": "cp"}, "group: 'cp' is none; give one of pp, dp, tp"),
        ({"step": "-1"}, "step:"),
    ],
)
def test_a_bad_address_of_a_timeline_names_the_field(given: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        Wanted.parse(given)


async def test_the_critical_path_is_marked_on_the_ranks_that_it_goes_through() -> None:
    page = await read_timeline(Wanted(rank=SLOW * 8 + 1))
    by_row: dict[int, int] = {}
    for row, _, length_us, _ in page["path"]:
        by_row[row] = by_row.get(row, 0) + length_us
    slow_row = next(index for index, row in enumerate(page["rows"]) if row["node"] == f"n{SLOW}")
    assert max(by_row, key=by_row.__getitem__) == slow_row
    (step,) = page["steps"]
    assert sum(by_row.values()) == pytest.approx(step["for_us"], rel=1e-3)
    (sentence,) = page["path_sentences"]
    assert f"on n{SLOW} for" in sentence


async def test_a_step_stands_beside_a_good_one_operation_by_operation() -> None:
    wanted = Wanted.parse({"rank": str(SLOW * 8 + 1), "beside": str(STEP - 90)})
    assert wanted.beside == STEP - 90
    source = RecordedCluster("slow host")
    source.slow_since = STEP - 85
    page = await read_timeline(wanted, source)
    assert page["beside"]["step"] == STEP - 90
    grown = {each["name"]: each for each in page["beside"]["operations"]}
    backward = grown["backward"]
    assert backward["most_rank"] == SLOW * 8 + 1
    ranks, batches = len(page["rows"]), 16
    more_ms = 178 * (SLOW_RATIO - 1) * batches
    assert backward["most_ms"] == pytest.approx(more_ms, rel=0.01)
    assert backward["grown_ms"] == pytest.approx(more_ms / ranks, rel=0.01)
    assert grown["optimizer"]["grown_ms"] == pytest.approx(0, abs=0.01)
    order = [each["grown_ms"] for each in page["beside"]["operations"]]
    assert order == sorted(order, reverse=True)
    assert (await read_timeline(Wanted(rank=1)))["beside"] is None


async def test_a_timeline_of_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"no rank {TP * DP * PP}; give 0 to"):
        await read_timeline(Wanted(rank=TP * DP * PP))


async def test_many_timelines_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_reader, "KEPT_TIMELINES", 2)
    reader = ClusterReader(RecordedCluster())
    for rank in range(4):
        await reader.timeline(JOB, Wanted(rank=rank))
    assert sum(key.startswith("timeline ") for key in reader._answers) == 2


async def test_a_job_beside_its_plan_and_beside_its_past() -> None:
    page = await ClusterReader(RecordedCluster("slow host")).slower(JOB)
    assert page["decline"]["cause"] == "slow_host" and page["decline"]["node"] == f"n{SLOW}"
    assert list(page["decline"]["shares"]) == ["slow_host", "network_wait", "data_wait"]
    assert page["plan"]["slower_by"] == "straggler" and len(page["plan"]["terms"]) == 7

    class NoSpans(RecordedCluster):
        async def mfu_decline(self, name: str) -> driver_pb2.GetMfuDeclineResponse:
            raise NotPossible("this driver keeps no spans", reason="NO_TELEMETRY")

    page = await ClusterReader(NoSpans()).slower(JOB)
    assert page["decline"] is None and page["problem"] == "this driver keeps no spans"


async def test_the_logs_root_is_shown() -> None:
    explanation = driver_pb2.ExplainJobResponse()
    explanation.log_root.attempt, explanation.log_root.rank = 3, -1
    explanation.log_root.line = "NVRM: Xid 79"
    root = job_view.why(explanation)["root"]
    assert (root["rank"], root["line"]) == (None, "NVRM: Xid 79")
