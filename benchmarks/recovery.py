"""How long a model of real size takes from a fault to its next step, and whether losses agree.

    python benchmarks/recovery.py --preset tiny --device cpu --devices-per-node 4 \\
        --tp 2 --pp 2 --dp 2 --twin
    python benchmarks/recovery.py --preset 1b --tp 2 --pp 2 --fault worker --deterministic --twin
    python benchmarks/recovery.py --preset 1b --nodes 4 --devices-per-node 1 --pp 2 --fault node
    python benchmarks/recovery.py --preset 1b --devices-per-node 1 --dp 2 --fault node --revive \\
        --replicas 1 --snapshot-interval 1

Starts a cluster on this machine, tokenises the Python standard library with a BPE trained on it,
trains, and kills one worker or one whole node after a checkpoint (--revive starts the node again:
there may be no spare; with --replicas a node is killed once a step beyond that checkpoint has all
its replicas); with --twin it then trains the same job undisturbed. The last line of stdout is one
JSON object of figures. Exit status: 0, 1 if the job did not recover or its losses are not
the twin's (on a CPU, and with --deterministic), 2 if the cluster did not start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
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
CORPUS_BYTES = 24 << 20
JOB_TIMEOUT_S = 400.0


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
                "steps": arguments.steps,
                "global_batch_size": batch,
                "micro_batch_size": micro,
                "precision": precision,
                "deterministic": arguments.deterministic,
            },
            "schedule": {"warmup_steps": 4},
            "data": {
                "sources": [{"prefix": str(folder / "corpus")}],
                "tokenizer": {"kind": "bpe", "path": str(folder / "corpus.tokenizer.json")},
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


async def train(
    client: AsyncClient,
    machine: DemoCluster,
    arguments: argparse.Namespace,
    name: str,
    folder: Path,
    fault: str,
) -> tuple[Recording, float]:
    """Run a job to its end, with ``fault`` once after the first commit.

    Returns:
        The recording, and the time of the fault.
    """
    await client.submit(parse_job(job(arguments, name, folder)))
    recording, broken_at, committed, stored_step = Recording(name), 0.0, 0, 0

    def see(update: WatchJobResponse) -> None:
        nonlocal committed, stored_step
        if update.WhichOneof("update") == "event":
            if update.event.reason == "CHECKPOINT_COMMITTED":
                committed, stored_step = committed + 1, recording.last_step(1)
            print(
                f"{seconds(update.event.time):.3f} {update.event.reason} {update.event.message}",
                file=sys.stderr,
            )

    following = asyncio.create_task(recording.follow(client, see))
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while not following.done() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        if (
            fault != "none"
            and not broken_at
            and committed
            and recording.last_step(1) % arguments.interval >= 2
            and await has_replicas(client, arguments, name, stored_step)
        ):
            broken_at = await break_something(
                client, machine, name, folder, fault, revive=arguments.revive
            )
    if not following.done():
        following.cancel()
        why = (await client.explain(name)).explanation
        raise TimeoutError(f"{name} did not end within {JOB_TIMEOUT_S} s: {why}")
    await following
    return recording, broken_at


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
    client: AsyncClient, machine: DemoCluster, name: str, folder: Path, fault: str, *, revive: bool
) -> float:
    """SIGKILL the worker of rank 0, or its whole node, which is then revived; returns the time."""
    node = (await client.get(name)).nodes[0]
    if fault == "node":
        killed_at = (await machine.kill_node(node))[0]
        if revive:
            command = megascale("node", "start", node, "--detach", "--cluster", str(folder))
            process = await asyncio.create_subprocess_exec(*command)
            await process.wait()
        return killed_at
    pid = json.loads((folder / "nodes" / node / "pids.json").read_text())["rank-0"]
    os.kill(pid, signal.SIGKILL)
    return time.time()


def figures(arguments: argparse.Namespace, run: Recording, broken_at: float) -> dict[str, Any]:
    """Times, steps, losses and events of a recording, as plain values."""
    after = run.first_record(2)
    steady = [
        r
        for (attempt, step), r in run.records.items()
        if step % arguments.interval not in (0, 1, 2) and step > 4
    ]
    found = ("WORKER_EXITED", "NODE_DEAD")
    detected = [
        seconds(e.time) for e in run.events if e.reason in found and seconds(e.time) >= broken_at
    ]
    started = [
        seconds(e.time)
        for e in run.events
        if e.reason == "ATTEMPT_STARTED" and seconds(e.time) >= broken_at
    ]
    return {
        "attempts": run.attempts,
        "fault_to_detected_s": round(detected[0] - broken_at, 3) if detected else None,
        "detected_to_restarted_s": round(started[0] - detected[0], 3)
        if detected and started
        else None,
        "fault_to_first_new_step_s": round(seconds(after.completed_at) - broken_at, 3)
        if after
        else None,
        "steps_lost": run.last_step(1) - run.job.restored_step,
        "resumed_from_step": run.job.restored_step,
        "restore_source": run.job.restore_source,
        "tokens_per_s_median": statistics.median(r.tokens_per_s for r in steady),
        "step_time_s_median": statistics.median(r.step_time.ToMicroseconds() / 1e6 for r in steady),
        "mfu_causal_median": statistics.median(r.mfu_causal for r in steady),
        "mfu_full_median": statistics.median(r.mfu_full for r in steady),
        "first_loss": run.losses()[1],
        "final_loss": run.losses()[arguments.steps],
        "evicted_nodes": list(run.job.evicted_nodes),
        "events": [
            f"{seconds(e.time) - broken_at:+.3f} {e.reason} {e.message}" for e in run.events
        ],
    }


def restores(folder: Path, run: Recording) -> list[str]:
    """What each rank of the last attempt restored, from where, and what its start waited for."""
    logs = f"jobs/{run.name}/attempt-{run.job.attempt:06d}/rank-*.log"
    lines = (
        line
        for log in sorted(folder.glob(f"nodes/*/{logs}"))
        for line in log.read_text(errors="replace").splitlines()
    )
    return [line for line in lines if line.startswith(("restored step ", "ready to train"))]


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the cluster, train, and return the figures."""
    vocabulary = PRESETS[arguments.preset][3]
    await run_command(
        *("data", "tokenize", sysconfig.get_path("stdlib"), "--output", str(folder / "corpus")),
        *(
            "--glob",
            "**/*.py",
            "--max-bytes",
            str(CORPUS_BYTES),
            "--tokenizer",
            "bpe",
            "--vocab-size",
            str(vocabulary),
        ),
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
    machine = DemoCluster(plan, folder, lambda text: print(text, file=sys.stderr))
    await machine.start()
    try:
        async with AsyncClient.from_run_folder(folder) as client:
            run, broken_at = await train(client, machine, arguments, "run", folder, arguments.fault)
            result = figures(arguments, run, broken_at)
            result["restores"] = restores(folder, run)
            if arguments.twin:
                twin, _ = await train(client, machine, arguments, "twin", folder, "none")
                pairs = [(loss, twin.losses()[step]) for step, loss in run.losses().items()]
                result["twin_equal_losses"] = sum(a == b for a, b in pairs)
                result["twin_max_loss_abs_diff"] = max(abs(a - b) for a, b in pairs)
            return {"arguments": vars(arguments) | {"folder": None}, **result}
    finally:
        await machine.stop()


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
    parser.add_argument("--steps", type=int, default=40)
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
        try:
            found = asyncio.run(measure(arguments, folder))
        except TimeoutError as problem:
            print(json.dumps({"arguments": vars(arguments), "failed": str(problem)}, default=str))
            return 1
        except (DemoFailed, OSError) as problem:
            print(f"recovery.py: {problem}", file=sys.stderr)
            return 2
    print(json.dumps(found, default=str))
    return 0 if holds(arguments, found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
