"""The check of a group of nodes on NCCL: a pair that works, one that cannot, and one that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from tests.harness.agent_process import TOKEN, AgentProcess, start_agent
from tests.harness.recording_driver import RecordingDriver
from tests.harness.waiting import eventually

from megascale_common.service.channel import open_channel
from megascale_driver.analysis.group_search import Answer
from megascale_driver.core.values.events import CheckGroup, GroupMember
from megascale_driver.nodes.checks import Found, check_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]


def address_of(agent: AgentProcess) -> Path:
    assert agent.process.poll() is None, agent.log()
    return agent.node_folder / "executor.address"


async def checked(agents: Sequence[AgentProcess], devices: Sequence[int]) -> dict[str, Found]:
    """One group of the nodes, each with one device, as the driver has it checked."""
    members = tuple(
        GroupMember(agent.node, "", address_of(agent).read_text().strip(), (device,))
        for agent, device in zip(agents, devices, strict=True)
    )
    group = CheckGroup("demo", 1, 1, 0, members)
    return await check_group(group, lambda endpoint: open_channel(endpoint, TOKEN))


@asynccontextmanager
async def two_nodes(folder: Path, kind: str) -> AsyncIterator[list[AgentProcess]]:
    """Two nodes of one device each, on this host."""
    driver = RecordingDriver("test", TOKEN)
    await driver.start(folder / "driver.address")
    agents = [
        start_agent(
            folder, node=f"n{index}", devices=str(index), template="", options=("--device", kind)
        )
        for index in range(2)
    ]
    try:
        for agent in agents:
            await eventually(lambda agent=agent: address_of(agent).exists(), "the agents serve")
        yield agents
    finally:
        for agent in agents:
            agent.end()
        await driver.stop()


async def one_without_its_device(folder: Path, kind: str) -> None:
    """A node without the device skips the check: that says nothing about it."""
    async with two_nodes(folder, kind) as agents:
        works = await checked(agents, (0, 1))
        assert [works[name].answer for name in ("n0", "n1")] == [Answer.PASS] * 2, works
        skipped = await checked(agents, (0, 0))
        assert skipped["n1"].answer is Answer.SKIPPED, skipped
        assert "not devices of this node" in skipped["n1"].detail
        assert skipped["n0"].answer is Answer.FAIL, skipped


async def one_that_stands_still(folder: Path, kind: str) -> None:
    """It costs the other its time limit and no more; afterwards both are as before."""
    async with two_nodes(folder, kind) as agents:
        os.kill(agents[1].process.pid, signal.SIGSTOP)
        try:
            hangs = await checked(agents, (0, 1))
        finally:
            os.kill(agents[1].process.pid, signal.SIGCONT)
        assert hangs["n0"].answer is Answer.FAIL and hangs["n1"].answer is Answer.SILENT, hangs
        again = await checked(agents, (0, 1))
        assert {each.answer for each in again.values()} == {Answer.PASS}, again


async def test_two_nodes_check_each_other_on_nccl(tmp_path: Path) -> None:
    await one_without_its_device(tmp_path, "cuda")


async def test_a_node_that_stands_still_fails_the_check_of_its_group_on_nccl(
    tmp_path: Path,
) -> None:
    await one_that_stands_still(tmp_path, "cuda")
