"""Lines of kernel logs in reports of a node, for tests of the driver's core."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.desk import Desk

from megascale_common.node.logs.matcher import Matcher
from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.core.values.cluster import AttemptPhase, Device

OFF_BUS = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"


def logs(*lines: str, rank: int = -1, at_s: float = 1000.0) -> tuple[Observation, ...]:
    """What an agent reports of these lines; ``rank`` -1: of the kernel's log."""
    matcher = Matcher()
    matcher.feed("\n".join(lines).encode())
    matcher.close()
    return tuple(Observation("", one, at_s, rank) for one in matcher.take())


def with_gpus(desk: Desk, boot: str = "") -> None:
    """Make the devices of all nodes GPUs; ``boot``: of one machine."""
    nodes = {
        name: replace(
            node,
            identity=replace(
                node.identity,
                boot_id=boot,
                devices=tuple(Device(each.index, "cuda") for each in node.identity.devices),
            ),
        )
        for name, node in desk.state.nodes.items()
    }
    desk.state = replace(desk.state, nodes=nodes)


def gpu_falls_off(desk: Desk, node: str, line: str = OFF_BUS) -> None:
    """The kernel of a node of the running attempt reports that a GPU is gone; its ranks run on."""
    with_gpus(desk)
    job = desk.job()
    of = (job.name, job.attempt)
    desk.report(node, AttemptPhase.RUNNING, logs_of=of, logs=logs(line, at_s=desk.now_s))
