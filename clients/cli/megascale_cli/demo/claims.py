"""What the demo must show, as claims that hold or not, and its report. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from megascale_cli.demo.plan import MIN_COMMITS_BEFORE_KILL, DemoPlan
from megascale_cli.demo.recording import Recording, seconds
from megascale_cli.visible import counted
from megascale_client import JobPhase

FIRST, SECOND = 1, 2  # the attempt that is interrupted, and the one that resumes


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


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that the demo must show, whether it was observed, and what was observed."""

    text: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{self.text}: {self.seen}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """report.json; times in seconds, null for what was not observed.

    ``loss_after_resume_matches`` is null on GPUs, where ``max_loss_abs_diff`` has the difference.
    """

    device: str
    world_size: int
    tp: int
    pp: int
    dp: int
    steps: int
    attempts: int
    fault_to_detected_s: float | None
    detected_to_restarted_s: float | None
    fault_to_first_new_step_s: float | None
    steps_lost: int
    resumed_from_step: int
    restore_source: str
    first_loss: float | None
    final_loss: float | None
    loss_after_resume_matches: bool | None
    max_loss_abs_diff: float | None
    nodes: list[str]
    evicted_nodes: list[str]
    wall_s: float

    def as_dict(self) -> dict[str, object]:
        """The fields in their order."""
        return asdict(self)


def recovery_claims(plan: DemoPlan, run: Recording, kill: Kill | None) -> list[Claim]:
    """What the interrupted run must have shown."""
    if kill is None:
        return [
            Claim(
                "one active node is killed outright",
                False,
                "no node was killed: nothing to recover from",
            )
        ]
    detected = run.event_time("NODE_DEAD", f"nodes/{kill.node}", kill.at)
    before, after = run.nodes_of_attempt.get(FIRST, []), run.nodes_of_attempt.get(SECOND, [])
    newcomers = sorted(set(after) - set(before))
    source = _source(run)
    missing = missing_steps(plan.steps, run.losses())
    return [
        Claim(
            "at least two checkpoints are complete before the kill",
            len(kill.committed_steps) >= MIN_COMMITS_BEFORE_KILL,
            f"steps {_listed(kill.committed_steps)}",
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
            len(newcomers) == 1 and kill.node not in after,
            f"attempt 1 on {_listed(before)}, attempt 2 on {_listed(after)}",
        ),
        Claim(
            "the job resumes from the newest complete checkpoint, from storage",
            source == "storage" and run.job.restored_step >= max(kill.committed_steps, default=1),
            f"step {run.job.restored_step} from {source}",
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
    missing = missing_steps(plan.steps, twin.losses())
    claims = [
        Claim(
            "the twin runs uninterrupted on the same warm nodes",
            twin.job.phase == JobPhase.SUCCEEDED
            and twin.attempts == FIRST
            and same_nodes
            and not missing,
            f"{_phase(twin)} in attempt {twin.attempts} "
            f"on {_listed(twin.nodes_of_attempt.get(FIRST, []))}",
        )
    ]
    differing = differing_steps(run.losses(), twin.losses())
    overlap = sorted(set(run.losses(FIRST)) & set(run.losses(SECOND)))
    repeated = differing_steps(run.losses(FIRST), {s: run.losses(SECOND)[s] for s in overlap})
    if plan.device == "cpu":
        claims += [
            Claim(
                "every step's loss equals the twin's bit for bit",
                not differing,
                f"steps {_listed(differing)} differ"
                if differing
                else f"{counted(len(twin.losses()), 'step')} are equal",
            ),
            Claim(
                "the steps repeated after the restart give the same losses as before it",
                not repeated,
                f"steps {_listed(repeated)} differ"
                if repeated
                else f"{counted(len(overlap), 'step')} "
                f"{'is' if len(overlap) == 1 else 'are'} equal",
            ),
        ]
    else:
        difference = max_abs_difference(run.losses(), twin.losses())
        claims.append(
            Claim(
                "all losses are finite",
                math.isfinite(difference),
                f"largest difference {difference:.3g}",
            )
        )
    return claims


def make_report(
    plan: DemoPlan,
    run: Recording,
    twin: Recording,
    kill: Kill | None,
    nodes: Iterable[str],
    wall_s: float,
) -> DemoReport:
    """The report of a demo, whether or not its claims hold."""
    detected = restarted = first_step = None
    if kill is not None:
        detected = run.event_time("NODE_DEAD", f"nodes/{kill.node}", kill.at)
        restarted = run.event_time("ATTEMPT_STARTED", f"jobs/{run.name}", kill.at)
        record = run.first_record(SECOND)
        first_step = seconds(record.completed_at) if record is not None else None
    fault = kill.at if kill is not None else None
    losses = run.losses()
    return DemoReport(
        device=plan.device,
        world_size=plan.world_size,
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        steps=plan.steps,
        attempts=run.attempts,
        fault_to_detected_s=_between(fault, detected),
        detected_to_restarted_s=_between(detected, restarted),
        fault_to_first_new_step_s=_between(fault, first_step),
        steps_lost=max(0, run.last_step(FIRST) - run.job.restored_step)
        if run.attempts > FIRST
        else 0,
        resumed_from_step=run.job.restored_step,
        restore_source=_source(run),
        first_loss=losses.get(1),
        final_loss=losses.get(plan.steps),
        loss_after_resume_matches=not differing_steps(losses, twin.losses())
        if plan.device == "cpu"
        else None,
        max_loss_abs_diff=max_abs_difference(losses, twin.losses()),
        nodes=sorted(nodes),
        evicted_nodes=sorted(run.job.evicted_nodes),
        wall_s=round(wall_s, 3),
    )


def missing_steps(steps: int, losses: Mapping[int, float]) -> list[int]:
    """Steps 1 to ``steps`` without a loss."""
    return [step for step in range(1, steps + 1) if step not in losses]


def differing_steps(one: Mapping[int, float], other: Mapping[int, float]) -> list[int]:
    """Steps of ``other`` whose loss is missing in ``one`` or differs; NaN differs from NaN too."""
    return [step for step in sorted(other) if one.get(step) is None or one[step] != other[step]]


def max_abs_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Largest difference over common steps; infinite without any, NaN if a loss is NaN."""
    differences = [abs(one[step] - other[step]) for step in set(one) & set(other)]
    if any(math.isnan(difference) for difference in differences):
        return math.nan
    return max(differences, default=math.inf)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)


def _source(run: Recording) -> str:
    return run.job.restore_source.name.lower()


def _phase(run: Recording) -> str:
    return run.job.phase.name.lower()


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "none"
