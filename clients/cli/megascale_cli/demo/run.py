"""The demo, in the order in which it happens."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from rich.markup import escape

from megascale_cli.demo import render
from megascale_cli.demo.claims import (
    FIRST,
    SECOND,
    DemoReport,
    Kill,
    make_report,
    recovery_claims,
    twin_claims,
)
from megascale_cli.demo.cluster import DemoCluster, DemoFailed, Echo, fresh_folder
from megascale_cli.demo.corpus import tokenise
from megascale_cli.demo.plan import DemoPlan
from megascale_cli.demo.recording import Recording
from megascale_cli.demo.render import require, require_nothing_left
from megascale_cli.output import event_text, step_text
from megascale_cli.visible import counted
from megascale_client import AsyncClient, MegascaleError, NodeLiveness, parse_job
from megascale_client.messages import WatchJobResponse

# A job may train for as long as the machine needs; without a new step, event or phase for this
# long it has failed.
STANDSTILL_S = 120.0
PROGRESS_POLL_S = 0.1
COMMIT_POLL_S = 0.1
SHOW_EVERY_STEPS = 4

Result = TypeVar("Result")


class Demo:
    """One demo in ``folder``.

    Args:
        echo: prints rich markup.
        recovery_timeout_s: how long there may be no progress after the kill.
    """

    def __init__(self, plan: DemoPlan, folder: Path, echo: Echo, recovery_timeout_s: float) -> None:
        self.plan = plan
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._echo = echo
        self._recovery_timeout_s = recovery_timeout_s
        self._started = time.monotonic()
        self._corpus = Path()

    async def run(self) -> DemoReport:
        """Run the whole demo; returns the report when everything was observed.

        Raises:
            DemoFailed: something was not observed; the message names it.
            MegascaleError: the cluster refused a call or did not answer.
        """
        fresh_folder(self.folder)
        self._corpus = await tokenise(self.folder, self._echo)
        cluster = DemoCluster(self.plan, self.folder, self._echo)
        try:
            await cluster.start()
            async with AsyncClient.from_run_folder(self.folder) as client:
                report = await self._train(client, cluster)
        finally:
            left = await cluster.stop()
        require_nothing_left(left, self._echo)
        return report

    async def _train(self, client: AsyncClient, cluster: DemoCluster) -> DemoReport:
        run = Recording(self.name)
        kill = await self._interrupted(client, cluster, run)
        warm = await _incarnations(client)
        require(recovery_claims(self.plan, run, kill), self._echo)
        twin = Recording(f"{self.name}-twin")
        self._echo(f"now the uninterrupted twin {twin.name} on the same nodes")
        await self._submit(client, twin.name)
        await self._while_moving(
            STANDSTILL_S, twin.follow(client, self._show), "the twin did not finish", client, twin
        )
        after = await _incarnations(client)
        same_nodes = all(
            warm.get(node) == after.get(node) for node in twin.nodes_of_attempt.get(FIRST, ["none"])
        )
        if self.plan.sabotage == "loss":
            _change_one_loss(twin)
        nodes = [node.name async for node in client.nodes()]
        report = make_report(self.plan, run, twin, kill, nodes, time.monotonic() - self._started)
        self._show_results(run, twin, kill, report)
        require(twin_claims(self.plan, run, twin, same_nodes), self._echo)
        return report

    async def _interrupted(
        self, client: AsyncClient, cluster: DemoCluster, run: Recording
    ) -> Kill | None:
        """Train until the second commit, kill a node, and wait for the job to end."""
        await self._submit(client, run.name)
        following = asyncio.create_task(run.follow(client, self._show))
        try:
            waiting = self._commits(client, run)
            commits = await self._while_moving(
                STANDSTILL_S, waiting, "no two checkpoints were completed", client, run
            )
            kill = None
            if self.plan.sabotage != "no-kill" and not run.ended:
                kill = await self._kill(cluster, run, commits)
            why = "the job did not resume and finish" if kill else "the job did not finish"
            await self._while_moving(self._recovery_timeout_s, following, why, client, run)
        finally:
            following.cancel()
        return kill

    async def _submit(self, client: AsyncClient, name: str) -> None:
        spec = parse_job(self.plan.job(name, self._corpus, self.folder / "checkpoints" / name))
        await client.submit(spec)
        plan = self.plan
        layout = f"TP{plan.tp} x PP{plan.pp} x DP{plan.dp}"
        self._echo(
            f"job {name}: {counted(plan.world_size, f'{plan.device} rank')} ({layout}), "
            f"{counted(plan.steps, 'step')}, "
            f"a checkpoint every {plan.interval_steps}"
        )

    async def _commits(self, client: AsyncClient, run: Recording) -> tuple[int, ...]:
        """Wait until a kill would lose steps; returns the steps of all complete checkpoints."""
        while not run.ended:
            await asyncio.sleep(COMMIT_POLL_S)
            steps = sorted([checkpoint.step async for checkpoint in client.checkpoints(run.name)])
            if self.plan.kill_loses_steps(len(steps), run.last_step(FIRST)):
                return tuple(steps)
        return tuple(sorted([checkpoint.step async for checkpoint in client.checkpoints(run.name)]))

    async def _kill(self, cluster: DemoCluster, run: Recording, commits: tuple[int, ...]) -> Kill:
        # The node of rank 0 is the hardest one to lose: the rendezvous store and the committer run
        # there.
        node = run.nodes_of_attempt[FIRST][0]
        self._echo(
            f"[bold red]SIGKILL to every process of node {node}[/bold red] "
            f"after step {run.last_step(FIRST)}"
        )
        killed_at, processes, left = await cluster.kill_node(node)
        return Kill(killed_at, node, commits, processes, left)

    async def _while_moving(
        self,
        limit_s: float,
        waiting: Awaitable[Result],
        why: str,
        client: AsyncClient,
        run: Recording,
    ) -> Result:
        """Wait while ``run`` makes progress. Raises DemoFailed after ``limit_s`` without any."""
        task = asyncio.ensure_future(waiting)
        progress, moved_s = run.progress, time.monotonic()
        try:
            while time.monotonic() - moved_s < limit_s:
                done, _ = await asyncio.wait({task}, timeout=PROGRESS_POLL_S)
                if done:
                    return task.result()
                if run.progress != progress:
                    progress, moved_s = run.progress, time.monotonic()
        finally:
            task.cancel()
        try:
            explanation = (await client.explain(run.name)).explanation
        except MegascaleError as error:
            explanation = str(error)
        raise DemoFailed(f"{why}: no progress for {limit_s:g} s: {explanation}")

    def _show(self, update: WatchJobResponse) -> None:
        kind = update.WhichOneof("update")
        if kind == "event":
            self._echo(event_text(update.event))
        elif kind == "step" and (update.step.step % SHOW_EVERY_STEPS == 0 or update.step.step == 1):
            self._echo(step_text(update.step, self.plan.steps))

    def _show_results(
        self, run: Recording, twin: Recording, kill: Kill | None, report: DemoReport
    ) -> None:
        file = self.folder / "report.json"
        file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        killed_at_step = (
            run.last_step(FIRST) if kill is not None and run.attempts >= SECOND else None
        )
        self._echo("\n[bold]timeline[/bold]")
        for line in render.timeline(run, kill):
            self._echo(escape(line))
        self._echo("\n[bold]loss[/bold]")
        for line in render.curve(run.losses(), killed_at_step, report.resumed_from_step):
            self._echo(line)
        picture = self.folder / "loss.png"
        problem = render.write_png(picture, run, twin, killed_at_step)
        self._echo(f"no picture: {problem}" if problem else f"picture: {picture}")
        self._echo(f"report: {file}\n")


async def _incarnations(client: AsyncClient) -> dict[str, str]:
    alive = NodeLiveness.ALIVE
    return {node.name: node.incarnation async for node in client.nodes() if node.liveness == alive}


def _change_one_loss(recording: Recording) -> None:
    """Sabotage: change one loss in the middle by the smallest step of a double."""
    attempt, step = sorted(recording.records)[len(recording.records) // 2]
    record = recording.records[attempt, step]
    record.loss = math.nextafter(record.loss, math.inf)
