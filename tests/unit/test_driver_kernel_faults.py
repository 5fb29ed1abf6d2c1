"""A line of a kernel log that ends an attempt at once, and what keeps it from doing so."""

from __future__ import annotations

from tests.harness.desk import Desk
from tests.harness.kernel_lines import OFF_BUS, gpu_falls_off, logs, with_gpus

from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.job import JobPhase

ENDS = (
    OFF_BUS,
    "NVRM: Xid (PCI:0000:44:00): 48, pid=7, An uncorrectable double bit error (DBE)",
    "NVRM: Xid (PCI:0000:44:00): 119, Timeout waiting for RPC from GSP0!",
    "NVRM: Xid (PCI:0000:44:00): 62, pid=7, 2027a 2027f",
)


def running(*nodes: str) -> Desk:
    desk = Desk(*nodes)
    desk.submit(max_restarts_without_progress=50)
    desk.run()
    with_gpus(desk)
    return desk


def reported(desk: Desk, node: str, *lines: str, rank: int = -1, attempt: int = 0) -> None:
    of = ("a", attempt or desk.job().attempt)
    seen = logs(*lines, rank=rank, at_s=desk.now_s)
    desk.report(node, AttemptPhase.RUNNING, logs_of=of, logs=seen)


def test_only_the_kernels_own_log_of_this_attempt_counts() -> None:
    desk = running("n1", "n2", "n3")
    node = desk.job().slots[1].node
    reported(desk, node, OFF_BUS, rank=3)  # a worker printed it
    reported(desk, node, OFF_BUS, attempt=7)
    assert desk.job().phase is JobPhase.RUNNING


def test_a_machine_with_other_executors_or_without_gpus_is_not_this_nodes_gpu() -> None:
    desk = running("n1", "n2", "n3")
    with_gpus(desk, boot="one")
    reported(desk, desk.job().slots[0].node, OFF_BUS)
    assert desk.job().phase is JobPhase.RUNNING
    desk = Desk("n1", "n2", "n3")  # CPUs
    desk.submit()
    desk.run()
    reported(desk, desk.job().slots[0].node, OFF_BUS)
    assert desk.job().phase is JobPhase.RUNNING


def test_the_same_line_on_another_node_before_is_software_and_waits() -> None:
    desk = running("n1", "n2", "n3", "n4")
    first, second = (slot.node for slot in desk.job().slots)
    gpu_falls_off(desk, first)
    for slot in desk.job().slots:
        seen = logs(OFF_BUS) if slot.node == first else ()
        desk.report(slot.node, AttemptPhase.IDLE, logs_of=("a", 1), logs=seen)
    desk.wait(5.0)
    desk.run()
    assert second in {slot.node for slot in desk.job().slots}
    reported(desk, second, OFF_BUS)
    assert desk.job().phase is JobPhase.RUNNING and desk.disposition(second) == "SCHEDULABLE"


def test_many_gpus_that_fall_off_evict_no_more_nodes_than_the_breaker_allows() -> None:
    nodes = [f"n{number}" for number in range(1, 11)]
    desk = Desk(*nodes)
    desk.submit(dp=len(nodes), max_restarts_without_progress=50)
    desk.run()
    with_gpus(desk)
    for slot in desk.job().slots[:6]:
        reported(desk, slot.node, OFF_BUS)
    bad = {slot.node for slot in desk.job().slots[:6]}
    assert desk.job().phase is JobPhase.STOPPING
    for slot in desk.job().slots:
        seen = logs(OFF_BUS) if slot.node in bad else ()
        desk.report(slot.node, AttemptPhase.IDLE, logs_of=("a", 1), logs=seen)
    assert {desk.disposition(name) for name in bad} == {"SCHEDULABLE"}, "shared: the rack's power"
