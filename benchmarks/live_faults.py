"""A slowed device and a hang on a live job of four GPUs: is the culprit named, and it alone?

    python benchmarks/live_faults.py
    python benchmarks/live_faults.py --device cpu --limit-s 500     # the same flow, small sizes

Starts a cluster of two nodes with two devices each on this machine (etcd, driver, agents,
checkpoint daemons) and trains two jobs in turn. In the first (DP4) a competing process multiplies
matrices on the GPU of one rank, after as many steps in which it is there and idle: the driver has
to name that rank's node and no other. In the second (TP2 DP2) the host loop of one rank stands
still before it enters a collective: the driver's verdict has to name that rank alone, with its
stack; NCCL's flight recorder of each rank has to be there and say the same; and the job has to
train again. What NVML's counters in the driver's store say of the devices is reported.

Each stage has a limit, so that what was seen is printed in any case. The last line of stdout is one
JSON object; exit status 0 if every stage holds, 1 if one does not, 2 if the cluster did not start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.live_evidence import counters_of, flight_verdict, log_tails
from benchmarks.live_injection import HANG_FRAME, Competitor, HangingRank, device_of, slow_device

from megascale.v1 import types_pb2
from megascale_cli.demo.cluster import DemoCluster, node_processes, run_command
from megascale_cli.demo.plan import fault_plan
from megascale_cli.demo.recording import Recording, seconds
from megascale_client import AsyncClient, MegascaleError, parse_job
from megascale_client.messages import WatchJobResponse
from megascale_common.node.files import AttemptFolder, attempt_folder

DEVICES_PER_NODE = 2
CULPRIT = 2
STEPS_BEFORE = 30  # the job's pace is known then
CLEAN_STEPS = 60  # with an idle competitor: more than the rule for slow nodes looks at
STEPS_AFTER = 3
POLL_S = 0.1
COUNTED_S = 18.0  # of a slowed device: its counters come every 5 s, and three of them show a mean
ASKING_S = 12.0  # of a stage, for what is asked behind its wait
CORPUS_BYTES = 2 << 20
STANDS_STILL_S = 10.0  # the driver's least limit for a step
# Seconds of each stage, of which only the waits for what may never come are ever used up.
LIMITS_S = {"cluster": 60, "start": 75, "clean": 40, "straggler": 50, "start_second": 60,
            "hang": 60, "recovered": 60}  # fmt: skip
# 0.3 billion parameters; a step is some 60 TFLOP on each of four devices.
LARGE = {"layers": 24, "hidden_size": 1024, "heads": 16, "sequence_length": 2048}


def job(device: str, name: str, folder: Path, parallelism: dict[str, int]) -> dict[str, Any]:
    """The demo's job for faults in another layout, on GPUs with more to compute."""
    plain = fault_plan(pipeline=False).job(name, folder / "corpus", folder / "checkpoints" / name)
    trainer: dict[str, Any] = plain["trainer"]
    trainer["parallelism"] = parallelism
    trainer["optimizer"] = HangingRank.section(CULPRIT)
    if device == "cuda":
        trainer["model"] |= LARGE
        trainer["training"] |= {
            "global_batch_size": 64, "micro_batch_size": 4, "precision": "bf16",
        }  # fmt: skip
        plain["checkpoint"]["interval_steps"] = 25
    return plain


async def follow(
    client: AsyncClient, run: Recording, see: Callable[[WatchJobResponse], None]
) -> None:
    """Record the job until it ends."""
    async for update in client.watch(run.name):
        run.add(update)
        see(update)
    run.job = await client.get(run.name)


class Live:
    """One run. ``report`` has what was seen, by stage."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._until_s = time.monotonic() + options.limit_s
        self._hanging = HangingRank(folder.with_name(folder.name + ".site"))
        self.report: dict[str, Any] = {}

    async def run(self) -> None:
        """All stages; the cluster is stopped at the end."""
        devices = ("--device", self._options.device, "--devices-per-node", DEVICES_PER_NODE)
        floor = ("--heartbeat-interval-s", "1", "--hang-floor-s", f"{STANDS_STILL_S:g}")
        cluster = DemoCluster(self._folder, _say, "--nodes", 2, *devices, *floor)
        try:
            if not await self._stage("cluster", self._start(cluster)):
                return
            async with AsyncClient.from_run_folder(self._folder) as client:
                await self._slowed(client)
                await self._hung(client)
        finally:
            began_s = time.monotonic()
            left = await asyncio.to_thread(cluster.stop)
            stopped_s = round(time.monotonic() - began_s, 1)
            self.report["cluster_stop"] = {"holds": left == 0, "killed": left, "took_s": stopped_s}

    async def _stage(self, name: str, work: Awaitable[dict[str, Any]]) -> bool:
        """Do ``work`` within the stage's limit and keep what it found; returns if it holds."""
        began_s = time.monotonic()
        # Every stage gets a few seconds, so that a late one says what it sees.
        limit_s = min(float(LIMITS_S[name]) * self._options.patience, self._until_s - began_s)
        try:
            found = await asyncio.wait_for(work, max(limit_s, 5.0))
        except TimeoutError:
            found = {"holds": False, "failed": f"not within {limit_s:.0f} s"}
        except Exception as error:  # whatever it is, the other stages have their say
            traceback.print_exc()
            found = {"holds": False, "failed": f"{type(error).__name__}: {error}"}
        found["took_s"] = round(time.monotonic() - began_s, 1)
        self.report[name] = found
        _say(json.dumps({name: found}, default=str))
        return bool(found["holds"])

    async def _start(self, cluster: DemoCluster) -> dict[str, Any]:
        source = sysconfig.get_path("stdlib")
        run_command(
            *("data", "tokenize", source, "--output", str(self._folder / "corpus")),
            *("--tokenizer", "bytes", "--glob", "*.py", "--max-bytes", str(CORPUS_BYTES)),
        )
        await asyncio.to_thread(cluster.start)
        return {"holds": True}

    @contextlib.asynccontextmanager
    async def _following(self, client: AsyncClient, name: str, **parallelism: int) -> Any:
        """Submit a job and record it while the body runs, then cancel it."""
        run = Recording(name)
        spec = job(self._options.device, name, self._folder, parallelism)
        await client.submit(parse_job(spec))
        following = asyncio.create_task(follow(client, run, _print))
        try:
            yield run
        finally:
            with contextlib.suppress(MegascaleError, TimeoutError):
                await client.cancel(name, reason="the measurement is over")
                await asyncio.wait_for(asyncio.shield(following), 20.0)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self.report[f"{name}_events"] = [
                f"{seconds(event.time):.2f} {event.reason} {event.subject} {event.message}"
                for event in run.events
            ]

    async def _slowed(self, client: AsyncClient) -> None:
        competitor: Competitor | None = None
        async with self._following(client, "slowed", dp=4) as run:
            try:
                if not await self._stage("start", self._trains(run)):
                    return
                if self._options.device == "cuda":
                    node = self._folder / "nodes" / _node_of(run, CULPRIT)
                    log = AttemptFolder(node / attempt_folder(run.name, 1)).log(CULPRIT)
                    place = device_of(log), self._options.duty, self._folder / "competitor.log"
                    competitor = Competitor(*place)
                await self._stage("clean", self._clean(run, competitor))
                await self._stage("straggler", self._straggler(client, run, competitor))
            finally:
                if competitor is not None:
                    await competitor.stop()

    async def _trains(self, run: Recording, *, saved: bool = False) -> dict[str, Any]:
        """Wait for STEPS_BEFORE steps, and a checkpoint if ``saved``."""
        began_s = time.time()

        def ready() -> bool:
            stored = not saved or bool(_of(run, "CHECKPOINT_COMMITTED"))
            return run.last_step(1) >= STEPS_BEFORE and stored

        await _until(lambda: ready() or run.ended)
        first = run.first_record(1)
        return {
            "holds": ready(),
            "to_first_step_s": round(seconds(first.completed_at) - began_s, 2) if first else None,
            "step_ms": round(1e3 * _pace_s(run), 1),
            "nodes": run.nodes_of_attempt.get(1),
        }

    async def _clean(self, run: Recording, competitor: Competitor | None) -> dict[str, Any]:
        if competitor is not None:
            await competitor.start()
        start = run.last_step(1)
        await _until(lambda: run.last_step(1) >= start + CLEAN_STEPS or run.ended)
        named = [event.message for event in _of(run, "STRAGGLER")]
        steps = run.last_step(1) - start
        return {
            "holds": not named and steps >= CLEAN_STEPS, "steps": steps, "named": named,
            "step_ms": round(1e3 * _pace_s(run, since=start), 1),
        }  # fmt: skip

    async def _straggler(
        self, client: AsyncClient, run: Recording, competitor: Competitor | None
    ) -> dict[str, Any]:
        node = _node_of(run, CULPRIT)
        pid = node_processes(self._folder, node)[f"rank-{CULPRIT}"]
        pace_s, before = _pace_s(run), len(_of(run, "STRAGGLER"))
        async with slow_device(competitor, pid, pace_s) as how:
            began_s, start = time.time(), run.last_step(1)

            def found() -> list[types_pb2.Event]:
                return _of(run, "STRAGGLER")[before:]

            # What spans show is kept in any case, within the limit of the stage.
            wait_s = (LIMITS_S["straggler"] - ASKING_S) * self._options.patience
            await _until(lambda: bool(found()) or run.ended, wait_s)
            step, slow_ms = run.last_step(1), 1e3 * _pace_s(run, since=start + 1)
            heat = await client.heat_map(run.name, steps=30)
            # Time for another node to be named, and on GPUs for three samples of the counters.
            counted_s = COUNTED_S if competitor is not None else 0.0
            await asyncio.sleep(max(2.0, began_s + counted_s - time.time()))
            why = await client.mfu_decline(run.name, steps=300, split_step=start + 2)
        named = [(each.subject, _ranks(each, "spans")) for each in found()]
        return {
            "holds": named == [(f"nodes/{node}", [CULPRIT])],
            "how": how,
            "named": named,
            "sentence": [event.message for event in found()],
            "seconds": [round(seconds(event.time) - began_s, 2) for event in found()],
            "steps": step - start,
            "from_step": start,
            "step_ms": [round(1e3 * pace_s, 1), round(slow_ms, 1)],
            "heat_slow": [slow.sentence for slow in heat.slow_nodes],
            "heat": {
                row.operation: [[round(value, 2) for value in row.median_ms],
                                [round(value, 3) for value in row.ratio]]
                for row in heat.rows[:6]
            },
            "why": {"cause": why.cause, "sentence": why.sentence, "shares": dict(why.shares)},
        }  # fmt: skip

    async def _hung(self, client: AsyncClient) -> None:
        async with self._following(client, "hung", tp=2, dp=2) as run:
            if not await self._stage("start_second", self._trains(run, saved=True)):
                return
            began_s, step = time.time(), run.last_step(1)
            self._hanging.begin()
            await self._stage("hang", self._hang(client, run, began_s))
            self._hanging.end()
            await self._stage("recovered", self._recovered(run, began_s, step))

    async def _hang(self, client: AsyncClient, run: Recording, began_s: float) -> dict[str, Any]:
        held_up: list[int] = []
        places: list[str] = []
        end_s = time.monotonic() + (LIMITS_S["hang"] - ASKING_S) * self._options.patience
        while not _of(run, "HANG_SUSPECTED") and not run.ended and time.monotonic() < end_s:
            topology = await client.topology(run.name)
            if topology.standstill:
                held_up = [place.rank for place in topology.ranks if place.holds_up]
                places = [f"{place.rank}: {', '.join(place.inside)}" for place in topology.ranks]
            await asyncio.sleep(4 * POLL_S)
        verdicts = _of(run, "HANG_SUSPECTED")
        await _until(lambda: bool(_of(run, "HANG_STACKS")) or run.ended, ASKING_S - 2)
        stacks = {
            int(item.source.rpartition("/")[2]): item.digest
            for event in _of(run, "HANG_STACKS")
            for item in event.evidence
        }
        named = [rank for each in verdicts for rank in _ranks(each, "status", of="suspect")]
        flight = flight_verdict(self._folder, run.name, self._folder / "flight")
        on_gpu = self._options.device == "cuda"
        right = flight.get("culprits") == [CULPRIT] and not flight.get("without_dump")
        return {
            "holds": named == [CULPRIT] and HANG_FRAME in stacks.get(CULPRIT, "")
            and (right or not on_gpu),
            "named": named,
            "sentence": [verdict.message for verdict in verdicts],
            "seconds": [round(seconds(verdict.time) - began_s, 2) for verdict in verdicts],
            "held_up_before": held_up,
            "inside_before": places,
            "stacks": stacks,
            "stacks_sentence": [event.message for event in _of(run, "HANG_STACKS")],
            "flight_recorder": flight,
        }  # fmt: skip

    async def _recovered(self, run: Recording, began_s: float, step: int) -> dict[str, Any]:
        await _until(lambda: run.ended or _new_steps(run) >= STEPS_AFTER)
        first = run.first_record(2)
        return {
            "holds": _new_steps(run) >= STEPS_AFTER,
            "fault_to_first_new_step_s":
                round(seconds(first.completed_at) - began_s, 2) if first else None,
            "step_at_fault": step,
            "first_new_step": first.step if first else None,
            "nodes": run.nodes_of_attempt.get(2),
        }  # fmt: skip


def _node_of(run: Recording, rank: int) -> str:
    """The node of a rank of attempt 1; nodes hold ranks in their order."""
    return run.nodes_of_attempt[1][rank // DEVICES_PER_NODE]


def _of(run: Recording, reason: str) -> list[types_pb2.Event]:
    return [event for event in run.events if event.reason == reason]


def _ranks(event: types_pb2.Event, kind: str, of: str = "") -> list[int]:
    """Ranks that an event's evidence of one kind names, where its text begins with ``of``."""
    return [
        int(item.source.rpartition("/")[2])
        for item in event.evidence
        if item.kind == kind and item.digest.startswith(of)
    ]


def _new_steps(run: Recording) -> int:
    return sum(attempt > 1 for attempt, _ in run.records)


def _pace_s(run: Recording, since: int = 0) -> float:
    """Median time of the newest 30 steps of attempt 1 after ``since``; 0.0 without any."""
    steps = sorted(step for attempt, step in run.records if attempt == 1 and step > since)[-30:]
    times_s = [run.records[1, step].step_time.ToNanoseconds() / 1e9 for step in steps]
    return statistics.median(times_s) if times_s else 0.0


async def _until(ready: Callable[[], bool], limit_s: float = math.inf) -> None:
    """Wait for ``ready``, ``limit_s`` at most."""
    end_s = time.monotonic() + limit_s
    while not ready() and time.monotonic() < end_s:  # noqa: ASYNC110 - a stream's record
        await asyncio.sleep(POLL_S)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _print(update: WatchJobResponse) -> None:
    if update.WhichOneof("update") == "event":
        event = update.event
        _say(f"{event.reason} {event.subject} {event.message}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--duty", type=float, default=0.6, help="the competitor's share of time")
    parser.add_argument("--limit-s", type=float, default=170.0, help="for all stages together")
    parser.add_argument("--patience", type=float, default=1.0, help="times each stage's limit")
    parser.add_argument("--keep", type=Path, help="copy logs, flight records and counters there")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megascale-live-") as temporary:
        folder = Path(temporary) / "run"
        folder.mkdir(mode=0o700)
        live = Live(options, folder)
        asyncio.run(live.run())
        stages = {name: live.report.get(name, {}) for name in LIMITS_S}
        holds = all(found.get("holds", False) for found in stages.values())
        counters = counters_of(folder / "telemetry")
        if not holds:
            for line in log_tails(folder):
                print(line, file=sys.stderr)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            for name in ("flight", "telemetry"):
                if (folder / name).is_dir():
                    shutil.copytree(folder / name, options.keep / name, dirs_exist_ok=True)
    result = {
        "device": options.device, "culprit": CULPRIT, "holds": holds, **live.report,
        "counters": counters, "wall_s": round(time.monotonic() - began_s, 1),
    }  # fmt: skip
    print(json.dumps(result, default=str))
    return 2 if not stages["cluster"].get("holds") else 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
