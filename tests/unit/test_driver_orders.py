"""The desired states of nodes: what a node needs, and no more, also in a job of 1,536 nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.harness.desk import Desk
from tests.harness.simulated_cluster import demo_job

from megascale.v1 import types_pb2
from megascale_common.service.errors import AssignmentError
from megascale_driver.core.values.attempt import Attempt, NodeSlot
from megascale_driver.core.values.cluster import Cluster, Desired, DesiredPhase, Identity, Node
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.nodes import orders
from megascale_driver.nodes.orders import Orders, desired_state
from megascale_executor.agent.processes import job_inputs
from megascale_executor.agent.run.assignment import check_assignment, job_of
from megascale_job import loading
from megascale_job.sections.code import CodeConfig, EnvironmentConfig

NODES, RANKS = 1536, 8
EPOCH = types_pb2.Epoch(cluster_generation=1, create_revision=7)
MIB = 1 << 20


def fleet(nodes: int = NODES) -> Cluster:
    """A job that starts on all nodes, each with eight ranks."""
    values = loading.to_mapping(demo_job("a"))
    values["parallelism"] |= {"tp": RANKS, "pp": 1, "dp": nodes}
    values["model"] |= {"heads": RANKS}
    values["training"] |= {"global_batch_size": nodes}
    config = loading.from_accepted(values)
    slots = tuple(
        NodeSlot(
            f"node-{n:05d}", tuple(range(RANKS * n, RANKS * n + RANKS)), tuple(range(RANKS)), "i"
        )
        for n in range(nodes)
    )
    job = Job("a", config, phase=JobPhase.STARTING, current=Attempt(number=3, slots=slots))
    wanted = Desired(DesiredPhase.START, "a", 3, "10.0.0.1:4000")
    return Cluster(
        nodes={
            slot.node: Node(slot.node, Identity("i"), desired=wanted, desired_version=2)
            for slot in slots
        },
        jobs={"a": job},
    )


def test_desired_states_stay_small_whatever_the_size_of_the_job() -> None:
    few, many = fleet(8), fleet()
    sizes = [Orders(many, EPOCH).of(name).ByteSize() for name in many.nodes]
    assert max(sizes) < 4096, "what one node needs does not grow with the job"
    assert max(sizes) - max(Orders(few, EPOCH).of(name).ByteSize() for name in few.nodes) < 64
    assert sum(sizes) < 6 * MIB
    # The last protocol's form: the whole table to every node.
    table = Orders(many, EPOCH).of("node-00000", protocol=1).ByteSize()
    assert table * NODES > 200 * MIB, "what this replaces"


def test_all_nodes_of_an_attempt_get_one_digest_and_another_placement_has_another() -> None:
    state = fleet(4)
    orders = Orders(state, EPOCH)
    digests = {orders.of(name).assignment.rank_table_digest for name in state.nodes}
    assert len(digests) == 1 and len(digests.pop()) == 32
    slots = state.jobs["a"].slots
    swapped = (
        NodeSlot(slots[1].node, slots[0].ranks, slots[0].devices),
        NodeSlot(slots[0].node, slots[1].ranks, slots[1].devices),
        *slots[2:],
    )
    job = state.jobs["a"]
    other = Job("a", job.config, phase=job.phase, current=Attempt(number=3, slots=swapped))
    found = Orders(Cluster(nodes=state.nodes, jobs={"a": other}), EPOCH).of("node-00002")
    assert found.assignment.ranks == orders.of("node-00002").assignment.ranks
    assert (
        found.assignment.rank_table_digest != orders.of("node-00002").assignment.rank_table_digest
    )


@pytest.mark.parametrize("protocol", [1, 2])
def test_an_agent_accepts_the_slice_and_the_whole_table(protocol: int) -> None:
    state = fleet(4)
    name = "node-00002"
    message = Orders(state, EPOCH).of(name, protocol).assignment
    assert len(message.rank_nodes) == (4 * RANKS if protocol == 1 else 0)
    check_assignment(message, state.jobs["a"].config, name, range(RANKS))
    assert list(message.ranks) == list(range(16, 24))
    message.ranks[0] = 4 * RANKS
    with pytest.raises(AssignmentError, match="do not exist in a world of 32"):
        check_assignment(message, state.jobs["a"].config, name, range(RANKS))


def test_the_whole_table_is_built_once_for_all_agents_of_the_last_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []
    ordinary = orders._rank_nodes

    def counted(job: Job) -> list[str]:
        built.append(job.name)
        return ordinary(job)

    monkeypatch.setattr(orders, "_rank_nodes", counted)
    state = fleet(16)
    found = Orders(state, EPOCH)
    tables = [tuple(found.of(name, 1).assignment.rank_nodes) for name in state.nodes]
    assert len(tables[0]) == 16 * RANKS and set(tables) == {tables[0]}
    assert built == ["a"]


def test_an_assignment_with_neither_table_nor_digest_is_refused() -> None:
    state = fleet(2)
    message = Orders(state, EPOCH).of("node-00001").assignment
    message.rank_table_digest = ""
    with pytest.raises(AssignmentError, match="0 rank_nodes for a world size of 16"):
        check_assignment(message, state.jobs["a"].config, "node-00001", range(RANKS))


def test_a_node_without_work_gets_no_assignment() -> None:
    desk = Desk("n1")
    message = desired_state(desk.state.nodes["n1"], None, EPOCH)
    assert message.epoch == EPOCH and not message.HasField("assignment")


@pytest.mark.parametrize(
    "changes",
    [
        {"code": CodeConfig(uri="/store/a.whl", sha256="0" * 64)},
        {"environment": EnvironmentConfig(secrets={"KEY": "env:KEY"})},
        {"environment": EnvironmentConfig(run_as="acme")},
    ],
)
async def test_an_older_agent_refuses_a_job_whose_surroundings_it_would_leave_out(
    changes: dict[str, Any],
) -> None:
    cluster = fleet(2)
    job = replace(cluster.jobs["a"], config=replace(cluster.jobs["a"].config, **changes))
    sent = Orders(replace(cluster, jobs={"a": job}), EPOCH)
    name = next(iter(cluster.nodes))
    newest = sent.of(name).assignment
    assert job_of(newest) == job.config and not newest.HasField("spec")
    for protocol in (1, 2):
        path = sent.of(name, protocol).assignment.spec.code.path
        with pytest.raises(AssignmentError, match=r"update the node cannot be read on this node"):
            await job_inputs.find(CodeConfig(path=path))
    plain = Orders(cluster, EPOCH)
    older = plain.of(name, 2).assignment
    assert job_of(older) == cluster.jobs["a"].config and not older.job_json


def test_an_agent_refuses_a_job_that_is_not_the_one_of_its_digest() -> None:
    state = fleet(1)
    message = Orders(state, EPOCH).of("node-00000").assignment
    assert job_of(message) == state.jobs["a"].config
    message.job_json = message.job_json.replace(b'"steps":100000', b'"steps":100001')
    with pytest.raises(AssignmentError, match="job_json has the SHA-256"):
        job_of(message)
