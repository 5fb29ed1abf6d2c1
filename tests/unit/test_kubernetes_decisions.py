"""What the Kubernetes platform orders for what stands, and that lost orders change no outcome."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megascale_driver.platform.kubernetes.decisions import (
    Cordon,
    DeletePod,
    DriverNode,
    GiveBack,
    MarkMachine,
    Order,
    SetTopology,
    ShowCondition,
    Uncordon,
    UnmarkMachine,
    decide,
    unreachable,
)
from megascale_driver.platform.kubernetes.objects import (
    MARK,
    TAINT,
    Machine,
    Mark,
    Pod,
    condition_patch,
    machine_of,
    marking,
    unmarking,
)


def a_machine(name: str = "m1", **changes: Any) -> Machine:
    values: dict[str, Any] = {
        "version": "1",
        "switch": "s0",
        "reached": True,
        "cordoned": False,
        "conditions": ("Ready",),
        "trouble": "",
        "mark": None,
        "condition": False,
    }
    return Machine(name=name, **(values | changes))


def a_pod(name: str = "n-0", machine: str = "m1", uid: str = "u1", **changes: Any) -> Pod:
    values: dict[str, Any] = {
        "version": "1",
        "running": True,
        "ending": False,
        "topology": f"switch=s0,host={machine}",
    }
    return Pod(name=name, uid=uid, machine=machine, **(values | changes))


def a_node(name: str = "n-0", host: str = "m1", **changes: Any) -> DriverNode:
    values: dict[str, Any] = {
        "disposition": "schedulable",
        "reason": "",
        "alive": True,
        "dead": False,
    }
    return DriverNode(name=name, host=host, **(values | changes))


EVICTED = a_node(disposition="quarantined", reason="xid 79 on gpu 3")
MARKED = Mark(node="n-0", pod="u1", reason="megascale: xid 79 on gpu 3")
OUT = a_machine(cordoned=True, mark=MARKED, condition=True)


def orders(node: DriverNode | None, pod: Pod | None, *machines: Machine) -> list[Order]:
    return decide(
        [node] if node else [],
        {pod.name: pod} if pod else {},
        {each.name: each for each in machines},
    )


def test_nothing_is_ordered_where_all_agree() -> None:
    assert orders(a_node(), a_pod(), a_machine(), a_machine("m2")) == []


def test_an_evicted_nodes_machine_is_marked_before_its_pod_is_deleted() -> None:
    [order] = orders(EVICTED, a_pod(), a_machine())
    assert order == MarkMachine(a_machine(), MARKED)
    assert orders(EVICTED, a_pod(), OUT) == [DeletePod(a_pod(), MARKED.reason)]


def test_the_cordon_of_somebody_else_stays_theirs() -> None:
    [order] = orders(EVICTED, a_pod(), a_machine(cordoned=True, trouble="cordoned"))
    assert isinstance(order, MarkMachine) and not order.mark.cordoned


def test_a_pod_that_ends_is_awaited_and_forced_only_where_nothing_answers() -> None:
    ending = a_pod(ending=True)
    assert orders(EVICTED, ending, OUT) == []
    assert orders(EVICTED, ending, replace(OUT, reached=False)) == [
        DeletePod(ending, MARKED.reason, force=True)
    ]


def test_the_driver_gets_the_node_back_once_its_new_agent_runs_elsewhere() -> None:
    moved = a_pod(machine="m2", uid="u2")
    where = (OUT, a_machine("m2"))
    # The driver still shows the agent that is gone.
    assert orders(EVICTED, moved, *where) == []
    assert orders(replace(EVICTED, host="m2", alive=False), moved, *where) == []
    assert orders(replace(EVICTED, host="m2"), replace(moved, running=False), *where) == []
    [order] = orders(replace(EVICTED, host="m2"), moved, *where)
    assert order == GiveBack("n-0", "moved from machine m1 to m2", "moved u1 to u2", OUT, MARKED)
    [order] = orders(a_node(host="m2"), moved, *where)
    assert order == MarkMachine(OUT, replace(MARKED, state="moved"))
    assert orders(a_node(host="m2"), moved, replace(OUT, mark=order.mark), where[1]) == []


def test_a_node_is_evicted_again_on_its_new_machine() -> None:
    before = replace(OUT, mark=replace(MARKED, state="moved"))
    [order] = orders(
        replace(EVICTED, host="m2"), a_pod(machine="m2", uid="u2"), before, a_machine("m2")
    )
    assert isinstance(order, MarkMachine) and order.machine.name == "m2"


def test_an_operator_who_gives_the_node_back_gets_the_machine_back() -> None:
    assert orders(a_node(), a_pod(), OUT) == [UnmarkMachine(OUT, MARKED)]


def test_uncordoning_a_machine_says_that_it_is_repaired() -> None:
    repaired = replace(OUT, cordoned=False)
    [order] = orders(EVICTED, a_pod(), repaired)
    why = "machine m1 was uncordoned"
    assert order == GiveBack("n-0", why, "repaired u1", repaired, MARKED, repaired=True)
    moved = replace(repaired, mark=replace(MARKED, state="moved"))
    assert moved.mark is not None
    assert orders(None, None, moved) == [UnmarkMachine(moved, moved.mark)]


def test_a_drained_machine_keeps_work_off_its_node_and_may_be_evicted_too() -> None:
    drained = replace(OUT, mark=replace(MARKED, state="drained"), trouble="drained (x)")
    assert drained.mark is not None
    assert orders(a_node(), a_pod(), drained) == [Cordon("n-0", "machine m1: drained (x)")]
    [order] = orders(EVICTED, a_pod(), drained)
    assert order == MarkMachine(drained, MARKED), "the cordon is still ours"
    uncordoned = replace(drained, cordoned=False)
    node = a_node(disposition="cordoned", reason="mine")
    assert orders(node, a_pod(), uncordoned) == [UnmarkMachine(uncordoned, drained.mark)]


def test_conditions_keep_work_off_a_node_and_no_longer() -> None:
    bad = a_machine(trouble="NotReady (KubeletNotReady)")
    [order] = orders(a_node(), a_pod(), bad)
    assert order == Cordon("n-0", "machine m1: NotReady (KubeletNotReady)")
    ours = a_node(disposition="cordoned", reason=f"kubernetes: {order.why}")
    assert orders(ours, a_pod(), bad) == []
    assert orders(ours, a_pod(), a_machine()) == [Uncordon("n-0", "machine m1 is well again")]
    theirs = a_node(disposition="cordoned", reason="I look into it")
    assert orders(theirs, a_pod(), a_machine()) == []


def test_a_dead_nodes_pod_is_replaced_only_if_its_machine_is_gone_too() -> None:
    dead = a_node(alive=False, dead=True, disposition="cordoned", reason="x")
    assert orders(dead, a_pod(), a_machine()) == []
    gone = a_machine(reached=False, trouble="NotReady (NodeStatusUnknown)")
    [order] = orders(dead, a_pod(), gone)
    assert isinstance(order, DeletePod) and not order.force
    [order] = orders(dead, a_pod(ending=True), gone)
    assert isinstance(order, DeletePod) and order.force


def test_without_a_driver_nothing_is_evicted_or_given_back() -> None:
    assert orders(None, a_pod(), OUT, a_machine("m2", trouble="DiskPressure (x)")) == []


def test_an_agent_is_told_where_it_runs() -> None:
    pod = a_pod(topology="")
    assert orders(None, pod, a_machine(switch="")) == [SetTopology(pod, "host=m1")]
    assert orders(None, pod, a_machine("m9")) == []


def test_the_condition_follows_the_mark() -> None:
    for machine in (replace(OUT, condition=False), a_machine(condition=True)):
        assert orders(None, None, machine) == [ShowCondition(machine)]


@pytest.mark.parametrize("seed", range(40))
def test_lost_orders_change_no_outcome(seed: int) -> None:
    """Orders are lost as by a crash of the controller, also in the middle of one."""
    world = World(random.Random(seed))
    for turn in range(600):
        if turn < 200 and len(world.evicted_from) < len(world.machines) - 1:
            world.evict()
        # From turn 200 on nothing is lost any more: now all has to come to rest.
        done = world.turn(loses=turn < 200)
        if turn >= 200 and not done and world.agent_follows_pod:
            break
    else:
        pytest.fail(f"no rest: {world}")
    node, pod = world.node, world.pod
    assert (node.disposition, node.host) == ("schedulable", pod.machine)
    marks = {each.name: each.mark for each in world.machines.values() if each.mark is not None}
    assert set(marks) == set(world.evicted_from) and len(marks) == len(world.machines) - 1
    assert pod.machine not in marks
    assert all(mark.state == "moved" for mark in marks.values())


class World:
    """One node, four machines, a StatefulSet and an agent, as far as they matter here."""

    def __init__(self, choice: random.Random) -> None:
        self.choice = choice
        self.machines = {name: a_machine(name) for name in ("m1", "m2", "m3", "m4")}
        self.pod, self.node, self.uids = a_pod(), a_node(), 1
        self.evicted_from: list[str] = []
        self.requests: set[str] = set()

    def evict(self) -> None:
        """The driver decides, as soon as the node is back from the last time."""
        if self.node.disposition == "schedulable" and self.agent_follows_pod:
            self.node = replace(self.node, disposition="quarantined", reason="broken")
            self.evicted_from.append(self.pod.machine)

    @property
    def agent_follows_pod(self) -> bool:
        return self.node.host == self.pod.machine

    def turn(self, *, loses: bool) -> list[Order]:
        """One pass of the controller, then of everything else; the orders that were given."""
        seen = decide([self.node], {self.pod.name: self.pod}, self.machines)
        for order in seen:
            if loses and self.choice.random() < 0.5:
                break  # the process was killed
            self.apply(order, cut=loses and self.choice.random() < 0.5)
        if self.pod.ending and self.choice.random() < 0.5:
            free = [m for m in self.machines.values() if not m.cordoned]
            self.uids += 1
            self.pod = a_pod(machine=free[0].name, uid=f"u{self.uids}", topology="")
        elif self.pod.topology and self.choice.random() < 0.5:
            self.node = replace(self.node, host=self.pod.machine)
        return seen

    def apply(self, order: Order, *, cut: bool) -> None:
        """``cut``: the process is killed between two calls of one order."""
        match order:
            case MarkMachine(machine, mark):
                self.machines[machine.name] = replace(machine, mark=mark, cordoned=True)
            case ShowCondition(machine):
                self.machines[machine.name] = replace(machine, condition=machine.mark is not None)
            case DeletePod():
                self.pod = replace(self.pod, ending=True)
            case SetTopology(_, topology):
                self.pod = replace(self.pod, topology=topology)
            case GiveBack(_, _, once, machine, mark):
                if once not in self.requests:
                    self.requests.add(once)
                    self.node = replace(self.node, disposition="schedulable", reason="")
                if not cut:
                    moved = replace(mark, state="moved")
                    self.machines[machine.name] = replace(machine, mark=moved)
            case other:
                raise AssertionError(f"nobody has uncordoned a machine: {other}")

    def __str__(self) -> str:
        return f"{self.node} {self.pod} {list(self.machines.values())}"


NODE = {
    "metadata": {"name": "m1", "uid": "u", "resourceVersion": "7", "labels": {"rack": "r4"}},
    "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
    "status": {
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "KubeletReady"},
            {"type": "GpuCheck", "status": "True"},
        ]
    },
}


def test_marks_are_read_as_they_were_written() -> None:
    patch = marking(NODE, MARKED)
    assert patch["metadata"]["resourceVersion"] == "7" and patch["metadata"]["uid"] == "u"
    assert [each["key"] for each in patch["spec"]["taints"]] == ["nvidia.com/gpu", TAINT]
    meta = {**NODE["metadata"], **patch["metadata"]}
    found = machine_of({**NODE, "metadata": meta, "spec": patch["spec"]}, "rack")
    assert (found.mark, found.switch, found.trouble, found.reached) == (MARKED, "r4", "", True)
    back = unmarking({**NODE, "metadata": meta, "spec": patch["spec"]}, MARKED)
    assert back["metadata"]["annotations"] == {MARK: None}
    assert back["spec"] == {"taints": NODE["spec"]["taints"], "unschedulable": None}
    theirs = unmarking(NODE, replace(MARKED, cordoned=False))
    assert "unschedulable" not in theirs["spec"]


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"node": "n"}', '{"a": 1}'])
def test_a_mark_that_somebody_has_edited_is_none(text: str) -> None:
    meta = {**NODE["metadata"], "annotations": {MARK: text}}
    assert machine_of({**NODE, "metadata": meta}, "rack").mark is None


def test_trouble_has_the_words_of_kubernetes() -> None:
    conditions = [
        {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"},
        {"type": "DiskPressure", "status": "True", "reason": "KubeletHasDiskPressure"},
        {"type": "MemoryPressure", "status": "False"},
    ]
    found = machine_of(
        {
            "metadata": NODE["metadata"],
            "spec": {"unschedulable": True},
            "status": {"conditions": conditions},
        },
        "rack",
    )
    assert found.trouble == (
        "NotReady (NodeStatusUnknown), DiskPressure (KubeletHasDiskPressure), cordoned"
    )
    assert found.conditions == (
        "NotReady (NodeStatusUnknown)",
        "DiskPressure (KubeletHasDiskPressure)",
    )
    assert not found.reached


def test_the_condition_keeps_those_of_others() -> None:
    patch = condition_patch(NODE, MARKED, "2026-01-01T00:00:00Z")
    kinds = {each["type"]: each["status"] for each in patch["status"]["conditions"]}
    assert kinds == {"Ready": "True", "GpuCheck": "True", "MegascaleEvicted": "True"}


def test_nodes_on_machines_that_do_not_report_are_named_with_the_words_of_kubernetes() -> None:
    words = ("NotReady (NodeStatusUnknown)", "taint node.kubernetes.io/unreachable")
    machines = {
        "m1": a_machine(),
        "m2": a_machine("m2", reached=False, conditions=words),
        "m3": a_machine("m3", conditions=("DiskPressure (KubeletHasDiskPressure)",)),
    }
    pods = {f"n-{i}": a_pod(f"n-{i}", f"m{i + 1}") for i in range(3)}
    pods["n-4"] = a_pod("n-4", "")
    nodes = [a_node(f"n-{number}") for number in range(6)]
    assert unreachable(nodes, pods, machines) == {"n-1": f"machine m2: {words[0]}, {words[1]}"}
