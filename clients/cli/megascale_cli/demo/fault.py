"""`megascale demo --show-hang` and `--show-straggler`: the fault, the page, the sentence.

Four CPU ranks on four nodes train a small GPT. One rank hangs, or is stopped again and again while
it computes. The demo waits until the cluster has named it, shows the page of the dashboard that
says so and the sentence, and ends. It fails where another rank is named, or none.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from megascale.v1 import types_pb2
from megascale_cli.demo.cluster import (
    RUN_S,
    Dashboard,
    DemoCluster,
    DemoFailed,
    Echo,
    node_processes,
    send,
    slowed,
)
from megascale_cli.demo.plan import FAULT_HANG_FLOOR_S, FaultPlan
from megascale_cli.demo.recording import FIRST, SECOND, Claim, Demo, Recording, require, seconds
from megascale_cli.output import event_text
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
# A shorter limit for a step than the minute of a large job.
OPTIONS = ("--heartbeat-interval-s", "1", "--hang-floor-s", str(FAULT_HANG_FLOOR_S))


class FaultDemo(Demo):
    """One such demo; ``sabotage`` leaves the fault out, so that nothing is named.

    In its report ``page`` is a link and ``page_says`` the sentence there ("" without dashboard),
    ``named_ranks`` what the event names, ``restarted`` whether the job trained again.
    """

    def __init__(
        self, fault: Fault, folder: Path, echo: Echo, timeout_s: float, *, sabotage: bool
    ) -> None:
        plan = FaultPlan(pipeline=fault == "hang")
        super().__init__(plan, folder, echo, timeout_s)
        self._cluster = DemoCluster(plan, self.folder, echo, *OPTIONS, dashboard=True)
        self._fault = fault
        self._sabotage = sabotage
        self._run = Recording(self.name)

    async def _show(self) -> dict[str, Any]:
        page, run = await self._cluster.dashboard(), self._run
        await self._submit(run.name, self.folder / "checkpoints")
        following = asyncio.create_task(run.follow(self._client, self._print))
        try:
            trains = f"the job did not train {STEPS_BEFORE} steps"
            await self._until(lambda: run.last_step(FIRST) >= STEPS_BEFORE, trains)
            node = run.nodes_of_attempt[FIRST][CULPRIT]
            show = self._hang if self._fault == "hang" else self._straggler
            found = await show(page, node, node_processes(self.folder, node)[f"rank-{CULPRIT}"])
            self._echo(f"[bold]the sentence[/bold]: {escape(found['sentence'])}")
            wall_s = round(time.monotonic() - self._started, 1)
            report = {"fault": self._fault, "rank": CULPRIT, "node": node, **found}
            report["wall_s"] = wall_s
            self._echo(f"report: {self._write(report)}")
            require(self._claims(report, page), self._echo)
            await self._client.cancel(run.name, reason="the demo is over")
        finally:
            following.cancel()
        return report

    async def _hang(self, page: Dashboard | None, node: str, pid: int) -> dict[str, Any]:
        run, began_s = self._run, time.time()
        if not self._sabotage:
            began_s = await self._stop_outside_operations(pid)
            self._echo(
                f"[bold red]SIGSTOP to rank {CULPRIT} on node {node}[/bold red]: it hangs, all "
                "processes live, and no error is raised anywhere"
            )
        await self._until_async(self._stands_still, "nothing says that the job stands still")
        for place in (await self._client.topology(run.name)).ranks:
            waits = ", ".join(map(str, place.waits_for))
            what = f"inside {', '.join(place.inside)}" if place.inside else "inside no operation"
            mark = " [red]holds the others up[/red]" if place.holds_up else ""
            self._echo(
                f"  rank {place.rank} on {place.node}: {what}{waits and ', waits for '}"
                f"{waits}{mark}"
            )
        link, says = "", ""
        if page is not None:
            path = f"/jobs/{run.name}/ranks"
            shown = await page.read(path)
            link, says = page.link(path), str(shown["standstill"])
            if shown["state"][CULPRIT] != "culprit":
                says = f"(rank {CULPRIT} is not marked) {says}"
            self._show_page(link, says)
        verdict = await self._event()
        trained = f"the job did not train again after {verdict.reason}"
        await self._until(lambda: run.last_step(SECOND) > 0, trained)
        suspects = [item for item in verdict.evidence if item.digest.startswith("suspect")]
        named = [int(item.source.rpartition("/")[2]) for item in suspects]
        return _found(verdict, named, link, says, began_s) | {"restarted": True}

    async def _straggler(self, page: Dashboard | None, node: str, pid: int) -> dict[str, Any]:
        run, began_s = self._run, time.time()
        if self._sabotage:
            verdict = await self._event()
        else:
            times_s = [record.step_time.ToNanoseconds() / 1e9 for record in run.records.values()]
            stopped_s = STOPPED_SHARE * statistics.median(times_s)
            self._echo(
                f"[bold red]rank {CULPRIT} on node {node} is slowed down[/bold red]: it runs for "
                f"{RUN_S * 1e3:.0f} ms at a time, then it is stopped for {stopped_s * 1e3:.0f} ms"
            )
            async with slowed(pid, stopped_s):
                verdict = await self._event()
        link, says = "", ""
        if page is not None:
            path = f"/jobs/{run.name}/heat"
            shown = await page.read(path)
            link, says = page.link(path), "; ".join(str(s["sentence"]) for s in shown["slow"])
            self._show_page(link, says)
        slow = {event.subject.removeprefix("nodes/") for event in self._events()}
        named = [rank for rank, name in enumerate(run.nodes_of_attempt[FIRST]) if name in slow]
        return _found(verdict, named, link, says, began_s) | {"restarted": False}

    async def _stop_outside_operations(self, pid: int) -> float:
        """Stop the rank in its own code; returns when, in Unix seconds.

        One that is stopped inside of an operation cannot be told from a network that fails.
        """
        for _ in range(MAX_STOPS):
            send(pid, signal.SIGSTOP)
            began_s = time.time()
            await asyncio.sleep(STILL_S)
            place = (await self._client.topology(self.name)).ranks[CULPRIT]
            if place.operations and not place.inside:
                return began_s
            send(pid, signal.SIGCONT)
            step = self._run.last_step(FIRST)
            await self._until(lambda: self._run.last_step(FIRST) > step, "no step followed")  # noqa: B023
        raise DemoFailed(f"rank {CULPRIT} was inside an operation each of {MAX_STOPS} times")

    async def _stands_still(self) -> bool:
        topology = await self._client.topology(self.name)
        return bool(topology.standstill) or bool(self._events())

    def _events(self) -> list[types_pb2.Event]:
        return [event for event in self._run.events if event.reason == REASONS[self._fault]]

    async def _event(self) -> types_pb2.Event:
        why = f"there was no event {REASONS[self._fault]}"
        await self._until(lambda: bool(self._events()), why)
        return self._events()[0]

    def _claims(self, report: dict[str, Any], page: Dashboard | None) -> list[Claim]:
        rank, sentence, says = f"rank {CULPRIT}", report["sentence"], report["page_says"]
        named = rank in sentence and report["node"] in sentence
        marked = rank in says and "not marked" not in says
        claims = [
            Claim(
                f"the event names {rank}, and it alone", report["named"], str(report["named_ranks"])
            ),
            Claim(f"its sentence has {rank} and its node", named, sentence),
        ]
        return claims if page is None else [*claims, Claim(f"the page names {rank}", marked, says)]

    def _show_page(self, link: str, says: str) -> None:
        self._echo(f"[bold]the page[/bold]: {escape(link)}")
        self._echo(f"  {escape(says)}")

    def _print(self, update: WatchJobResponse) -> None:
        if update.WhichOneof("update") == "event":
            self._echo(event_text(update.event))

    async def _until(self, ready: Callable[[], bool], why: str) -> None:
        async def asked() -> bool:
            return ready()

        await self._until_async(asked, why)

    async def _until_async(self, ready: Callable[[], Awaitable[bool]], why: str) -> None:
        """Poll until ``ready``. Raises DemoFailed once ``timeout_s`` have passed."""
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s and not self._run.ended:
            if await ready():
                return
            await asyncio.sleep(POLL_S)
        raise await self._failed(f"{why} within {self._timeout_s:g} s", self._run)


def _found(
    verdict: types_pb2.Event, named: list[int], link: str, says: str, began_s: float
) -> dict[str, Any]:
    """What the report says of the verdict and the page."""
    return {
        "named": named == [CULPRIT],
        "named_ranks": named,
        "sentence": verdict.message,
        "page": link,
        "page_says": says,
        "fault_to_named_s": round(seconds(verdict.time) - began_s, 3),
    }
