"""The demo of a lost node: what happens, the claims that must hold, the report, the curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from rich.markup import escape

from megascale_cli.demo.plan import MIN_COMMITS_BEFORE_KILL, DemoPlan
from megascale_cli.demo.recording import (
    FIRST,
    SECOND,
    Claim,
    Demo,
    Recording,
    require,
    seconds,
)
from megascale_cli.output import clipped, short
from megascale_client import JobPhase, NodeLiveness
from megascale_job.visible import counted

# A job may train for as long as the machine needs; without a new step, event or phase for this
# long it has failed.
STANDSTILL_S = 120.0
CURVE_WIDTH = 72
CURVE_HEIGHT = 12


@dataclass(frozen=True, slots=True)
class Kill:
    """The kill of a node.

    Attributes:
        at: when, in seconds since 1970.
        committed_steps: steps of the checkpoints that were complete by then.
        processes: how many processes of the node were killed.
        processes_left: how many of them still run.
    """

    at: float
    node: str
    committed_steps: tuple[int, ...]
    processes: int
    processes_left: int

    def detected(self, run: Recording) -> float | None:
        """When the driver found the node dead."""
        return run.event_time("NODE_DEAD", f"nodes/{self.node}", self.at)


class NodeLossDemo(Demo):
    """A node is killed; the spare takes over, and an uninterrupted twin has the same losses."""

    show_every_steps = 4

    def _show(self) -> dict[str, Any]:
        run, twin = Recording(self.name), Recording(f"{self.name}-twin")
        kill = self._interrupted(run)
        warm = self._incarnations()
        require(recovery_claims(self.plan, run, kill), self._echo)
        self._echo(f"now the uninterrupted twin {twin.name} on the same nodes")
        self._finish(twin, self._submit(twin), "the twin did not finish", STANDSTILL_S)
        after = self._incarnations()
        used = twin.nodes_of_attempt.get(FIRST, ["none"])
        same_nodes = all(warm.get(node) == after.get(node) for node in used)
        if self.plan.sabotage == "loss":  # by the smallest step of a double, in the middle
            record = twin.records[sorted(twin.records)[len(twin.records) // 2]]
            record.loss = math.nextafter(record.loss, math.inf)
        nodes = [node.name for node in self._client.nodes()]
        report = make_report(self.plan, run, twin, kill, nodes)
        self._write(report)
        resumed = kill is not None and run.attempts >= SECOND
        killed_at_step = run.last_step(FIRST) if resumed else None
        self._echo("\n[bold]timeline[/bold]")
        for line in timeline(run, kill):
            self._echo(escape(line))
        self._echo("\n[bold]loss[/bold]")
        for line in curve(run.losses(), killed_at_step, report["resumed_from_step"]):
            self._echo(line)
        picture = self.folder / "loss.png"
        problem = write_png(picture, run, twin, killed_at_step)
        self._echo(f"no picture: {problem}" if problem else f"picture: {picture}\n")
        require(twin_claims(self.plan, run, twin, same_nodes), self._echo)
        return report

    def _interrupted(self, run: Recording) -> Kill | None:
        """Train until the second commit, kill a node, and wait for the job to end."""
        following, kill = self._submit(run), None

        def commits() -> list[int]:
            """Steps of all complete checkpoints, once a kill would lose steps."""
            ended = run.ended
            steps = sorted(found.step for found in self._client.checkpoints(run.name))
            loses = self.plan.kill_loses_steps(len(steps), run.last_step(FIRST))
            return steps if ended or loses else []

        why = "no two checkpoints were completed"
        steps = self._wait(run, commits, why, STANDSTILL_S, moving=True)
        if self.plan.sabotage != "no-kill" and not run.ended:
            # The node of rank 0 is the hardest one to lose: the rendezvous store and the
            # committer run there.
            node = run.nodes_of_attempt[FIRST][0]
            self._echo(
                f"[bold red]SIGKILL to every process of node {node}[/bold red] "
                f"after step {run.last_step(FIRST)}"
            )
            killed_at, processes, left = self._cluster.kill_node(node)
            kill = Kill(killed_at, node, tuple(steps), processes, left)
        why = "the job did not resume and finish" if kill else "the job did not finish"
        self._finish(run, following, why, self._timeout_s)
        return kill

    def _finish(self, run: Recording, following: Thread, why: str, limit_s: float) -> None:
        self._wait(run, lambda: not following.is_alive(), why, limit_s, moving=True)
        if run.error is not None:
            raise run.error

    def _incarnations(self) -> dict[str, str]:
        return {
            node.name: node.incarnation
            for node in self._client.nodes()
            if node.liveness == NodeLiveness.ALIVE
        }


def recovery_claims(plan: DemoPlan, run: Recording, kill: Kill | None) -> list[Claim]:
    """What the interrupted run must have shown."""
    if kill is None:
        seen = "no node was killed: nothing to recover from"
        return [Claim("one active node is killed outright", False, seen)]
    commits, detected = kill.committed_steps, kill.detected(run)
    before, after = run.nodes_of_attempt.get(FIRST, []), run.nodes_of_attempt.get(SECOND, [])
    source, restored = short(run.job.restore_source), run.job.restored_step
    missing = missing_steps(plan.steps, run.losses())
    recovered = run.job.phase == JobPhase.SUCCEEDED and run.attempts == SECOND
    return [
        Claim(
            "at least two checkpoints are complete before the kill",
            len(commits) >= MIN_COMMITS_BEFORE_KILL,
            f"steps {_listed(commits)}",
        ),
        Claim(
            "all processes of the node are dead",
            kill.processes_left == 0 and kill.processes > 0,
            f"{kill.processes} killed, {kill.processes_left} left",
        ),
        Claim(
            "the driver finds the node dead",
            detected is not None,
            "never" if detected is None else f"after {detected - kill.at:.2f} s",
        ),
        Claim(
            "the spare takes over",
            len(set(after) - set(before)) == 1 and kill.node not in after,
            f"attempt 1 on {_listed(before)}, attempt 2 on {_listed(after)}",
        ),
        Claim(
            "the job resumes from the newest complete checkpoint, from storage",
            source == "storage" and restored >= max(commits, default=1),
            f"step {restored} from {source}",
        ),
        Claim("the job finishes by itself, in its second attempt", recovered, _outcome(run)),
        Claim(
            "every step has its record",
            not missing,
            f"steps {_listed(missing)} lack one" if missing else f"{plan.steps} of {plan.steps}",
        ),
    ]


def twin_claims(plan: DemoPlan, run: Recording, twin: Recording, same_nodes: bool) -> list[Claim]:
    """What the uninterrupted twin must show, and the comparison of the two."""
    finished = twin.job.phase == JobPhase.SUCCEEDED and twin.attempts == FIRST
    whole = same_nodes and not missing_steps(plan.steps, twin.losses())
    seen = f"{_outcome(twin)} on {_listed(twin.nodes_of_attempt.get(FIRST, []))}"
    claims = [Claim("the twin runs uninterrupted on the same warm nodes", finished and whole, seen)]
    if plan.device != "cpu":
        largest = max_abs_difference(run.losses(), twin.losses())
        seen = f"largest difference {largest:.3g}"
        return [*claims, Claim("all losses are finite", math.isfinite(largest), seen)]
    first = run.losses(FIRST)
    repeated = {step: loss for step, loss in run.losses(SECOND).items() if step in first}
    same = "the steps repeated after the restart give the same losses as before it"
    return [
        *claims,
        _equal("every step's loss equals the twin's bit for bit", run.losses(), twin.losses()),
        _equal(same, first, repeated),
    ]


def _equal(text: str, one: Mapping[int, float], other: Mapping[int, float]) -> Claim:
    steps, be = differing_steps(one, other), "is" if len(other) == 1 else "are"
    equal = f"{counted(len(other), 'step')} {be} equal"
    return Claim(text, not steps, f"steps {_listed(steps)} differ" if steps else equal)


def make_report(
    plan: DemoPlan, run: Recording, twin: Recording, kill: Kill | None, nodes: Iterable[str]
) -> dict[str, Any]:
    """report.json, whether or not the claims hold; times in seconds, None for the unobserved.

    ``loss_after_resume_matches`` is None on GPUs, where ``max_loss_abs_diff`` has the difference.
    """
    fault = detected = restarted = first_step = None
    if kill is not None:
        fault, detected = kill.at, kill.detected(run)
        restarted = run.event_time("ATTEMPT_STARTED", f"jobs/{run.name}", kill.at)
        record = run.first_record(SECOND)
        first_step = seconds(record.completed_at) if record is not None else None
    losses, restored = run.losses(), run.job.restored_step
    equal = not differing_steps(losses, twin.losses())
    return {
        **{name: getattr(plan, name) for name in ("device", "world_size", "tp", "pp", "dp")},
        "steps": plan.steps,
        "attempts": run.attempts,
        "fault_to_detected_s": _between(fault, detected),
        "detected_to_restarted_s": _between(detected, restarted),
        "fault_to_first_new_step_s": _between(fault, first_step),
        "steps_lost": max(0, run.last_step(FIRST) - restored) if run.attempts > FIRST else 0,
        "resumed_from_step": restored,
        "restore_source": short(run.job.restore_source),
        "first_loss": losses.get(1),
        "final_loss": losses.get(plan.steps),
        "loss_after_resume_matches": equal if plan.device == "cpu" else None,
        "max_loss_abs_diff": max_abs_difference(losses, twin.losses()),
        "nodes": sorted(nodes),
        "evicted_nodes": sorted(run.job.evicted_nodes),
    }


def missing_steps(steps: int, losses: Mapping[int, float]) -> list[int]:
    """Steps 1 to ``steps`` without a loss."""
    return [step for step in range(1, steps + 1) if step not in losses]


def differing_steps(one: Mapping[int, float], other: Mapping[int, float]) -> list[int]:
    """Steps of ``other`` whose loss is missing in ``one`` or differs; NaN differs from NaN too."""
    return [step for step in sorted(other) if one.get(step) is None or one[step] != other[step]]


def max_abs_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Largest difference over common steps; infinite without any, NaN if a loss is NaN."""
    differences = [abs(one[step] - other[step]) for step in set(one) & set(other)]
    if any(map(math.isnan, differences)):
        return math.nan
    return max(differences, default=math.inf)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)


def _outcome(run: Recording) -> str:
    return f"{short(run.job.phase)} in attempt {run.attempts}: {run.job.phase_reason}"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "none"


def timeline(run: Recording, kill: Kill | None) -> list[str]:
    """Events, the kill, and each attempt's first and last step, with seconds since the first."""
    rows = [(seconds(event.time), event.reason, clipped(event.message)) for event in run.events]
    if kill is not None:
        processes = counted(kill.processes, "process")
        rows.append((kill.at, ">>> SIGKILL", f"node {kill.node} with its {processes}"))
    for attempt in range(1, run.attempts + 1):
        steps = list(run.losses(attempt))
        for step in dict.fromkeys(steps[:1] + steps[-1:]):
            record = run.records[attempt, step]
            text = f"loss {record.loss:.4f}, attempt {attempt}"
            rows.append((seconds(record.completed_at), f"step {step}", text))
    rows.sort(key=lambda row: row[0])
    start = rows[0][0] if rows else 0.0
    return [f"{moment - start:8.3f} s  {what:<22} {text}" for moment, what, text in rows]


def curve(
    losses: Mapping[int, float], killed_at_step: int | None, resumed_from_step: int
) -> list[str]:
    """The loss curve as text; ``x``: last step before the kill, ``o``: first step resumed."""
    if not losses:
        return ["no losses"]
    first, last = min(losses), max(losses)
    low, high = min(losses.values()), max(losses.values())
    signs, legend = dict.fromkeys(losses, "·"), ""
    if killed_at_step is not None:
        resumed_step = resumed_from_step + 1
        signs |= {killed_at_step: "x", resumed_step: "o"}
        legend = f"   x killed after step {killed_at_step}, o resumed with step {resumed_step}"
    grid = [[" "] * CURVE_WIDTH for _ in range(CURVE_HEIGHT)]
    # The marks last: a step next to them may share their place.
    for step in sorted(losses, key=lambda step: signs[step] != "·"):
        column = round((step - first) / max(1, last - first) * (CURVE_WIDTH - 1))
        row = round((high - losses[step]) / max(1e-12, high - low) * (CURVE_HEIGHT - 1))
        grid[row][column] = signs[step]
    labels = {0: f"{high:.3f}", CURVE_HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{labels.get(at, ''):>8} |{''.join(row).rstrip()}" for at, row in enumerate(grid)]
    return [*lines, f"{'':>8} +{'-' * CURVE_WIDTH}", f"{'step':>8}  {first} to {last}{legend}"]


def write_png(path: Path, run: Recording, twin: Recording, killed_at_step: int | None) -> str:
    """Write the loss curves as a picture; returns "", or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed: pip install 'megascale[plot]'"
    figure = Figure(figsize=(9, 4.5), layout="tight")
    axes = figure.subplots()
    steps, losses = twin.losses().keys(), twin.losses().values()
    axes.plot([*steps], [*losses], color="#bbbbbb", linewidth=5, label="uninterrupted twin")
    for attempt in range(1, run.attempts + 1):
        steps, losses = run.losses(attempt).keys(), run.losses(attempt).values()
        axes.plot([*steps], [*losses], linewidth=1.5, marker=".", label=f"attempt {attempt}")
    if killed_at_step is not None:
        axes.axvline(killed_at_step, color="black", linestyle=":", label="node killed")
    title = "A node is killed; the run resumes from its checkpoint"
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)
    return ""
