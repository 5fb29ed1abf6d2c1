"""One seed: its history, its verdict, its figures."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog
from tests.simulation.shell.faults import DAY_S, Fault, history
from tests.simulation.shell.figures import MAIN_JOB
from tests.simulation.shell.loop import DeadlockError
from tests.simulation.shell.rest import FLEET
from tests.simulation.shell.scenarios import Scenarios
from tests.simulation.shell.settled import check_settled
from tests.simulation.shell.world import World, host_of

SETTLE_S = 2400.0  # after the last fault: a start deadline, a hang, and the breaker's window
MAIN_STEP_S = 10.0
GARBAGE = 200_000  # objects between two collections, which would cost a tenth of a run


@dataclass(frozen=True, slots=True)
class Setup:
    """What a seed runs with. ``faults`` replaces the seed's own.

    ``spares`` of the main job, 0: one for 16 nodes. ``main``: nodes of the main job, with exactly
    ``spares``; 0: what leaves room for the spares and for small jobs.
    """

    seed: int
    nodes: int = 64
    days: float = 2.0
    rate: float = 0.0
    storms: float = 4.0
    spares: int = 0
    main: int = 0
    point: int = 0  # of a sweep: which of its setups this is
    skip: bool = True
    rest: int = FLEET  # nodes from which on they rest (tests.simulation.shell.rest)
    faults: tuple[Fault, ...] | None = None
    settle_s: float = SETTLE_S
    most_steps: int = 100_000_000  # callbacks; more are going round in circles


@dataclass(slots=True)
class Result:
    """What became of a seed. ``digest`` is of its decision log, ``broken`` the rule or empty."""

    seed: int
    point: int = 0
    broken: str = ""
    digest: str = ""
    ettr: float = 0.0
    recoveries: int = 0
    false_evictions: int = 0
    detected_s: list[float] = field(default_factory=list)
    node_days: float = 0.0
    cpu_s: float = 0.0
    fault_count: int = 0
    faults: list[Fault] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)  # of requests: method, code

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def run_seed(setup: Setup) -> Result:
    """Run one history to its end, or to the first rule that breaks."""
    structlog.configure(processors=[_drop])
    began_s = time.process_time()
    gc.set_threshold(GARBAGE)
    world = World(setup.seed, setup.nodes, skip=setup.skip, rest=setup.rest)
    world.loop.most_steps = setup.most_steps
    faults = list(
        history(setup.seed, setup.nodes, setup.days, setup.rate, setup.storms)
        if setup.faults is None
        else setup.faults
    )
    asyncio.set_event_loop(world.loop)
    with host_of(world):
        try:
            world.loop.run_until_complete(_live(world, setup, faults))
        except Exception as error:
            world.invariants.breaks("simulation", f"{type(error).__name__}: {error}")
            if not isinstance(error, DeadlockError):
                raise
    found = world.invariants
    for context in world.loop.unhandled:
        found.breaks("unhandled", f"{context.get('message')}: {context.get('exception')!r}")
    figures = found.figures
    log = "\n".join(found.log)
    return Result(
        seed=setup.seed,
        point=setup.point,
        broken=found.broken,
        digest=hashlib.sha256(log.encode()).hexdigest()[:16],
        ettr=figures.ettr(),
        recoveries=figures.recoveries,
        false_evictions=figures.false_evictions,
        detected_s=figures.detected_s,
        node_days=setup.nodes * (world.now_s - world.started_s) / DAY_S,
        cpu_s=time.process_time() - began_s,
        fault_count=len(faults),
        faults=faults,
        log=found.log,
        answers=world.operators.answers,
    )


async def _live(world: World, setup: Setup, faults: list[Fault]) -> None:
    weather = Scenarios(world, faults)
    spares = setup.spares if setup.spares or setup.main else max(1, setup.nodes // 16)
    await world.run(20.0)
    main = setup.main or setup.nodes - 2 * spares - 2
    world.operators.submit(
        MAIN_JOB, main, steps=10_000_000, step_s=MAIN_STEP_S, spares=spares, priority=1
    )
    world.invariants.figures.submitted_at_s = world.now_s
    await world.run(setup.days * DAY_S)
    # Faults so late that they are not over yet.
    while world.active_faults and not world.invariants.broken:
        await world.run(60.0)
    weather.repair()
    await world.run(setup.settle_s)
    if not world.invariants.broken:
        await check_settled(world)


def _drop(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent
