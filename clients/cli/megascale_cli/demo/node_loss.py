"""The demo of a lost node, in the order in which it happens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from rich.markup import escape

from megascale_cli.demo import render
from megascale_cli.demo.claims import Kill, make_report, recovery_claims, twin_claims
from megascale_cli.demo.cluster import Echo
from megascale_cli.demo.plan import DemoPlan
from megascale_cli.demo.recording import FIRST, SECOND, Demo, Recording, require
from megascale_cli.output import event_text, step_text
from megascale_client import NodeLiveness
from megascale_client.messages import WatchJobResponse

# A job may train for as long as the machine needs; without a new step, event or phase for this
# long it has failed.
STANDSTILL_S = 120.0
POLL_S = 0.1
SHOW_EVERY_STEPS = 4

Result = TypeVar("Result")


class NodeLossDemo(Demo):
    """A node is killed; the spare takes over, and an uninterrupted twin has the same losses."""

    def __init__(self, plan: DemoPlan, folder: Path, echo: Echo, timeout_s: float) -> None:
        super().__init__(plan, folder, echo, timeout_s)
        self.plan = plan

    async def _show(self) -> dict[str, Any]:
        run = Recording(self.name)
        kill = await self._interrupted(run)
        warm = await self._incarnations()
        require(recovery_claims(self.plan, run, kill), self._echo)
        twin = Recording(f"{self.name}-twin")
        self._echo(f"now the uninterrupted twin {twin.name} on the same nodes")
        await self._submit(twin.name, self.folder / "checkpoints" / twin.name)
        following = twin.follow(self._client, self._print)
        await self._while_moving(STANDSTILL_S, following, "the twin did not finish", twin)
        after = await self._incarnations()
        used = twin.nodes_of_attempt.get(FIRST, ["none"])
        same_nodes = all(warm.get(node) == after.get(node) for node in used)
        if self.plan.sabotage == "loss":
            _change_one_loss(twin)
        nodes = [node.name async for node in self._client.nodes()]
        report = make_report(self.plan, run, twin, kill, nodes)
        report["wall_s"] = round(time.monotonic() - self._started, 3)
        self._show_results(run, twin, kill, report)
        require(twin_claims(self.plan, run, twin, same_nodes), self._echo)
        return report

    async def _interrupted(self, run: Recording) -> Kill | None:
        """Train until the second commit, kill a node, and wait for the job to end."""
        await self._submit(run.name, self.folder / "checkpoints" / run.name)
        following = asyncio.create_task(run.follow(self._client, self._print))
        try:
            why = "no two checkpoints were completed"
            commits = await self._while_moving(STANDSTILL_S, self._commits(run), why, run)
            kill = None
            if self.plan.sabotage != "no-kill" and not run.ended:
                kill = await self._kill(run, commits)
            why = "the job did not resume and finish" if kill else "the job did not finish"
            await self._while_moving(self._timeout_s, following, why, run)
        finally:
            following.cancel()
        return kill

    async def _commits(self, run: Recording) -> tuple[int, ...]:
        """Wait until a kill would lose steps; returns the steps of all complete checkpoints."""
        while True:
            ended = run.ended
            steps = sorted([found.step async for found in self._client.checkpoints(run.name)])
            if ended or self.plan.kill_loses_steps(len(steps), run.last_step(FIRST)):
                return tuple(steps)
            await asyncio.sleep(POLL_S)

    async def _kill(self, run: Recording, commits: tuple[int, ...]) -> Kill:
        # The node of rank 0 is the hardest one to lose: the rendezvous store and the committer run
        # there.
        node = run.nodes_of_attempt[FIRST][0]
        self._echo(
            f"[bold red]SIGKILL to every process of node {node}[/bold red] "
            f"after step {run.last_step(FIRST)}"
        )
        killed_at, processes, left = await self._cluster.kill_node(node)
        return Kill(killed_at, node, commits, processes, left)

    async def _while_moving(
        self, limit_s: float, waiting: Awaitable[Result], why: str, run: Recording
    ) -> Result:
        """Wait while ``run`` makes progress. Raises DemoFailed after ``limit_s`` without any."""
        task = asyncio.ensure_future(waiting)
        progress, moved_s = run.progress, time.monotonic()
        try:
            while time.monotonic() - moved_s < limit_s:
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    return task.result()
                if run.progress != progress:
                    progress, moved_s = run.progress, time.monotonic()
        finally:
            task.cancel()
        raise await self._failed(f"{why}: no progress for {limit_s:g} s", run)

    async def _incarnations(self) -> dict[str, str]:
        nodes = [node async for node in self._client.nodes()]
        return {n.name: n.incarnation for n in nodes if n.liveness == NodeLiveness.ALIVE}

    def _print(self, update: WatchJobResponse) -> None:
        kind = update.WhichOneof("update")
        if kind == "event":
            self._echo(event_text(update.event))
        elif kind == "step" and (update.step.step % SHOW_EVERY_STEPS == 0 or update.step.step == 1):
            self._echo(step_text(update.step, self.plan.steps))

    def _show_results(
        self, run: Recording, twin: Recording, kill: Kill | None, report: dict[str, Any]
    ) -> None:
        file = self._write(report)
        resumed = kill is not None and run.attempts >= SECOND
        killed_at_step = run.last_step(FIRST) if resumed else None
        self._echo("\n[bold]timeline[/bold]")
        for line in render.timeline(run, kill):
            self._echo(escape(line))
        self._echo("\n[bold]loss[/bold]")
        for line in render.curve(run.losses(), killed_at_step, report["resumed_from_step"]):
            self._echo(line)
        picture = self.folder / "loss.png"
        problem = render.write_png(picture, run, twin, killed_at_step)
        self._echo(f"no picture: {problem}" if problem else f"picture: {picture}")
        self._echo(f"report: {file}\n")


def _change_one_loss(recording: Recording) -> None:
    """Sabotage: change one loss in the middle by the smallest step of a double."""
    record = recording.records[sorted(recording.records)[len(recording.records) // 2]]
    record.loss = math.nextafter(record.loss, math.inf)
