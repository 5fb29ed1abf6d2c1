"""Dozens of real agents check each other in groups, which are halved: the one that fails is found.

The driver's part of a search is in tests/simulation/test_group_checks.py and, with three nodes of a
real job, in tests/chaos/test_unknown_culprit.py. Here the calls, the processes that they fork on
each node and what these reduce together are real, and many. MEGASCALE_TEST_AGENTS sets how many.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from pathlib import Path

import pytest
from tests.harness.agent_process import TOKEN, AgentProcess, start_agent
from tests.harness.installed_package import install
from tests.harness.waiting import eventually

from megascale_common.service.channel import open_channel
from megascale_driver.analysis.group_search import Answer, Search, advance, begin
from megascale_driver.core.values.events import CheckGroup, GroupMember
from megascale_driver.nodes import checks

AGENTS = int(os.environ.get("MEGASCALE_TEST_AGENTS", "32"))
FAILS = """
from megascale_executor.diagnostics.diagnostic import Diagnostic
from megascale_executor.diagnostics.finding import Finding

class Cable(Diagnostic):
    name = "cable"
    before_attempts = on_demand = False
    with_nodes = True

    async def run(self, node):
        verdict = "FAIL" if (node.folder / "loose").exists() else "PASS"
        return [Finding(self.name, "nic0", verdict, "symbol errors while the group reduced")]
"""


async def checked(search: Search, endpoints: dict[str, str]) -> dict[str, Answer]:
    """Have all groups of the round checked side by side, as the driver does."""
    wanted = [
        CheckGroup(
            "a", 1, search.rounds, number,
            tuple(GroupMember(name, "", endpoints[name], (0,)) for name in group),
        )
        for number, group in enumerate(search.running)
    ]  # fmt: skip

    def dial(endpoint: str) -> checks.grpc.aio.Channel:
        return open_channel(endpoint, TOKEN)

    found = await asyncio.gather(*(checks.check_group(group, dial) for group in wanted))
    return {name: one.answer for group in found for name, one in group.items()}


@pytest.mark.slow
async def test_the_one_of_many_agents_that_fails_with_others_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    install(packages, "acme-cable", FAILS, {"cable": "Cable"})
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    names = [f"n{number:02}" for number in range(AGENTS)]
    culprit = names[2 * AGENTS // 3]
    (tmp_path / "driver.address").write_text("127.0.0.1:9\n")  # no driver is needed
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    agents: list[AgentProcess] = []
    try:
        for name in names:
            agents.append(start_agent(tmp_path, node=name, devices="0", template=""))
        (agents[names.index(culprit)].node_folder / "loose").touch()
        addresses = [agent.node_folder / "executor.address" for agent in agents]
        await eventually(
            lambda: all(path.exists() for path in addresses), "all agents serve",
            lambda: sum(path.exists() for path in addresses),
        )  # fmt: skip
        endpoints = {
            name: path.read_text().strip() for name, path in zip(names, addresses, strict=True)
        }
        # Their templates import torch first, which takes the agents' starts together: in turn.
        for first, second in zip(names[::2], names[1::2], strict=True):
            if culprit not in (first, second):
                pair = await checked(Search(running=((first, second),)), endpoints)
                assert set(pair.values()) == {Answer.PASS}, pair
        ready_s = loop.time()
        search = begin(names)
        while not search.over:
            search = advance(search, await checked(search, endpoints))
        print(
            f"{AGENTS} agents check each other: {search.rounds} rounds in "
            f"{loop.time() - ready_s:.2f} s, started in {ready_s - began_s:.2f} s"
        )
        assert search.bad == (culprit,) and not search.links, search
        assert search.rounds <= math.ceil(math.log2(AGENTS)) + 4
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                agent.kill_group()
