"""How long a model of real size takes from a fault to its next step, and whether losses agree.

    python benchmarks/recovery.py --preset tiny --device cpu --nodes 2 --devices-per-node 1 \\
        --dp 2 --fault node --revive --replicas 1 --snapshot-interval 1
    python benchmarks/recovery.py --preset tiny --device cpu --nodes 1 --devices-per-node 2 \\
        --tp 2 --fault worker --snapshot-interval 1
    python benchmarks/recovery.py --preset 1b --tp 2 --pp 2 --fault worker --deterministic --twin
    python benchmarks/recovery.py --preset 1b --nodes 4 --devices-per-node 1 --pp 2 --fault node

Starts a cluster on this machine, tokenises a part of the Python standard library, trains, and kills
one worker or one whole node after a checkpoint (--revive starts the node again: there may be no
spare; with --replicas a node is killed once a step beyond that checkpoint has all its replicas).
It ends --after steps behind the fault; with --twin the job runs to its end, and then the same job
undisturbed.

The last line of stdout is one JSON object of figures: when the verdict, the decision what to
restore, running workers and the first new step came, in seconds after the fault, and how many bytes
came back from memory, from a peer's memory and from storage. Exit status: 0, 1 if the job did not
recover within --limit-s (the object then has "failed", and how far it was) or its losses are not
the twin's (on a CPU, and with --deterministic), 2 if the cluster did not start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale_cli.demo.cluster import DemoCluster, DemoFailed, megascale, run_command
from megascale_cli.demo.plan import DemoPlan
from megascale_cli.demo.recording import Recording, seconds
from megascale_client import AsyncClient, parse_job
from megascale_client.messages import WatchJobResponse

# layers, hidden size, heads, vocabulary, sequence, micro-batch, global batch, precision
PRESETS: dict[str, tuple[int, int, int, int, int, int, int, str]] = {
    "tiny": (4, 128, 4, 4096, 128, 2, 16, "fp32"),
    "1b": (16, 2048, 16, 32768, 2048, 4, 64, "bf16"),
}
CORPUS_BYTES = 4 << 20  # of bytes as tokens: nobody looks at what is learnt
STEPS = 100_000  # without a twin: the benchmark ends the job
# What the audit log says of a fault, in the order of the timeline.
TIMELINE = {
    "verdict": ("WORKER_EXITED", "NODE_DEAD", "NODE_EVICTED", "NODE_RESTARTED"),
    "stopped": ("ATTEMPT_STOPPED",),
    "placed": ("PLACED",),
    "restore_decided": ("ATTEMPT_OPENED",),
    "workers_run": ("ATTEMPT_STARTED",),
}


def job(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """The job as plain values."""
    layers, hidden, heads, vocabulary, sequence, micro, batch, precision = PRESETS[arguments.preset]
    return {
        "name": name,
        "trainer": {
            "model": {
                "layers": layers,
                "hidden_size": hidden,
                "heads": heads,
                "vocab_size": vocabulary,
                "sequence_length": sequence,
            },
            "parallelism": {"tp": arguments.tp, "pp": arguments.pp, "dp": arguments.dp},
            "training": {
                "steps": arguments.steps or (60 if arguments.twin else STEPS),
                "global_batch_size": batch,
                "micro_batch_size": micro,
                "precision": precision,
                "deterministic": arguments.deterministic,
            },
            "schedule": {"warmup_steps": 4},
            "data": {
                "sources": [{"prefix": str(folder / "corpus")}],
                "tokenizer": {"kind": "bytes"},
                "document_attention": arguments.documents,
            },
        },
        "checkpoint": {
            "uri": str(folder / "checkpoints" / name),
            "interval_steps": arguments.interval,
            "snapshot_interval_steps": arguments.snapshot_interval,
            "replicas": arguments.replicas,
        },
        "recovery": {"collective_timeout_s": 120},
    }


class NotRecovered(Exception):
    """There was no first step after the fault, or no end, within the limit."""


@dataclass(slots=True)
class Run:
    """A job that is watched, and when its fault was (seconds since 1970; 0.0: not yet)."""

    recording: Recording
    broken_at: float = 0.0
    stored_step: int = 0
    commits: int = 0

    def see(self, update: WatchJobResponse) -> None:
        """Take one update."""
        if update.WhichOneof("update") != "event":
            return
        if update.event.reason == "CHECKPOINT_COMMITTED":
            self.commits, self.stored_step = self.commits + 1, self.recording.last_step(1)
        text = f"{update.event.reason} {update.event.message}"
        print(f"{seconds(update.event.time):.3f} {text}", file=sys.stderr, flush=True)

    def new_steps(self) -> int:
        """Steps that attempts after the first have completed."""
        return sum(attempt > 1 for attempt, _ in self.recording.records)

    def state(self) -> str:
        """How far it is, in words."""
        recording = self.recording
        first = f"attempt 1 completed step {recording.last_step(1)}, {self.commits} checkpoints"
        fault = (
            f"; after the fault {self.new_steps()} new steps" if self.broken_at else "; no fault"
        )
        return first + fault


async def follow(
    client: AsyncClient, run: Recording, see: Callable[[WatchJobResponse], None]
) -> None:
    """Record the job until it ends."""
    async for update in client.watch(run.name):
        run.add(update)
        see(update)
    run.job = await client.get(run.name)


async def train(
    client: AsyncClient,
    machine: DemoCluster,
    arguments: argparse.Namespace,
    run: Run,
    folder: Path,
    fault: str,
) -> None:
    """Run a job, with ``fault`` once after the first commit, until enough new steps, or its end.

    Raises:
        NotRecovered: the job ended before that.
    """
    name = run.recording.name
    await client.submit(parse_job(job(arguments, name, folder)))
    following = asyncio.create_task(follow(client, run.recording, run.see))
    try:
        while not following.done():
            await asyncio.sleep(0.02)
            if run.broken_at and not arguments.twin and run.new_steps() >= arguments.after:
                return
            if (
                fault != "none"
                and not run.broken_at
                and run.commits
                and run.recording.last_step(1) % arguments.interval >= 2
                and await has_replicas(client, arguments, name, run.stored_step)
            ):
                await break_something(client, machine, run, folder, fault, revive=arguments.revive)
        await following
        if fault != "none" and not run.new_steps():
            raise NotRecovered(f"{name} ended: {(await client.explain(name)).explanation}")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        run.recording.job = await client.get(name)


async def has_replicas(
    client: AsyncClient, arguments: argparse.Namespace, name: str, stored_step: int
) -> bool:
    """Whether a step that is not on storage yet has all its replicas, where a node is to be lost.

    ``stored_step``: no checkpoint is of a later one.
    """
    if not arguments.replicas or arguments.fault != "node":
        return True
    return bool((await client.get(name)).replicated_step > stored_step)


async def break_something(
    client: AsyncClient, machine: DemoCluster, run: Run, folder: Path, fault: str, *, revive: bool
) -> None:
    """SIGKILL the worker of rank 0, or its whole node, which is then revived."""
    node = (await client.get(run.recording.name)).nodes[0]
    if fault == "worker":
        pid = json.loads((folder / "nodes" / node / "pids.json").read_text())["rank-0"]
        run.broken_at = time.time()
        os.kill(pid, signal.SIGKILL)
        return
    run.broken_at = (await asyncio.to_thread(machine.kill_node, node))[0]
    if revive:
        command = megascale("node", "start", node, "--detach", "--cluster", str(folder))
        process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
        if await process.wait():
            raise DemoFailed(f"node {node} cannot be started again")


def timeline(run: Run) -> dict[str, float]:
    """Seconds from the fault to the first event of each kind after it, and to the first step."""
    found: dict[str, float] = {}
    for name, reasons in TIMELINE.items():
        times = [
            seconds(event.time) - run.broken_at
            for event in run.recording.events
            if event.reason in reasons and seconds(event.time) >= run.broken_at
        ]
        if times and run.broken_at:
            found[name] = round(min(times), 3)
    ends = [
        seconds(record.completed_at)
        for (attempt, _), record in run.recording.records.items()
        if attempt > 1
    ]
    return found | ({"first_new_step": round(min(ends) - run.broken_at, 3)} if ends else {})


def events(run: Run) -> list[str]:
    """The audit log, in seconds from the fault (before there is one, since 1970)."""
    return [
        f"{seconds(event.time) - run.broken_at:+.3f} {event.reason} {event.message}"
        for event in run.recording.events
    ]


def figures(arguments: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Times, steps, losses and events of a run, as plain values."""
    recording, at = run.recording, timeline(run)
    steady = [
        r
        for (attempt, step), r in recording.records.items()
        if step % arguments.interval not in (0, 1, 2) and step > 4
    ] or list(recording.records.values())
    losses = recording.losses()
    return {
        "attempts": recording.attempts,
        "timeline_s": at,
        "verdict_to_workers_s": _between(at, "verdict", "workers_run"),
        "fault_to_first_new_step_s": at.get("first_new_step"),
        "steps_lost": recording.last_step(1) - recording.job.restored_step,
        "resumed_from_step": recording.job.restored_step,
        "restore_source": recording.job.restore_source,
        "tokens_per_s_median": statistics.median(r.tokens_per_s for r in steady),
        "step_time_s_median": statistics.median(r.step_time.ToMicroseconds() / 1e6 for r in steady),
        "mfu_causal_median": statistics.median(r.mfu_causal for r in steady),
        "mfu_full_median": statistics.median(r.mfu_full for r in steady),
        "first_loss": losses[min(losses)],
        "final_loss": losses[max(losses)],
        "evicted_nodes": list(recording.job.evicted_nodes),
        "events": events(run),
    }


def _between(at: dict[str, float], first: str, last: str) -> float | None:
    return round(at[last] - at[first], 3) if first in at and last in at else None


def restores(folder: Path, run: Recording) -> list[str]:
    """What each rank of the last attempt restored, from where, and what its start waited for."""
    logs = f"jobs/{run.name}/attempt-{run.job.attempt:06d}/rank-*.log"
    lines = (
        line
        for log in sorted(folder.glob(f"nodes/*/{logs}"))
        for line in log.read_text(errors="replace").splitlines()
    )
    return [line for line in lines if line.startswith(("restored step ", "ready to train"))]


def restored_bytes(lines: list[str]) -> dict[str, int]:
    """What all ranks restored, by where it came from; see the worker's line."""
    found = {"memory": 0, "peer": 0, "storage": 0}
    for line in lines:
        for size, source in re.findall(r"(\d+) bytes from (memory|peer|storage)", line):
            found[source] += int(size)
    return found


async def measure(arguments: argparse.Namespace, folder: Path, run: Run) -> dict[str, Any]:
    """Start the cluster, train, and return the figures."""
    began_s = time.monotonic()
    run_command(
        *("data", "tokenize", sysconfig.get_path("stdlib"), "--output", str(folder / "corpus")),
        *("--glob", "**/*.py", "--max-bytes", str(CORPUS_BYTES)),
    )
    plan = DemoPlan(
        device=arguments.device,
        nodes=arguments.nodes,
        devices_per_node=arguments.devices_per_node,
        tp=arguments.tp,
        pp=arguments.pp,
        dp=arguments.dp,
        steps=60,
        sabotage="no-spare",
    )
    machine = DemoCluster(folder, lambda text: print(text, file=sys.stderr), *plan.cluster)
    await asyncio.to_thread(machine.start)
    started_s = time.monotonic() - began_s
    try:
        async with AsyncClient.from_run_folder(folder) as client:
            await train(client, machine, arguments, run, folder, arguments.fault)
            result = {"cluster_ready_s": round(started_s, 3), **figures(arguments, run)}
            result["restores"] = restores(folder, run.recording)
            result["restored_bytes"] = restored_bytes(result["restores"])
            if arguments.twin:
                twin = Run(Recording("twin"))
                await train(client, machine, arguments, twin, folder, "none")
                losses = twin.recording.losses()
                pairs = [(loss, losses[step]) for step, loss in run.recording.losses().items()]
                result["twin_equal_losses"] = sum(a == b for a, b in pairs)
                result["twin_max_loss_abs_diff"] = max(abs(a - b) for a, b in pairs)
            return {"arguments": vars(arguments) | {"folder": None}, **result}
    finally:
        await asyncio.to_thread(machine.stop)


def failed(arguments: argparse.Namespace, folder: Path, run: Run, why: str) -> dict[str, Any]:
    """What is known of a job that did not recover."""
    return {
        "arguments": vars(arguments) | {"folder": None},
        "failed": f"{why}: {run.state()}",
        "timeline_s": timeline(run),
        "restores": restores(folder, run.recording),
        "events": events(run),
    }


def holds(arguments: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Whether training continued after the fault, with the twin's losses where numbers repeat."""
    if arguments.fault != "none" and found["fault_to_first_new_step_s"] is None:
        return False
    repeats = arguments.deterministic or arguments.device == "cpu"
    return not (repeats and found.get("twin_max_loss_abs_diff", 0.0))


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="1b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--devices-per-node", type=int, default=2)
    for axis in ("tp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="of the job; 0: as many as it takes")
    parser.add_argument("--after", type=int, default=3, help="steps behind the fault, then it ends")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for all of it")
    parser.add_argument("--interval", type=int, default=10, help="steps between snapshots")
    parser.add_argument(
        "--snapshot-interval", type=int, default=0, help="into memory; 0: as often as persisted"
    )
    parser.add_argument("--replicas", type=int, default=0, help="copies at another node")
    parser.add_argument("--revive", action="store_true", help="start the killed node again")
    parser.add_argument("--fault", choices=["none", "worker", "node"], default="worker")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--documents", action="store_true", help="keep attention inside a document")
    parser.add_argument(
        "--twin", action="store_true", help="run the undisturbed twin as well and compare losses"
    )
    parser.add_argument("--folder", type=Path, help="run folder (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megascale-recovery-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(Recording("run"))
        try:
            work = measure(arguments, folder, run)
            found = asyncio.run(asyncio.wait_for(work, arguments.limit_s))
        except (TimeoutError, NotRecovered) as problem:
            why = str(problem) or f"not within --limit-s {arguments.limit_s:g}"
            print(json.dumps(failed(arguments, folder, run, why), default=str))
            return 1
        except (DemoFailed, OSError) as problem:
            print(f"recovery.py: {problem}", file=sys.stderr)
            return 2
    print(json.dumps(found, default=str))
    return 0 if holds(arguments, found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
