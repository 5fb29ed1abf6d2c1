"""`megascale demo --show-hang` and `--show-straggler`: the fault, the page, the sentence.

Four CPU ranks on four nodes train a small GPT. One rank hangs, or is stopped again and again while
it computes. The demo waits until the cluster has named it, shows the page of the dashboard that
reports it and the sentence, and ends. It fails if another rank is named, or none.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.demo.cluster import (
    RUN_S,
    DemoFailed,
    Echo,
    node_processes,
    page_link,
    read_page,
    send,
    slowed,
)
from megascale_cli.demo.plan import fault_plan
from megascale_cli.demo.recording import (
    FIRST,
    POLL_S,
    SECOND,
    Claim,
    Demo,
    Recording,
    require,
    seconds,
)
from megascale_cli.output import table_lines
from megascale_cli.performance import COLUMNS, place_row
from megascale_job.visible import counted

Fault = Literal["hang", "straggler"]

CULPRIT = 2  # a rank in the middle of both layouts
STEPS_BEFORE = 40  # the job's pace is known then
# Of a step: on a busy machine ranks wait for a processor as well, and a stop has to stand out.
STOPPED_SHARE = 0.5
STILL_S = 2.5  # after which the heartbeats of a stopped rank show what it is inside of
MAX_STOPS = 20  # tries to stop it outside of an operation
REASONS = {"hang": "HANG_SUSPECTED", "straggler": "STRAGGLER"}
# A shorter limit for a step than the minute of a large job: time to look at the page before the
# job is restarted.
OPTIONS = ("--heartbeat-interval-s", "1", "--hang-floor-s", "15", "--dashboard")


class FaultDemo(Demo):
    """One such demo; ``sabotage`` leaves the fault out, so that nothing is named.

    In its report ``page`` is a link and ``page_says`` the sentence there ("" without dashboard),
    ``named_ranks`` what the event names, ``restarted`` whether the job trained again.
    """

    def __init__(
        self, fault: Fault, folder: Path, echo: Echo, timeout_s: float, *, sabotage: bool
    ) -> None:
        super().__init__(fault_plan(pipeline=fault == "hang"), folder, echo, timeout_s, *OPTIONS)
        self._fault = fault
        self._sabotage = sabotage
        self._run = Recording(self.name)

    async def _show(self) -> dict[str, Any]:
        dashboard, run, hangs = await self._cluster.dashboard(), self._run, self._fault == "hang"
        following = await self._submit(run)
        try:
            await self._steps(STEPS_BEFORE)
            node = run.nodes_of_attempt[FIRST][CULPRIT]
            pid = node_processes(self.folder, node)[f"rank-{CULPRIT}"]
            began_s = await (self._hang(node, pid) if hangs else self._straggle(node, pid))
            link, says = await self._page(dashboard) if dashboard else ("", "")
            verdict = await self._event()
            self._echo(f"[bold]the sentence[/bold]: {escape(verdict.message)}")
            if hangs:
                trained = f"the job did not train again after {verdict.reason}"
                await self._until(lambda: run.last_step(SECOND) > 0, trained, run)
            named = self._named(verdict)
            report = {
                "fault": self._fault,
                "rank": CULPRIT,
                "node": node,
                "named": named == [CULPRIT],
                "named_ranks": named,
                "sentence": verdict.message,
                "page": link,
                "page_says": says,
                "fault_to_named_s": round(seconds(verdict.time) - began_s, 3),
                "restarted": hangs,
            }
            self._write(report)
            self._require(report)
            await self._client.cancel(run.name, reason="the demo is over")
        finally:
            following.cancel()
        return report

    async def _hang(self, node: str, pid: int) -> float:
        """Stop the rank and show where all ranks stand still; returns when it was stopped."""
        began_s = time.time()
        if not self._sabotage:
            began_s = await self._stop_outside_operations(pid)
            self._echo(
                f"[bold red]SIGSTOP to rank {CULPRIT} on node {node}[/bold red]: it hangs, all "
                "processes live, and no error is raised anywhere"
            )
        why = "nothing says that the job stands still"
        places = await self._within(self._timeout_s, self._standstill(), why, self._run)
        for line in table_lines(COLUMNS, map(place_row, places)):
            self._echo(f"  {line}")
        return began_s

    async def _straggle(self, node: str, pid: int) -> float:
        """Slow the rank down until it is named; returns when that began."""
        began_s = time.time()
        if self._sabotage:
            await self._event()
            return began_s
        records = self._run.records.values()
        step_s = statistics.median(record.step_time.ToNanoseconds() / 1e9 for record in records)
        stopped_s = STOPPED_SHARE * step_s
        self._echo(
            f"[bold red]rank {CULPRIT} on node {node} is slowed down[/bold red]: it runs for "
            f"{RUN_S * 1e3:.0f} ms at a time, then it is stopped for {stopped_s * 1e3:.0f} ms"
        )
        async with slowed(pid, stopped_s):
            await self._event()
        return began_s

    async def _stop_outside_operations(self, pid: int) -> float:
        """Stop the rank in its own code; returns when, in Unix seconds.

        One that is stopped inside an operation cannot be distinguished from a failing network.
        """
        for _ in range(MAX_STOPS):
            send(pid, signal.SIGSTOP)
            began_s = time.time()
            await asyncio.sleep(STILL_S)
            place = (await self._client.topology(self.name)).ranks[CULPRIT]
            if place.operations and not place.inside:
                return began_s
            send(pid, signal.SIGCONT)
            await self._steps(self._run.last_step(FIRST) + 1)
        raise DemoFailed(f"rank {CULPRIT} was inside an operation each of {MAX_STOPS} times")

    async def _steps(self, steps: int) -> None:
        why = f"the job did not train {counted(steps, 'step')}"
        await self._until(lambda: self._run.last_step(FIRST) >= steps, why, self._run)

    async def _standstill(self) -> list[driver_pb2.RankPlace]:
        """Where the ranks are, once the driver says that they stand still."""
        while True:
            topology = await self._client.topology(self.name)
            if topology.standstill or self._events():
                return list(topology.ranks)
            await asyncio.sleep(POLL_S)

    def _events(self) -> list[types_pb2.Event]:
        return [event for event in self._run.events if event.reason == REASONS[self._fault]]

    async def _event(self) -> types_pb2.Event:
        why = f"there was no event {REASONS[self._fault]}"
        await self._until(lambda: bool(self._events()), why, self._run)
        return self._events()[0]

    def _named(self, verdict: types_pb2.Event) -> list[int]:
        """Ranks that the verdict on a hang suspects, or those of the nodes that are slow."""
        if self._fault == "hang":
            suspects = [item for item in verdict.evidence if item.digest.startswith("suspect")]
            return [int(item.source.rpartition("/")[2]) for item in suspects]
        slow = {event.subject.removeprefix("nodes/") for event in self._events()}
        nodes = self._run.nodes_of_attempt[FIRST]
        return [rank for rank, name in enumerate(nodes) if name in slow]

    async def _page(self, dashboard: str) -> tuple[str, str]:
        """Link and sentence of the page that shows the fault; prints both."""
        path = f"/jobs/{self.name}/" + ("ranks" if self._fault == "hang" else "heat")
        page, link = await read_page(dashboard, self.folder, path), page_link(dashboard, path)
        if self._fault == "straggler":
            says = "; ".join(str(slow["sentence"]) for slow in page["slow"])
        else:
            marked = page["state"][CULPRIT] == "culprit"
            says = ("" if marked else f"(rank {CULPRIT} is not marked) ") + str(page["standstill"])
        self._echo(f"[bold]the page[/bold]: {escape(link)}\n  {escape(says)}")
        return link, says

    def _require(self, report: dict[str, Any]) -> None:
        rank, sentence, says = f"rank {CULPRIT}", report["sentence"], report["page_says"]
        named = rank in sentence and report["node"] in sentence
        marked = rank in says and "not marked" not in says
        alone, ranks = f"the event names {rank}, and it alone", str(report["named_ranks"])
        claims = [
            Claim(alone, report["named"], ranks),
            Claim(f"its sentence has {rank} and its node", named, sentence),
        ]
        if report["page"]:
            claims.append(Claim(f"the page names {rank}", marked, says))
        require(claims, self._echo)
