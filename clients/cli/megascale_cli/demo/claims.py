"""What the demo of a lost node must show, as claims that hold or not, and its report. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megascale_cli.demo.plan import MIN_COMMITS_BEFORE_KILL, DemoPlan
from megascale_cli.demo.recording import FIRST, SECOND, Claim, Recording, seconds
from megascale_client import JobPhase
from megascale_job.visible import counted


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


def recovery_claims(plan: DemoPlan, run: Recording, kill: Kill | None) -> list[Claim]:
    """What the interrupted run must have shown."""
    if kill is None:
        seen = "no node was killed: nothing to recover from"
        return [Claim("one active node is killed outright", False, seen)]
    commits, detected = kill.committed_steps, run.event_time(*_death(kill))
    before, after = run.nodes_of_attempt.get(FIRST, []), run.nodes_of_attempt.get(SECOND, [])
    source, restored = _source(run), run.job.restored_step
    missing = missing_steps(plan.steps, run.losses())
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
        Claim(
            "the job finishes by itself, in its second attempt",
            run.job.phase == JobPhase.SUCCEEDED and run.attempts == SECOND,
            f"{_phase(run)} in attempt {run.attempts}: {run.job.phase_reason}",
        ),
        Claim(
            "every step has its record",
            not missing,
            f"steps {_listed(missing)} lack one" if missing else f"{plan.steps} of {plan.steps}",
        ),
    ]


def twin_claims(plan: DemoPlan, run: Recording, twin: Recording, same_nodes: bool) -> list[Claim]:
    """What the uninterrupted twin must show, and the comparison of the two."""
    whole = same_nodes and not missing_steps(plan.steps, twin.losses())
    nodes = _listed(twin.nodes_of_attempt.get(FIRST, []))
    undisturbed = Claim(
        "the twin runs uninterrupted on the same warm nodes",
        twin.job.phase == JobPhase.SUCCEEDED and twin.attempts == FIRST and whole,
        f"{_phase(twin)} in attempt {twin.attempts} on {nodes}",
    )
    if plan.device != "cpu":
        largest = max_abs_difference(run.losses(), twin.losses())
        seen = f"largest difference {largest:.3g}"
        return [undisturbed, Claim("all losses are finite", math.isfinite(largest), seen)]
    differing = differing_steps(run.losses(), twin.losses())
    first, second = run.losses(FIRST), run.losses(SECOND)
    overlap = {step: loss for step, loss in second.items() if step in first}
    repeated = differing_steps(first, overlap)
    return [
        undisturbed,
        Claim(
            "every step's loss equals the twin's bit for bit",
            not differing,
            _steps_differ(differing) or f"{counted(len(twin.losses()), 'step')} are equal",
        ),
        Claim(
            "the steps repeated after the restart give the same losses as before it",
            not repeated,
            _steps_differ(repeated)
            or f"{counted(len(overlap), 'step')} {'is' if len(overlap) == 1 else 'are'} equal",
        ),
    ]


def make_report(
    plan: DemoPlan, run: Recording, twin: Recording, kill: Kill | None, nodes: Iterable[str]
) -> dict[str, Any]:
    """report.json, whether or not the claims hold; times in seconds, None for the unobserved.

    ``loss_after_resume_matches`` is None on GPUs, where ``max_loss_abs_diff`` has the difference.
    """
    fault = detected = restarted = first_step = None
    if kill is not None:
        fault, detected = kill.at, run.event_time(*_death(kill))
        restarted = run.event_time("ATTEMPT_STARTED", f"jobs/{run.name}", kill.at)
        record = run.first_record(SECOND)
        first_step = seconds(record.completed_at) if record is not None else None
    losses, restored = run.losses(), run.job.restored_step
    equal = not differing_steps(losses, twin.losses())
    return {
        "device": plan.device,
        "world_size": plan.world_size,
        "tp": plan.tp,
        "pp": plan.pp,
        "dp": plan.dp,
        "steps": plan.steps,
        "attempts": run.attempts,
        "fault_to_detected_s": _between(fault, detected),
        "detected_to_restarted_s": _between(detected, restarted),
        "fault_to_first_new_step_s": _between(fault, first_step),
        "steps_lost": max(0, run.last_step(FIRST) - restored) if run.attempts > FIRST else 0,
        "resumed_from_step": restored,
        "restore_source": _source(run),
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


def _death(kill: Kill) -> tuple[str, str, float]:
    return "NODE_DEAD", f"nodes/{kill.node}", kill.at


def _steps_differ(steps: list[int]) -> str:
    return f"steps {_listed(steps)} differ" if steps else ""


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)


def _source(run: Recording) -> str:
    return run.job.restore_source.name.lower()


def _phase(run: Recording) -> str:
    return run.job.phase.name.lower()


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "none"
