"""`megascale demo --show-hang` and `--show-straggler`: the fault, the page, the sentence.

Four CPU ranks on four nodes train a small GPT. One rank hangs, or is stopped again and again while
it computes. The demo waits until the cluster has named it, shows the page of the dashboard that
says so and the sentence, and ends. It fails where another rank is named, or none.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from megascale.v1 import types_pb2
from megascale_cli.demo.claims import Claim
from megascale_cli.demo.cluster import DemoCluster, DemoFailed, Echo, fresh_folder, node_processes
from megascale_cli.demo.corpus import tokenise
from megascale_cli.demo.fault import RUN_S, go_on, slowed, stop
from megascale_cli.demo.page import Dashboard
from megascale_cli.demo.plan import FaultPlan
from megascale_cli.demo.recording import Recording, seconds
from megascale_cli.demo.render import require, require_nothing_left
from megascale_cli.output import event_text
from megascale_client import AsyncClient, MegascaleError, parse_job
from megascale_client.messages import WatchJobResponse

Fault = Literal["hang", "straggler"]

CULPRIT = 2  # a rank in the middle of both layouts
STEPS_BEFORE = 40  # the job's pace is known then
POLL_S = 0.25
# Of a step: on a busy machine ranks wait for a processor as well, and a stop has to stand out.
STOPPED_SHARE = 0.5
STILL_S = 2.5  # after which the heartbeats of a stopped rank show what it is inside of
MAX_STOPS = 20  # tries to stop it outside of an operation
REASONS = {"hang": "HANG_SUSPECTED", "straggler": "STRAGGLER"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """report.json. ``page`` is a link, ``page_says`` the sentence there ("" without dashboard).

    ``named_ranks`` is what the event names, ``restarted`` whether the job trained again.
    """

    fault: Fault
    rank: int
    node: str
    named: bool
    named_ranks: list[int]
    sentence: str
    page: str
    page_says: str
    fault_to_named_s: float | None
    restarted: bool
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class FaultDemo:
    """One such demo in ``folder``.

    Args:
        echo: prints rich markup.
        timeout_s: how long each part may take without progress.
        sabotage: leave the fault out, so that nothing is named.
    """

    def __init__(
        self, fault: Fault, folder: Path, echo: Echo, timeout_s: float, *, sabotage: bool = False
    ) -> None:
        self._fault, self._folder, self._echo = fault, folder.resolve(), echo
        self._timeout_s, self._sabotage = timeout_s, sabotage
        self._plan = FaultPlan(pipeline=fault == "hang")
        self._started_s = time.monotonic()

    async def run(self) -> FaultReport:
        """Run it; returns the report when the culprit was named.

        Raises:
            DemoFailed: something was not observed; the message names it.
            MegascaleError: the cluster refused a call or did not answer.
        """
        fresh_folder(self._folder)
        corpus = await tokenise(self._folder, self._echo)
        cluster = DemoCluster(
            self._plan, self._folder, self._echo, *self._plan.options, dashboard=True
        )
        try:
            await cluster.start()
            url = await cluster.dashboard_url()
            page = Dashboard(url, self._folder) if url else None
            async with AsyncClient.from_run_folder(self._folder) as client:
                report = await self._show(client, page, corpus)
        finally:
            left = await cluster.stop()
        require_nothing_left(left, self._echo)
        return report

    async def _show(self, client: AsyncClient, page: Dashboard | None, corpus: Path) -> FaultReport:
        name = self._folder.name
        await client.submit(parse_job(self._plan.job(name, corpus, self._folder / "checkpoints")))
        self._echo(f"job {name}: {self._plan.text}")
        run = Recording(name)
        following = asyncio.create_task(run.follow(client, self._print))
        try:
            trains = f"the job did not train {STEPS_BEFORE} steps"
            await self._until(lambda: run.last_step(1) >= STEPS_BEFORE, trains, client, run)
            node = run.nodes_of_attempt[1][CULPRIT]
            show = self._hang if self._fault == "hang" else self._straggler
            report = await show(client, page, run, node)
            file = self._folder / "report.json"
            file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
            self._echo(f"report: {file}")
            require(self._claims(report, page), self._echo)
            await client.cancel(name, reason="the demo is over")
        finally:
            following.cancel()
        return report

    async def _hang(
        self, client: AsyncClient, page: Dashboard | None, run: Recording, node: str
    ) -> FaultReport:
        pid = node_processes(self._folder, node)[f"rank-{CULPRIT}"]
        began_s = time.time()
        if not self._sabotage:
            began_s = await self._stop_outside_operations(client, run, pid)
            self._echo(
                f"[bold red]SIGSTOP to rank {CULPRIT} on node {node}[/bold red]: it hangs, all "
                "processes live, and no error is raised anywhere"
            )
        link, says = "", ""
        stands = "nothing says that the job stands still"
        await self._until_async(lambda: self._stands_still(client, run), stands, client, run)
        topology = await client.topology(run.name)
        for place in topology.ranks:
            waits = ", ".join(map(str, place.waits_for))
            what = f"inside {', '.join(place.inside)}" if place.inside else "inside no operation"
            mark = " [red]holds the others up[/red]" if place.holds_up else ""
            self._echo(
                f"  rank {place.rank} on {place.node}: {what}{waits and ', waits for '}"
                f"{waits}{mark}"
            )
        if page is not None:
            path = f"/jobs/{run.name}/ranks"
            shown = await page.read(path)
            link, says = page.link(path), str(shown["standstill"])
            if shown["state"][CULPRIT] != "culprit":
                says = f"(rank {CULPRIT} is not marked) {says}"
            self._show_page(link, says)
        verdict = await self._event(client, run)
        trained = f"the job did not train again after {verdict.reason}"
        await self._until(lambda: run.last_step(2) > 0, trained, client, run)
        named = [
            int(item.source.rpartition("/")[2])
            for item in verdict.evidence
            if item.digest.startswith("suspect")
        ]
        return self._report(node, verdict, named, link, says, began_s, restarted=True)

    async def _straggler(
        self, client: AsyncClient, page: Dashboard | None, run: Recording, node: str
    ) -> FaultReport:
        pid = node_processes(self._folder, node)[f"rank-{CULPRIT}"]
        began_s = time.time()
        if self._sabotage:
            verdict = await self._event(client, run)
        else:
            stopped_s = STOPPED_SHARE * _pace_s(run)
            self._echo(
                f"[bold red]rank {CULPRIT} on node {node} is slowed down[/bold red]: it runs for "
                f"{RUN_S * 1e3:.0f} ms at a time, then it is stopped for {stopped_s * 1e3:.0f} ms"
            )
            async with slowed(pid, stopped_s):
                verdict = await self._event(client, run)
        link, says = "", ""
        if page is not None:
            path = f"/jobs/{run.name}/heat"
            shown = await page.read(path)
            link = page.link(path)
            says = "; ".join(str(slow["sentence"]) for slow in shown["slow"])
            self._show_page(link, says)
        ranks = run.nodes_of_attempt[1]
        slow = {event.subject.removeprefix("nodes/") for event in self._events(run)}
        named = [rank for rank, name in enumerate(ranks) if name in slow]
        return self._report(node, verdict, named, link, says, began_s, restarted=False)

    async def _stop_outside_operations(
        self, client: AsyncClient, run: Recording, pid: int
    ) -> float:
        """Stop the rank in its own code; returns when, in Unix seconds.

        One that is stopped inside of an operation cannot be told from a network that fails.
        """
        for _ in range(MAX_STOPS):
            stop(pid)
            began_s = time.time()
            await asyncio.sleep(STILL_S)
            places = (await client.topology(run.name)).ranks
            if places[CULPRIT].operations and not places[CULPRIT].inside:
                return began_s
            go_on(pid)
            moved = partial(_is_beyond, run, run.last_step(1))
            await self._until(moved, "no step followed", client, run)
        raise DemoFailed(f"rank {CULPRIT} was inside an operation each of {MAX_STOPS} times")

    async def _stands_still(self, client: AsyncClient, run: Recording) -> bool:
        topology = await client.topology(run.name)
        return bool(topology.standstill) or bool(self._events(run))

    def _events(self, run: Recording) -> list[types_pb2.Event]:
        return [event for event in run.events if event.reason == REASONS[self._fault]]

    async def _event(self, client: AsyncClient, run: Recording) -> types_pb2.Event:
        why = f"there was no event {REASONS[self._fault]}"
        await self._until(lambda: bool(self._events(run)), why, client, run)
        return self._events(run)[0]

    def _report(
        self,
        node: str,
        verdict: types_pb2.Event,
        named: list[int],
        link: str,
        says: str,
        began_s: float,
        *,
        restarted: bool,
    ) -> FaultReport:
        self._echo(f"[bold]the sentence[/bold]: {escape(verdict.message)}")
        return FaultReport(
            fault=self._fault,
            rank=CULPRIT,
            node=node,
            named=named == [CULPRIT],
            named_ranks=named,
            sentence=verdict.message,
            page=link,
            page_says=says,
            fault_to_named_s=round(seconds(verdict.time) - began_s, 3),
            restarted=restarted,
            wall_s=round(time.monotonic() - self._started_s, 1),
        )

    def _claims(self, report: FaultReport, page: Dashboard | None) -> list[Claim]:
        rank = f"rank {CULPRIT}"
        claims = [
            Claim(f"the event names {rank}, and it alone", report.named, str(report.named_ranks)),
            Claim(
                f"its sentence has {rank} and its node",
                rank in report.sentence and report.node in report.sentence,
                report.sentence,
            ),
        ]
        if page is not None:
            says = rank in report.page_says and "not marked" not in report.page_says
            claims.append(Claim(f"the page names {rank}", says, report.page_says))
        return claims

    def _show_page(self, link: str, says: str) -> None:
        self._echo(f"[bold]the page[/bold]: {escape(link)}")
        self._echo(f"  {escape(says)}")

    def _print(self, update: WatchJobResponse) -> None:
        if update.WhichOneof("update") == "event":
            self._echo(event_text(update.event))

    async def _until(
        self, ready: Callable[[], bool], why: str, client: AsyncClient, run: Recording
    ) -> None:
        async def asked() -> bool:
            return ready()

        await self._until_async(asked, why, client, run)

    async def _until_async(
        self,
        ready: Callable[[], Awaitable[bool]],
        why: str,
        client: AsyncClient,
        run: Recording,
    ) -> None:
        """Poll until ``ready``. Raises DemoFailed once ``timeout_s`` have passed."""
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s and not run.ended:
            if await ready():
                return
            await asyncio.sleep(POLL_S)
        try:
            explanation = (await client.explain(run.name)).explanation
        except MegascaleError as error:
            explanation = str(error)
        raise DemoFailed(f"{why} within {self._timeout_s:g} s: {explanation}")


def _pace_s(run: Recording) -> float:
    """Median time of the steps so far."""
    return statistics.median(
        record.step_time.ToNanoseconds() / 1e9 for record in run.records.values()
    )


def _is_beyond(run: Recording, step: int) -> bool:
    return run.last_step(1) > step
