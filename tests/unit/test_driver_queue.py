"""The queue, as properties: no inversion, quotas kept, no starvation, nobody blocks the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples

from megascale_driver.placement.gang import Candidate, Part, place
from megascale_driver.placement.pool import Room
from megascale_driver.placement.queue import MAX_STARTS, decide
from megascale_driver.placement.queue_values import (
    STARTS,
    Kind,
    Plan,
    Rules,
    RunningJob,
    View,
    WaitingJob,
)


def node(name: str, count: int = 4, switch: str = "s0", kind: str = "cpu") -> Candidate:
    return Candidate(name, kind, tuple(range(count)), switch)


def nodes(*names: str) -> dict[str, Candidate]:
    return {name: node(name) for name in names}


def job(name: str, world: int = 4, **options: object) -> WaitingJob:
    return WaitingJob(name=name, world_size=world, **options)  # type: ignore[arg-type]


def running(name: str, *where: str, **options: object) -> RunningJob:
    values: dict[str, object] = {"world_size": 4 * len(where), "preemptible": True, **options}
    return RunningJob(name=name, nodes=where, **values)  # type: ignore[arg-type]


def view(
    waiting: list[WaitingJob],
    idle: dict[str, Candidate],
    *holders: RunningJob,
    now_s: float = 100.0,
    quotas: dict[str, int] | None = None,
    rules: Rules | None = None,
    known: dict[str, Candidate] | None = None,
) -> View:
    busy = {name: node(name) for held in holders for name in held.nodes}
    return View(
        now_s=now_s, waiting=tuple(waiting), running=holders, idle=idle,
        known={**idle, **busy} if known is None else known,
        quotas=quotas or {}, rules=rules or Rules(),
    )  # fmt: skip


def kinds(plan: Plan) -> dict[str, Kind]:
    return {decision.job: decision.kind for decision in plan.decisions}


def why(plan: Plan, name: str) -> str:
    return next(each.why for each in plan.decisions if each.job == name)


def placed(plan: Plan, name: str) -> set[str]:
    return {p.node for each in plan.decisions if each.job == name for p in each.parts}


@st.composite
def views(draw: st.DrawFn) -> View:
    """A small cluster with running, recovering and new jobs, of three priorities."""
    sizes = draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=10))
    known = {
        f"n{i}": node(f"n{i}", size, f"s{i % 3}", draw(st.sampled_from(["cpu", "cpu", "cuda"])))
        for i, size in enumerate(sizes)
    }
    names = draw(st.permutations(list(known)))
    idle = {name: known[name] for name in names}
    holders: list[RunningJob] = []
    for i in range(draw(st.integers(0, 3))):
        mine = [idle.pop(name) for name in list(idle)[: draw(st.integers(0, 3))]]
        spares = list(idle)[: draw(st.integers(0, 1))]
        taken = {name for each in holders for name in each.spares}
        if mine:
            holders.append(
                RunningJob(
                    name=f"r{i}",
                    world_size=sum(len(c.devices) for c in mine),
                    nodes=tuple(c.name for c in mine),
                    priority=draw(st.integers(0, 2)),
                    tenant=draw(st.sampled_from(["a", "b"])),
                    started_s=float(i),
                    ends_s=draw(st.sampled_from([None, 200.0, 300.0])),
                    spares=tuple(name for name in spares if name not in taken),
                    preemptible=draw(st.booleans()),
                    leaving=draw(st.sampled_from([False, False, True])),
                )
            )
    # A former holder may have taken a later one's spare; a spare is idle.
    holders = [
        replace(each, spares=tuple(name for name in each.spares if name in idle))
        for each in holders
    ]
    waiting = []
    for i in range(draw(st.integers(1, 5))):
        last = tuple(
            Part(name, (2 * k, 2 * k + 1), (0, 1))
            for k, name in enumerate(
                draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
            )
        )
        tp = draw(st.sampled_from([1, 2, 4]))
        world = 2 * len(last) if last else tp * draw(st.integers(1, 8))
        waiting.append(
            WaitingJob(
                name=f"w{i}",
                world_size=world,
                node_group=2 if last else tp,
                priority=draw(st.integers(0, 2)),
                tenant=draw(st.sampled_from(["a", "b"])),
                created_s=float(draw(st.integers(0, 5))),
                waiting_since_s=draw(st.sampled_from([0.0, 99.0])),
                last=last,
                evicted=frozenset(draw(st.lists(st.sampled_from(names), max_size=2))),
            )
        )
    used = Counter(tenant for each in holders for tenant in [each.tenant] * each.world_size)
    quotas = {
        tenant: used[tenant] + draw(st.integers(0, 24))
        for tenant in draw(st.lists(st.sampled_from(["a", "b"]), unique=True))
    }
    rules = Rules(preempt=draw(st.booleans()), backfill_s=50.0, survivors_s=50.0)
    return View(now_s=100.0, waiting=tuple(waiting), running=tuple(holders), idle=idle,
                known=known, quotas=quotas, rules=rules)  # fmt: skip


@examples(75)
@given(view=views())
def test_a_job_starts_whole_or_not_at_all_on_nodes_that_are_idle_and_nobody_elses(
    view: View,
) -> None:
    plan = decide(view)
    taken: Counter[str] = Counter()
    for decision in plan.decisions:
        if decision.kind not in STARTS:
            assert not decision.parts
            continue
        wanted = next(each for each in view.waiting if each.name == decision.job)
        ranks = [rank for part in decision.parts for rank in part.ranks]
        assert sorted(ranks) == list(range(wanted.world_size))
        taken.update(part.node for part in decision.parts)
    assert all(count == 1 for count in taken.values())
    assert taken.keys() <= view.idle.keys(), "only a node that could start now gets ranks"
    held = Counter(name for each in plan.decisions for name in each.nodes)
    assert all(count == 1 for count in held.values()) and not held.keys() & taken.keys()
    assert not plan.free.keys() & (held.keys() | taken.keys())


@examples(75)
@given(view=views())
def test_quotas_are_never_exceeded(view: View) -> None:
    used = Counter[str]()
    for held in view.running:
        used[held.tenant] += held.world_size
    for decision in decide(view).decisions:
        if decision.kind in STARTS:
            started = next(each for each in view.waiting if each.name == decision.job)
            used[started.tenant] += started.world_size
    assert all(used[tenant] <= quota for tenant, quota in view.quotas.items())


@examples(100)
@given(view=views())
def test_no_job_gets_what_one_before_it_could_have_started_on(view: View) -> None:
    """Walk the queue: whoever waits did not fit what was open to it when its turn came."""
    plan = decide(view)
    owner = {name: (each.priority, each.name) for each in view.running for name in each.spares}
    by_name = {each.name: each for each in view.waiting}
    for each in sorted(view.waiting, key=lambda w: w.order):
        for part in each.last:
            if part.node not in each.evicted:
                owner.setdefault(part.node, (each.priority, each.name))
    left = dict(view.idle)
    for decision in plan.decisions:
        if decision.kind is Kind.PREEMPT:
            continue
        waiter = by_name[decision.job]
        open_to = [
            c
            for name, c in left.items()
            if name not in owner
            or owner[name][1] == waiter.name
            or owner[name][0] < waiter.priority
        ]
        if decision.kind in STARTS:
            assert {part.node for part in decision.parts} <= {c.name for c in open_to}
        elif waiter.tenant not in view.quotas:
            assert not Room(open_to).fits(waiter.world_size, waiter.node_group), decision
        for name in (*decision.nodes, *(part.node for part in decision.parts)):
            left.pop(name)
        # What it could keep and did not is open to all after it.
        owner = {name: held for name, held in owner.items() if held[1] != waiter.name}


@examples(75)
@given(view=views())
def test_nobody_of_lower_or_equal_priority_gets_survivors_or_spares(view: View) -> None:
    view = replace(view, quotas={})
    owner = {name: (each.priority, each.name) for each in view.running for name in each.spares}
    for each in sorted(view.waiting, key=lambda w: w.order):
        for part in each.last:
            if part.node not in each.evicted:
                owner.setdefault(part.node, (each.priority, each.name))
    decided = {each.job: each for each in decide(view).decisions}
    for name in owner.keys() & view.idle.keys():
        priority, of = owner[name]
        takers = [
            each
            for each in view.waiting
            if name in {part.node for part in decided[each.name].parts} and each.name != of
        ]
        recovering = next((each for each in view.waiting if each.name == of), None)
        if recovering is None:
            assert all(each.priority > priority for each in takers), "a spare of a running job"
        elif decided[of].kind not in STARTS and recovering.waiting_since_s > 50.0:
            assert all(each.priority > priority for each in takers), "a survivor"
            keepers = [each for each in view.waiting if name in decided[each.name].nodes]
            assert takers or keepers[0].name == of or keepers[0].priority > priority


@examples(75)
@given(view=views(), kind=st.sampled_from(["too many ranks", "too wide a group", "over quota"]))
def test_a_job_that_can_never_start_changes_nothing_for_the_others(view: View, kind: str) -> None:
    """Of the highest priority and the greatest age, so that it comes first."""
    stuck = WaitingJob(name="stuck", world_size=999, priority=9, created_s=-1.0)
    if kind == "too wide a group":
        stuck = replace(stuck, world_size=16, node_group=16)
    elif kind == "over quota":
        stuck = replace(stuck, world_size=1, tenant="poor")
        view = replace(view, quotas={**view.quotas, "poor": 0})
    alone = decide(view)
    both = decide(replace(view, waiting=(stuck, *view.waiting)))
    assert [each for each in both.decisions if each.job != "stuck"] == list(alone.decisions)
    assert kinds(both)["stuck"] is Kind.WAIT


@examples(75)
@given(view=views())
def test_only_what_can_save_leaves_and_only_for_a_job_that_then_starts(view: View) -> None:
    plan = decide(view)
    leaves = {each.job: each for each in plan.decisions if each.kind is Kind.PREEMPT}
    by_name = {each.name: each for each in view.running}
    assert not leaves or view.rules.preempt
    for name, decision in leaves.items():
        winner = next(each for each in view.waiting if each.name == decision.makes_room_for)
        assert by_name[name].preemptible and not by_name[name].leaving
        assert by_name[name].priority < winner.priority
    for winner_name in {each.makes_room_for for each in leaves.values()}:
        winner = next(each for each in view.waiting if each.name == winner_name)
        mine = [name for name, each in leaves.items() if each.makes_room_for == winner_name]
        gone = [n for n in view.running if n.leaving or n.name in mine]
        room = [*view.idle.values(), *(view.known[n] for each in gone for n in each.nodes)]
        assert Room(room).fits(winner.world_size, winner.node_group), "or they leave for nothing"


@examples(100)
@given(view=views(), data=st.data())
def test_the_order_in_which_jobs_and_nodes_are_listed_decides_nothing(
    view: View, data: st.DataObject
) -> None:
    mixed = replace(
        view,
        waiting=tuple(data.draw(st.permutations(view.waiting))),
        running=tuple(data.draw(st.permutations(view.running))),
        idle=dict(data.draw(st.permutations(list(view.idle.items())))),
    )
    mine = [(each.kind, each.job, each.parts, set(each.nodes)) for each in decide(view).decisions]
    other = [(each.kind, each.job, each.parts, set(each.nodes)) for each in decide(mixed).decisions]
    assert mine == other


class Yard:
    """Nodes of four devices and jobs that end by themselves; time passes in seconds."""

    def __init__(self, count: int, rules: Rules) -> None:
        self.now_s, self.rules = 0.0, rules
        self.nodes = {f"n{i}": node(f"n{i}") for i in range(count)}
        self.running: dict[str, RunningJob] = {}
        self.ends: dict[str, float] = {}
        self.waiting: list[WaitingJob] = []
        self.lengths: dict[str, float] = {}
        self.started: dict[str, float] = {}
        self.estimate: dict[str, float | None] = {}

    def submit(self, name: str, count: int, length_s: float, guess_s: float | None = None) -> None:
        self.waiting.append(job(name, 4 * count, created_s=self.now_s, waiting_since_s=self.now_s))
        self.lengths[name], self.estimate[name] = length_s, guess_s

    def step(self) -> None:
        for name in [name for name, end_s in self.ends.items() if end_s <= self.now_s]:
            del self.running[name], self.ends[name]
        busy = {n for each in self.running.values() for n in each.nodes}
        idle = {n: c for n, c in self.nodes.items() if n not in busy}
        now = View(
            now_s=self.now_s, waiting=tuple(self.waiting), running=tuple(self.running.values()),
            idle=idle, known=self.nodes, rules=self.rules,
        )  # fmt: skip
        for decision in decide(now).decisions:
            if decision.kind in STARTS:
                name = decision.job
                self.waiting = [each for each in self.waiting if each.name != name]
                guess_s = self.estimate[name]
                self.running[name] = running(
                    name, *(part.node for part in decision.parts), started_s=self.now_s,
                    ends_s=None if guess_s is None else self.now_s + guess_s, preemptible=False,
                )  # fmt: skip
                self.ends[name] = self.now_s + self.lengths[name]
                self.started[name] = self.now_s
        self.now_s += 1.0


@examples(60)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=5),
    lengths=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    guesses=st.lists(st.sampled_from([None, 1.0, 5.0, 1e6]), min_size=5, max_size=5),
    small=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    small_guess=st.sampled_from([None, 0.0, 7.0, 1e6]),
    share=st.integers(4, 8),
)
def test_an_endless_stream_of_small_jobs_does_not_starve_a_gang(
    sizes: list[int], lengths: list[int], guesses: list[float | None], small: list[int],
    small_guess: float | None, share: int,
) -> None:  # fmt: skip
    """Whatever the estimates are worth: it starts one longest job after it holds all it can."""
    rules = Rules(backfill_s=20.0)
    yard = Yard(8, rules)
    for i, size in enumerate(sizes):
        yard.submit(f"old{i}", size, lengths[i], guesses[i])
    yard.step()
    yard.submit("gang", share, 10.0)
    since_s = yard.now_s
    bound_s = rules.backfill_s + 2 * max([*lengths, *small]) + 5
    while "gang" not in yard.started:
        assert yard.now_s - since_s <= bound_s, "the gang starves"
        for k in range(2):  # more than ever end
            yard.submit(f"small{yard.now_s:.0f}-{k}", 1, small[k % len(small)], small_guess)
        yard.step()


@examples(60)
@given(
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    small=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    share=st.integers(3, 8),
)
def test_backfill_delays_no_gang_where_the_ends_are_known(
    sizes: list[int], lengths: list[int], small: list[int], share: int
) -> None:
    def start_of_gang(stream: bool) -> float:
        yard = Yard(8, Rules(backfill_s=1e9))
        for i, size in enumerate(sizes):
            yard.submit(f"old{i}", size, lengths[i], float(lengths[i]))
        yard.step()
        yard.submit("gang", share, 10.0, 10.0)
        while "gang" not in yard.started:
            assert yard.now_s < 500
            if stream:
                length = small[int(yard.now_s) % len(small)]
                yard.submit(f"small{yard.now_s:.0f}", 1, length, float(length))
            yard.step()
        return yard.started["gang"]

    assert start_of_gang(stream=True) == start_of_gang(stream=False)


def test_small_jobs_start_beside_a_gang_on_what_it_will_not_need() -> None:
    """The gang of three waits for r's four nodes: the idle ones are left to others."""
    held = running("r", "a", "b", "c", "d", ends_s=500.0, preemptible=False)
    plan = decide(view([job("gang", 12), job("small", 4, created_s=1.0)], nodes("e", "f"), held))
    assert kinds(plan) == {"gang": Kind.RESERVE, "small": Kind.BACKFILL}
    assert "beside what is held for job gang" in why(plan, "small")
    plan = decide(view([job("gang", 20), job("small", 4, created_s=1.0)], nodes("e", "f"), held))
    assert placed(plan, "small") == {"f"}, "one of the idle nodes is held for the gang"
    assert "e held for it until job r ends or leaves" in why(plan, "gang")


def test_a_gang_that_has_waited_for_long_holds_every_idle_node() -> None:
    held = running("r", "a", "b", "c", "d", ends_s=500.0, preemptible=False)
    waiting = [job("gang", 12), job("small", 4, created_s=1.0)]
    late = view(waiting, nodes("e", "f"), held, now_s=1e4)
    assert kinds(decide(late))["gang"] is Kind.RESERVE and not placed(decide(late), "small")


def test_a_recovering_job_of_higher_priority_keeps_its_survivors() -> None:
    last = (Part("a", (0, 1, 2, 3), (0, 1, 2, 3)), Part("gone", (4, 5, 6, 7), (0, 1, 2, 3)))
    high = job("high", 8, priority=5, last=last, waiting_since_s=99.0)
    plan = decide(view([high, job("low", 4)], nodes("a")))
    assert kinds(plan) == {"high": Kind.KEEP, "low": Kind.WAIT}
    assert "it keeps a for 600 s after its last attempt" in why(plan, "high")
    later = decide(view([high, job("low", 4)], nodes("a"), now_s=99.0 + 600.0))
    assert kinds(later) == {"high": Kind.WAIT, "low": Kind.PLACE}, "it stops nobody for ever"


def test_a_recovering_job_takes_its_spare_and_keeps_ranks() -> None:
    last = (Part("a", (0, 1, 2, 3), (0, 1, 2, 3)), Part("gone", (4, 5, 6, 7), (0, 1, 2, 3)))
    high = job("high", 8, last=last, spares=("s",))
    plan = decide(view([high, job("older", 4, created_s=-5.0)], nodes("a", "s")))
    assert placed(plan, "high") == {"a", "s"}
    assert why(plan, "high") == "1 of 2 nodes keep their ranks, spare s joins them"
    assert kinds(plan)["older"] is Kind.WAIT, "what recovers goes first"


def test_higher_priority_takes_the_spare_of_a_lower_job_only_where_nothing_else_suffices() -> None:
    held = running("low", "a", spares=("s",), preemptible=False)
    assert placed(decide(view([job("high", 4, priority=1)], nodes("s", "t"), held)), "high") == {
        "t"
    }
    assert placed(decide(view([job("high", 4, priority=1)], nodes("s"), held)), "high") == {"s"}
    assert kinds(decide(view([job("equal", 4)], nodes("s"), held))) == {"equal": Kind.RESERVE}


def test_the_fewest_and_least_leave_and_say_for_whom() -> None:
    holders = [
        running("old", "a", "b", started_s=1.0),
        running("young", "c", "d", started_s=9.0),
        running("vital", "e", "f", priority=5),
        running("unsaved", "g", preemptible=False, cannot="it has no checkpoints"),
    ]
    plan = decide(view([job("high", 8, priority=3)], {}, *holders))
    assert kinds(plan) == {"young": Kind.PREEMPT, "high": Kind.RESERVE}
    assert why(plan, "young") == "job high of priority 3 needs its nodes"
    assert "job young of lower priority must save and leave" in why(plan, "high")
    plan = decide(view([job("high", 20, priority=3)], {}, *holders))
    assert kinds(plan) == {"high": Kind.RESERVE}, "who leaves would leave for nothing"
    assert "job unsaved is not displaced: it has no checkpoints" in why(plan, "high")
    plan = decide(view([job("high", 8, priority=3)], {}, *holders, rules=Rules(preempt=False)))
    assert kinds(plan) == {"high": Kind.RESERVE}


def test_nobody_more_leaves_while_the_first_is_still_saving() -> None:
    holders = [running("a", "a", leaving=True), running("b", "b")]
    plan = decide(view([job("high", 4, priority=3)], {}, *holders))
    assert kinds(plan) == {"high": Kind.RESERVE}


def test_a_tenants_own_job_leaves_where_its_quota_is_short() -> None:
    holders = [running("mine", "a", tenant="t"), running("other", "b", tenant="u")]
    waiting = [job("high", 4, priority=3, tenant="t")]
    plan = decide(view(waiting, nodes("c"), *holders, quotas={"t": 4}))
    assert kinds(plan) == {"mine": Kind.PREEMPT, "high": Kind.RESERVE}
    assert "tenant t has a quota of 4 devices: 4 are in use, and it needs 4" in why(plan, "high")


def test_a_quota_is_promised_in_order() -> None:
    held = running("r", "a", tenant="t", preemptible=False)
    waiting = [job("big", 8, tenant="t"), job("small", 4, tenant="t", created_s=1.0)]
    plan = decide(view(waiting, nodes("b", "c"), held, quotas={"t": 8}))
    assert kinds(plan) == {"big": Kind.WAIT, "small": Kind.WAIT}, "the small one does not overtake"
    waiting.append(job("theirs", 8, tenant="u", created_s=2.0))
    plan = decide(view(waiting, nodes("b", "c"), held, quotas={"t": 8}))
    assert kinds(plan)["theirs"] is Kind.PLACE, "another tenant's job does not wait for the quota"


def test_a_job_that_its_quota_can_never_admit_again_keeps_no_survivors() -> None:
    last = (Part("a", (0, 1, 2, 3), (0, 1, 2, 3)),)
    big = job("big", 4, priority=5, tenant="t", last=last, waiting_since_s=99.0)
    plan = decide(view([big, job("low", 4)], nodes("a"), quotas={"t": 2}))
    assert kinds(plan) == {"big": Kind.WAIT, "low": Kind.PLACE}


def test_what_is_missing_is_a_clause() -> None:
    assert why(decide(view([job("a", 4)], {})), "a") == (
        "it needs 4 devices, and no node may be used yet: `megascale nodes` has those that joined"
    )
    plan = decide(view([job("a", 8, node_group=8)], nodes("n")))
    assert why(plan, "a") == (
        "it needs nodes of at least 8 devices, and the largest that may be used has 4"
    )
    plan = decide(view([job("a", 8, node_group=2)], nodes("n")))
    assert why(plan, "a") == (
        "it needs 8 devices in groups of 2 on one node, and the nodes that may be used can give 4"
    )
    plan = decide(view([job("a", 8, tenant="t")], nodes("n", "m"), quotas={"t": 4}))
    assert why(plan, "a") == "it needs 8 devices, and the quota of tenant t is 4 devices"


def test_a_decision_starts_a_bounded_number_of_jobs() -> None:
    many = [job(f"w{i:03d}", 4) for i in range(MAX_STARTS + 5)]
    plan = decide(view(many, nodes(*(f"n{i:03d}" for i in range(100)))))
    assert [each.job for each in plan.decisions] == [f"w{i:03d}" for i in range(MAX_STARTS)]


@pytest.mark.parametrize("world", [1, 4, 9, 16])
@given(data=st.data())
def test_room_is_exactly_when_there_is_a_placement(world: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=6))
    tp = data.draw(st.sampled_from([each for each in (1, 2, 3, 4) if world % each == 0]))
    candidates = [node(f"n{i}", size) for i, size in enumerate(sizes)]
    assert Room(candidates).fits(world, tp) == (place(world, tp, candidates) is not None)
