"""`megascale demo --show-hang` and `--show-straggler`: the fault, the page, the sentence.

Four CPU ranks on four nodes train a small GPT. One rank hangs, or is stopped again and again while
it computes. The demo waits until the cluster has named it, shows the page of the dashboard that
reports it and the sentence, and ends. It fails if another rank is named, or none.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from rich.markup import escape

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.demo.cluster import RUN_S, DemoFailed, Echo, node_processes, slowed
from megascale_cli.demo.plan import fault_plan
from megascale_cli.demo.recording import FIRST, SECOND, Claim, Demo, Recording, require, seconds
from megascale_cli.output import table_lines
from megascale_cli.performance import COLUMNS, place_row
from megascale_client.run_folder import read_token
from megascale_job.visible import counted

CULPRIT = 2  # a rank in the middle of both layouts
STEPS_BEFORE = 40  # the job's pace is known then
# Of a step: on a busy machine ranks wait for a processor as well, and a stop has to stand out.
STOPPED_SHARE = 0.5
STILL_S = 2.5  # after which the heartbeats of a stopped rank show what it is inside of
MAX_STOPS = 20  # tries to stop it outside of an operation
PAGE_TIMEOUT_S = 20.0
REASONS = {"hang": "HANG_SUSPECTED", "straggler": "STRAGGLER"}


class FaultDemo(Demo):
    """One such demo; ``sabotage`` leaves the fault out, so that nothing is named.

    In its report ``page`` is a link and ``page_says`` the sentence there ("" without dashboard),
    ``named_ranks`` what the event names, ``restarted`` whether the job trained again.
    """

    # A shorter limit for a step than the minute of a large job: time to look at the page before
    # the job is restarted.
    options = ("--dashboard", "--heartbeat-interval-s", "1", "--hang-floor-s", "15")

    def __init__(
        self,
        fault: Literal["hang", "straggler"],
        folder: Path,
        echo: Echo,
        timeout_s: float,
        *,
        sabotage: bool,
    ) -> None:
        super().__init__(fault_plan(pipeline=fault == "hang"), folder, echo, timeout_s)
        self._fault = fault
        self._sabotage = sabotage
        self._run = Recording(self.name)

    def _show(self) -> dict[str, Any]:
        dashboard, run, hangs = self._dashboard(), self._run, self._fault == "hang"
        self._submit(run)
        self._steps(STEPS_BEFORE)
        node = run.nodes_of_attempt[FIRST][CULPRIT]
        pid = node_processes(self.folder, node)[f"rank-{CULPRIT}"]
        began_s = self._hang(node, pid) if hangs else self._straggle(node, pid)
        link, says = self._page(dashboard) if dashboard else ("", "")
        verdict = self._event()
        self._echo(f"[bold]the sentence[/bold]: {escape(verdict.message)}")
        if hangs:
            trained = f"the job did not train again after {verdict.reason}"
            self._wait(run, lambda: run.last_step(SECOND), trained, self._timeout_s)
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
        self._client.cancel(run.name, reason="the demo is over")
        return report

    def _dashboard(self) -> str:
        """Its address with a key that logs a browser in; "" where it is not installed."""
        names = ("dashboard_ready", "dashboard_absent", "dashboard_failed")
        event = self._cluster.event(*names)
        if event["event"] == "dashboard_failed":
            raise DemoFailed(f"the dashboard did not start; see {self.folder / 'dashboard.log'}")
        if event["event"] == "dashboard_absent":
            self._echo(f"no dashboard: {event['remedy']}")
        return str(event.get("url", ""))

    def _hang(self, node: str, pid: int) -> float:
        """Stop the rank and show where all ranks stand still; returns when it was stopped."""
        began_s, why = time.time(), "nothing says that the job stands still"
        if not self._sabotage:
            began_s = self._stop_outside_operations(pid)
            self._echo(
                f"[bold red]SIGSTOP to rank {CULPRIT} on node {node}[/bold red]: it hangs, all "
                "processes live, and no error is raised anywhere"
            )
        places = self._wait(self._run, self._standstill, why, self._timeout_s)
        for line in table_lines(COLUMNS, map(place_row, places)):
            self._echo(f"  {line}")
        return began_s

    def _straggle(self, node: str, pid: int) -> float:
        """Slow the rank down until it is named; returns when that began."""
        began_s, records = time.time(), self._run.records.copy().values()
        if self._sabotage:
            self._event()
        step_s = statistics.median(record.step_time.ToNanoseconds() / 1e9 for record in records)
        stopped_s = STOPPED_SHARE * step_s
        self._echo(
            f"[bold red]rank {CULPRIT} on node {node} is slowed down[/bold red]: it runs for "
            f"{RUN_S * 1e3:.0f} ms at a time, then it is stopped for {stopped_s * 1e3:.0f} ms"
        )
        with slowed(pid, stopped_s):
            self._event()
        return began_s

    def _stop_outside_operations(self, pid: int) -> float:
        """Stop the rank in its own code; returns when, in Unix seconds.

        One that is stopped inside an operation cannot be distinguished from a failing network.
        """
        for _ in range(MAX_STOPS):
            os.kill(pid, signal.SIGSTOP)
            began_s = time.time()
            time.sleep(STILL_S)
            place = self._client.topology(self.name).ranks[CULPRIT]
            if place.operations and not place.inside:
                return began_s
            os.kill(pid, signal.SIGCONT)
            self._steps(self._run.last_step(FIRST) + 1)
        raise DemoFailed(f"rank {CULPRIT} was inside an operation each of {MAX_STOPS} times")

    def _steps(self, steps: int) -> None:
        why = f"the job did not train {counted(steps, 'step')}"
        self._wait(self._run, lambda: self._run.last_step(FIRST) >= steps, why, self._timeout_s)

    def _standstill(self) -> list[driver_pb2.RankPlace]:
        """The ranks' places, once the driver reports that they stand still."""
        topology = self._client.topology(self.name)
        return list(topology.ranks) if topology.standstill or self._events() else []

    def _events(self) -> list[types_pb2.Event]:
        return [event for event in self._run.events if event.reason == REASONS[self._fault]]

    def _event(self) -> types_pb2.Event:
        why = f"there was no event {REASONS[self._fault]}"
        return self._wait(self._run, self._events, why, self._timeout_s)[0]

    def _named(self, verdict: types_pb2.Event) -> list[int]:
        """Ranks that the verdict on a hang suspects, or those of the nodes that are slow."""
        if self._fault == "hang":
            suspects = [item for item in verdict.evidence if item.digest.startswith("suspect")]
            return [int(item.source.rpartition("/")[2]) for item in suspects]
        slow = {event.subject.removeprefix("nodes/") for event in self._events()}
        nodes = self._run.nodes_of_attempt[FIRST]
        return [rank for rank, name in enumerate(nodes) if name in slow]

    def _page(self, dashboard: str) -> tuple[str, str]:
        """Link and sentence of the page that shows the fault; prints both. Raises DemoFailed."""
        path = f"/jobs/{self.name}/" + ("ranks" if self._fault == "hang" else "heat")
        address = urlsplit(dashboard)
        link = urlunsplit(address._replace(path=path))
        twin = urlunsplit(address._replace(path=f"{path}.json", query=""))
        request = Request(twin, headers={"authorization": f"Bearer {read_token(self.folder)}"})
        try:
            with urlopen(request, timeout=PAGE_TIMEOUT_S) as answer:
                page = json.load(answer)
        except (OSError, ValueError) as error:
            raise DemoFailed(f"the dashboard's page {path} cannot be read: {error}") from None
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
