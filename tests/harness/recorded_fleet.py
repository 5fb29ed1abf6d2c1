"""A fleet of 1,536 nodes with a job on 12,160 devices, as the driver's messages report it.

:class:`RecordedCluster` answers the calls that the dashboard makes with messages of
``megascale.v1``, in one of six situations: healthy, a node lost and replaced, a job that waits
after the loss of a whole switch, a host that is slow, a rank that holds the others up, a rank whose
experts are hot.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Literal

from tests.harness import recorded_timeline

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client import Job, Node, NotFound
from megascale_client.messages import WatchJobResponse
from megascale_job.layout import RankLayout

Situation = Literal["healthy", "node lost", "switch lost", "slow host", "hang", "hot experts"]
NODES, NODES_PER_SWITCH, DEVICES = 1536, 64, 8
TP, PP, DP = 8, 8, 190
IN_USE = TP * PP * DP // DEVICES  # nodes
SPARES = 12
JOB = "gpt-175b"
STEPS, STEP, STEP_S = 120_000, 41_876, 6.31
LOST = 417  # index of the node that dies
RECORDS = 2_500
SILENT = 5003  # the rank that holds the others up
SLOW, SLOW_RATIO = 311, 1.118  # index of the slow host, and how many times as long it takes
HOT, HOT_SHARE, HOT_RATIO = 2491, 1.8, 1.31  # a rank on n311: the rows of its experts, its time
OPERATIONS = (
    ("backward", "compute", 3391.0),
    ("forward", "compute", 1680.0),
    ("gradient_reduce_scatter", "collective", 212.0),
    ("receive_activation", "p2p", 187.0),
    ("optimizer", "compute", 61.0),
    ("data_wait", "host", 2.1),
)


class RecordedCluster:
    """The source of the dashboard's pages (megascale_dashboard.cluster_reader.Source).

    Args:
        nodes: how many nodes the fleet has; 0 with ``jobs`` False is a cluster that just started.
    """

    def __init__(
        self, situation: Situation = "healthy", *, nodes: int = NODES, jobs: bool = True
    ) -> None:
        self.now_s = time.time()
        self.situation = situation
        self.slow_since = 0  # first step at which the slow host is
        self._with_jobs = jobs
        self._nodes = [self._node(index) for index in range(nodes)]
        self._events = self._audit_log()
        self.calls = 0
        self.notes: list[str] = []

    async def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        self.calls += 1
        info = driver_pb2.GetClusterInfoResponse(
            cluster="east-1", leader="10.4.0.11:7411", build="0.1.0", jobs_running=1
        )
        info.nodes_alive = sum(n.liveness == types_pb2.NODE_LIVENESS_ALIVE for n in self._nodes)
        info.leader_since.FromSeconds(int(self.now_s - 3 * 86_400))
        return info

    async def get(self, name: str) -> Job:
        self.calls += 1
        if name != JOB or not self._with_jobs:
            raise NotFound(f"no job has the name {name}", reason="JOB_NOT_FOUND")
        return Job(self._job())

    async def explain(self, name: str) -> driver_pb2.ExplainJobResponse:
        await self.get(name)
        lost = self.situation in ("node lost", "switch lost")
        sentence = {
            "node lost": f"Job {JOB} runs again after the loss of node n{LOST}: spare "
            f"n{IN_USE + 1} has taken its ranks.",
            "switch lost": f"Job {JOB} waits for nodes: 64 nodes of switch s6 are gone and only "
            "12 spares are free.",
        }.get(self.situation, f"Job {JOB} runs: step {STEP} of {STEPS}.")
        answer = driver_pb2.ExplainJobResponse(explanation=sentence)
        if lost:
            mine = [line for line in self._events if line.seq >= 90]
            answer.cause.CopyFrom(mine[0])
            answer.actions.extend(mine[1:])
        if self.situation == "switch lost":
            for text, command in (
                ("look at the nodes that are gone", "megascale nodes"),
                ("run on fewer nodes until they are back", f"megascale update {JOB} JOB.yaml"),
            ):
                answer.suggestions.add(text=text, command=command)
        return answer

    async def topology(self, name: str) -> driver_pb2.GetTopologyResponse:
        await self.get(name)
        return self._topology

    @cached_property
    def _topology(self) -> driver_pb2.GetTopologyResponse:
        answer = driver_pb2.GetTopologyResponse(attempt=4, rank_count=TP * PP * DP)
        for rank in range(TP * PP * DP):
            answer.ranks.add(rank=rank, node=f"n{rank // DEVICES}", phase="step", step=STEP)
        if self.situation == "hang":
            answer.still_s = 71.4
            answer.standstill = (
                f"no rank has completed a step for 71 s: rank {SILENT} on node "
                f"n{SILENT // DEVICES} is in phase STEP at step {STEP}, and the others wait for it"
            )
            mates = RankLayout(tp=TP, dp=DP, pp=PP).members(SILENT, "dp")
            for place in answer.ranks:
                culprit, mate = place.rank == SILENT, place.rank in mates
                place.silent_s = 73.0 if culprit else 71.4
                place.operations.add(group="tp", entered=9120, completed=9120)
                place.operations.add(group="dp", entered=411 + (not culprit), completed=411)
                if culprit:
                    place.holds_up = True
                elif mate:
                    place.inside.append("dp")
                    place.waits_for.append(SILENT)
        return answer

    async def heat_map(self, name: str) -> driver_pb2.GetHeatMapResponse:
        await self.get(name)
        return self._heat_map

    @cached_property
    def _heat_map(self) -> driver_pb2.GetHeatMapResponse:
        answer = driver_pb2.GetHeatMapResponse(attempt=4, first_step=STEP - 49, last_step=STEP)
        world = TP * PP * DP
        answer.rank_nodes.extend(f"n{rank // DEVICES}" for rank in range(world))
        slow = self.situation == "slow host"
        for index, (operation, kind, usual_ms) in enumerate(OPERATIONS):
            row = answer.rows.add(operation=operation, kind=kind)
            wave = (math.sin((rank // DEVICES + 1) * (index + 3.7)) for rank in range(world))
            ratio = [1 + 0.012 * each for each in wave]
            if slow and kind == "compute":
                for rank in range(SLOW * DEVICES, (SLOW + 1) * DEVICES):
                    ratio[rank] = SLOW_RATIO
            ratio[0] = math.nan  # not measured
            row.ratio.extend(ratio)
            row.median_ms.extend(usual_ms * each for each in ratio)
        if slow:
            answer.slow_nodes.add(
                node=f"n{SLOW}",
                rank=SLOW * DEVICES + 3,
                operation="forward",
                ratio=SLOW_RATIO,
                since_step=41_790,
                sentence=self._slow_sentence,
            )
        if self.situation == "hot experts":
            self._add_hot(answer)
        return answer

    def _add_hot(self, answer: driver_pb2.GetHeatMapResponse) -> None:
        for row in answer.rows[:2]:
            row.ratio[HOT] = HOT_RATIO
        shares = [1.0] * len(answer.rank_nodes)
        shares[HOT] = HOT_SHARE
        answer.routing.expert_share.extend(shares)
        hot = answer.routing.hot_ranks.add(
            rank=HOT,
            node=answer.rank_nodes[HOT],
            expert_share=HOT_SHARE,
            operation="forward",
            ratio=HOT_RATIO,
            since_step=41_790,
            sentence=self._hot_sentence,
        )
        hot.hottest.add(layer=5, expert=17, load=4.2)

    async def mfu_decline(self, name: str) -> driver_pb2.GetMfuDeclineResponse:
        await self.get(name)
        answer = driver_pb2.GetMfuDeclineResponse(
            attempt=4, cause="none", rank=-1, first_step=STEP - 199, last_step=STEP,
            split_step=STEP - 85, step_before_ms=6310.0, step_after_ms=6318.0,
            sentence="Steps take as long as before: 6,310 ms, then 6,318 ms.",
        )  # fmt: skip
        if self.situation == "slow host":
            answer.cause, answer.node, answer.rank = "slow_host", f"n{SLOW}", SLOW * DEVICES + 3
            answer.step_after_ms = 6931.0
            answer.sentence = (
                f"Steps take 9.8 % longer since step {STEP - 85} (6,310 ms, then 6,931 ms): node "
                f"n{SLOW} computes {100 * (SLOW_RATIO - 1):.1f} % longer than the others, which "
                "explains 94 % of it."
            )
            answer.shares.update(slow_host=0.94, network_wait=0.04, data_wait=0.0)
        return answer

    async def timeline(
        self, name: str, *, steps: int = 0, first_step: int = 0, ranks: Sequence[int] = ()
    ) -> AsyncIterator[bytes]:
        await self.get(name)
        count = steps or 3
        first = first_step or STEP - count
        is_slow = self.situation == "slow host" and first >= self.slow_since
        slow = range(SLOW * DEVICES, (SLOW + 1) * DEVICES) if is_slow else ()
        data = recorded_timeline.trace(
            RankLayout(tp=TP, dp=DP, pp=PP),
            tuple(ranks),
            first,
            count,
            begin_s=self.now_s - (STEP - first) * STEP_S,
            slow=dict.fromkeys(slow, SLOW_RATIO),
        )
        yield data[: len(data) // 2]
        yield data[len(data) // 2 :]

    async def jobs(self) -> AsyncIterator[Job]:
        self.calls += 1
        if self._with_jobs:
            yield Job(self._job())

    async def nodes(self) -> AsyncIterator[Node]:
        self.calls += 1
        for node in self._nodes:
            yield Node(node)

    async def events(self, subject: str = "") -> AsyncIterator[types_pb2.Event]:
        self.calls += 1
        for line in self._events:
            node = subject.removeprefix("nodes/")
            if subject in ("", line.subject) or (node != subject and f" {node} " in line.message):
                yield line

    async def checkpoints(self, name: str) -> AsyncIterator[driver_pb2.Checkpoint]:
        for index in range(12):
            step = STEP - STEP % 50 - 50 * index
            checkpoint = driver_pb2.Checkpoint(
                job=name,
                step=step,
                attempt=4,
                size_bytes=2_450_000_000_000,
                world_size=TP * PP * DP,
            )
            checkpoint.committed_at.FromSeconds(int(self.now_s - (STEP - step) * STEP_S))
            yield checkpoint

    async def watch(self, name: str) -> AsyncIterator[WatchJobResponse]:
        await self.get(name)
        yield WatchJobResponse(driver_pb2.WatchJobResponse(job=self._job()))
        for step in range(STEP - RECORDS + 1, STEP + 1):
            yield WatchJobResponse(driver_pb2.WatchJobResponse(step=self.record(step)))

    @property
    def _slow_sentence(self) -> str:
        more = 100 * (SLOW_RATIO - 1)
        return (
            f"Node n{SLOW} takes {more:.1f} % longer for forward than those that do the same work, "
            "since step 41790."
        )

    @property
    def _hot_sentence(self) -> str:
        return (
            f"rank {HOT} on node n{HOT // DEVICES} has hot experts ({HOT_SHARE} times the mean "
            "rows of its ep group): the cause is routing, which makes its forward spans take "
            "31.0 % longer"
        )

    def record(self, step: int) -> types_pb2.StepRecord:
        """The record of one step."""
        wave = math.sin(step * 12.9898) * 43758.5453
        noise = wave - math.floor(wave) - 0.5
        record = types_pb2.StepRecord(attempt=4, step=step, loss=1.93 + 8e3 / step + 0.02 * noise)
        step_s = STEP_S * (1 + 0.012 * noise + (0.09 if step % 50 == 0 else 0))
        record.tokens_per_s = 3072 * 2048 / step_s
        record.mfu_causal, record.mfu_full = 0.552 * STEP_S / step_s, 0.571 * STEP_S / step_s
        record.step_time.FromNanoseconds(int(step_s * 1e9))
        record.completed_at.FromNanoseconds(int((self.now_s - (STEP - step) * STEP_S) * 1e9))
        return record

    def _node(self, index: int) -> driver_pb2.Node:
        node = driver_pb2.Node(
            name=f"n{index}",
            disposition=types_pb2.NODE_DISPOSITION_SCHEDULABLE,
            liveness=types_pb2.NODE_LIVENESS_ALIVE,
            assignment=types_pb2.NODE_ASSIGNMENT_IDLE,
            topology={"switch": f"s{index // NODES_PER_SWITCH}", "pod": f"p{index // 512}"},
            executor_endpoint=f"10.4.{index // 250}.{index % 250}:7420",
            checkpoint_endpoint=f"10.4.{index // 250}.{index % 250}:7430",
        )
        for device in range(DEVICES):
            node.devices.add(
                index=device,
                kind=types_pb2.DEVICE_KIND_CUDA,
                uuid=f"GPU-{index:04x}-{device}",
                model="NVIDIA H200",
                memory_bytes=141 << 30,
            )
        node.last_heartbeat_at.FromSeconds(int(self.now_s - 2))
        self._checks(node, index)
        self._assign(node, index)
        return node

    def _checks(self, node: driver_pb2.Node, index: int) -> None:
        for name, value, unit, usual in (
            ("gpu-gemm", 711.0, "TFLOP/s", 709.0),
            ("gpu-memory", 4.19, "TB/s", 4.2),
            ("all-to-all", 362.0, "GB/s", 364.0),
            ("disk-write", 3.1, "GB/s", 3.0),
        ):
            slow = index == 903 and name == "all-to-all" and self.situation.endswith("lost")
            node.checks.add(
                name=name,
                target="host",
                verdict=types_pb2.CHECK_VERDICT_DEGRADED if slow else types_pb2.CHECK_VERDICT_PASS,
                detail="33 % below the fleet's median" if slow else "as the fleet's median",
                value=value * 0.67 if slow else value,
                unit=unit,
                baseline=usual,
                z=-9.4 if slow else 0.3,
                baseline_source=f"median of {NODES} nodes",
            )

    def _assign(self, node: driver_pb2.Node, index: int) -> None:
        gone = {"node lost": {LOST}, "switch lost": set(range(384, 448))}
        place = index
        if self.situation == "node lost" and index == IN_USE:
            place = LOST  # the spare that took over
        if index in gone.get(self.situation, set()):
            node.liveness = types_pb2.NODE_LIVENESS_DEAD
            node.last_heartbeat_at.FromSeconds(int(self.now_s - 544))
            if self.situation == "node lost":
                return
        if place < IN_USE:
            node.assignment, node.job = types_pb2.NODE_ASSIGNMENT_ACTIVE, JOB
            node.ranks.extend(range(place * DEVICES, (place + 1) * DEVICES))
        elif index < IN_USE + SPARES:
            node.assignment, node.job = types_pb2.NODE_ASSIGNMENT_SPARE, JOB
        elif index == NODES - 1 and self.situation.endswith("lost"):
            node.disposition = types_pb2.NODE_DISPOSITION_QUARANTINED
            node.disposition_reason = "an uncorrectable memory error (Xid 94) on device 3"

    def _job(self) -> driver_pb2.Job:
        job = driver_pb2.Job(
            spec=job_pb2.JobSpec(name=JOB, owner="pretraining"),
            phase=types_pb2.JOB_PHASE_RUNNING,
            phase_reason="all workers train",
            attempt=4,
            step=STEP,
            committed_step=STEP - STEP % 50,
            replicated_step=STEP - 1,
            restored_step=38_150,
            restore_source=types_pb2.RESTORE_SOURCE_MEMORY,
            restarts=3,
            nodes=[node.name for node in self._nodes if node.ranks],
            spare_nodes=[f"n{index}" for index in range(IN_USE, IN_USE + SPARES)],
        )
        job.spec.trainer.training.steps = STEPS
        layout = job.spec.trainer.parallelism
        layout.tp, layout.pp, layout.dp = TP, PP, DP
        job.last_record.CopyFrom(self.record(STEP))
        job.created_at.FromSeconds(int(self.now_s - STEP * STEP_S * 1.03))
        job.updated_at.FromSeconds(int(self.now_s - 400))
        job.committed_at.FromSeconds(int(self.now_s - 160))
        whole_s = int(STEP * STEP_S * 1.03)
        job.goodput.ratio, job.goodput.ratio_since_start = 0.969, 0.972
        for part, ratio in (
            ("wall_time", 1),
            ("productive", 0.969),
            ("lost", 0.006),
            ("detecting", 0.001),
            ("restarting", 0.011),
            ("checkpointing", 0.007),
            ("waiting", 0.003),
            ("starting", 0.003),
        ):
            getattr(job.goodput, part).FromSeconds(int(ratio * whole_s))
        self._plan(job.plan)
        if self.situation == "node lost":
            job.attempt, job.restarts = 5, 4
        if self.situation == "switch lost":
            job.phase, job.attempt = types_pb2.JOB_PHASE_QUEUED, 5
            job.phase_reason = "waits for 52 more nodes: 1520 needed, 1468 free"
        return job

    def _plan(self, plan: driver_pb2.PlanComparison) -> None:
        slow = self.situation == "slow host"
        plan.attempt, plan.first_step, plan.last_step = 4, STEP - 49, STEP
        plan.predicted_step_s, plan.low_s, plan.high_s = 6.14, 5.83, 6.45
        plan.measured_step_s = 6.93 if slow else STEP_S
        plan.hardware = "for an H200 by its data sheet, on this layout"
        plan.sentence = "A step takes 6.31 s; the plan says 6.14 s (5.83 to 6.45)."
        if slow:
            plan.slower_by = "straggler"
            plan.sentence = (
                "A step takes 6.93 s; the plan says 6.14 s (5.83 to 6.45). Most of it is the slow "
                "node: 0.62 s more than planned."
            )
        for name, measured_s, planned_s in (
            ("compute", 4.32, 4.28),
            ("tensor_parallel", 0.21, 0.2),
            ("pipeline", 1.29, 1.26),
            ("data_parallel", 0.24, 0.19),
            ("optimizer", 0.061, 0.06),
            ("host", 0.02, 0.03),
            ("straggler", 0.74 if slow else 0.12, 0.12),
        ):
            plan.terms.add(name=name, measured_s=measured_s, predicted_s=planned_s)

    def _audit_log(self) -> list[types_pb2.Event]:
        lines: list[types_pb2.Event] = []
        hour = 3600.0
        for attempt, ago_s in ((1, 73 * hour), (2, 51 * hour), (3, 29 * hour), (4, 7 * hour)):
            if attempt > 1:
                self._line(
                    lines, ago_s + 60, "ATTEMPT_STOPPED", "all workers have ended", attempt - 1
                )
            self._line(
                lines, ago_s, "ATTEMPT_OPENED", f"attempt {attempt} restores memory", attempt
            )
            text = f"all 12160 workers of attempt {attempt} run"
            self._line(lines, ago_s - 55, "ATTEMPT_STARTED", text, attempt)
        for index in range(8, 0, -1):
            text = f"the checkpoint of step {STEP - 50 * index} is complete"
            self._line(lines, index * 315, "CHECKPOINT_COMMITTED", text, 4)
        if self.situation == "slow host":
            self._line(lines, 500, "STRAGGLER", self._slow_sentence, 4)
            lines[-1].subject, lines[-1].policy, lines[-1].mode = (
                *(f"nodes/n{SLOW}", "straggler"),
                "OBSERVE",
            )
        if self.situation == "hot experts":
            self._line(lines, 500, "EXPERTS_HOT", self._hot_sentence, 4)
            lines[-1].policy, lines[-1].mode = "routing", "OBSERVE"
        if self.situation in ("healthy", "slow host", "hang", "hot experts"):
            return lines
        lines[-1].seq = 89
        what = f"node n{LOST} is dead: its link broke and its port refuses connections"
        if self.situation == "switch lost":
            what = "64 nodes of switch s6 are dead: none of them answers a probe"
        self._line(
            lines, 540, "NODE_DEAD" if self.situation == "node lost" else "SWITCH_LOST", what, 4
        )
        lines[-1].evidence.add(kind="link", source="driver", digest="closed without a goodbye")
        lines[-1].evidence.add(kind="probe", source="driver", digest="connection refused")
        lines[-1].policy, lines[-1].mode, lines[-1].actor = "node-dead", "ENFORCE", "driver"
        self._line(lines, 540, "ATTEMPT_STOPPED", "attempt 4 is stopped: its node is dead", 4)
        if self.situation == "switch lost":
            self._line(lines, 538, "JOB_WAITS", "52 nodes are missing", 4)
            return lines
        text = f"spare n{IN_USE} takes over the ranks of n{LOST} for good"
        self._line(lines, 539, "SPARE_ASSIGNED", text, 4)
        self._line(lines, 538, "ATTEMPT_OPENED", "attempt 5 restores step 41800 from memory", 5)
        self._line(lines, 492, "ATTEMPT_STARTED", "all 12160 workers of attempt 5 run", 5)
        return lines

    def _line(
        self, lines: list[types_pb2.Event], ago_s: float, reason: str, text: str, attempt: int
    ) -> None:
        line = types_pb2.Event(
            seq=lines[-1].seq + 1 if lines else 1,
            subject=f"jobs/{JOB}",
            reason=reason,
            message=text,
            attempt=attempt,
            actor="driver",
        )
        line.time.FromNanoseconds(int((self.now_s - ago_s) * 1e9))
        lines.append(line)
