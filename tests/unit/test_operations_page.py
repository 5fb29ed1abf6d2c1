"""docs/operations.md tells of exactly the events, metrics and checks that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from prometheus_client import CollectorRegistry
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale.v1 import link_pb2
from megascale_checkpoint.committer_client import CommitterClient
from megascale_checkpoint.concurrency import Pools
from megascale_checkpoint.jobs import Jobs
from megascale_checkpoint.metrics import CheckpointMetrics
from megascale_checkpoint.staging import StagingFolder
from megascale_common.service.metrics import registry_of
from megascale_driver.core.events import JobSubmitted, Reason
from megascale_driver.core.policy import Policy
from megascale_driver.engine import Engine, Term
from megascale_driver.metrics import DriverMetrics
from megascale_executor.agent.link import DriverLink
from megascale_executor.agent.metrics import AgentMetrics
from megascale_executor.agent.step_reports import StepReports
from megascale_executor.diagnostics.registry import BUILT_IN, Registry

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
CORE = REPOSITORY / "services" / "driver" / "megascale_driver" / "core"


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_reason_is_explained_and_none_is_made_up() -> None:
    table = rows("Events")
    assert [cells[0].strip("`") for cells in table] == list(get_args(Reason)), (
        "same list, same order"
    )
    assert all(len(cells) == 3 and cells[1] and cells[2] for cells in table)


@pytest.mark.parametrize("reason", get_args(Reason))
def test_every_reason_is_emitted_by_the_core(reason: str) -> None:
    uses = 0
    for path in set(CORE.glob("*.py")) - {
        CORE / "state.py"
    }:  # whose enumerations share some of the words
        tree = ast.parse(path.read_text())
        declared = {
            id(n) for a in ast.walk(tree) if isinstance(a, ast.Subscript) for n in ast.walk(a.slice)
        }
        strings = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == reason]
        uses += sum(id(node) not in declared for node in strings)
    assert uses, f"{reason} is declared but nothing writes it"


def names(registry: CollectorRegistry) -> set[str]:
    """Names of the samples that stand for each metric, but for the process's own."""
    suffixes = {"counter": "_total", "info": "_info"}
    found = {metric.name + suffixes.get(metric.type, "") for metric in registry.collect()}
    return {name for name in found if name.startswith("megascale_")} - {"megascale_build_info"}


def driver_names() -> set[str]:
    world = SimulatedCluster(1, nodes=2)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", spares=0), "ada"))
    engine = Engine(Policy(), world.clock, "token", "here")
    metrics = DriverMetrics(engine)
    engine.state, engine.term = world.state, cast(Term, object())
    return names(metrics.registry)


def agent_names() -> set[str]:
    beat = link_pb2.Heartbeat(phase=link_pb2.ATTEMPT_PHASE_RUNNING)
    beat.workers.add(rank=0, state=link_pb2.WORKER_STATE_RUNNING, step=3)
    reports = StepReports()
    link = DriverLink("test", "token", list, cast(Any, None), reports)
    return names(registry_of("executor", AgentMetrics(lambda: beat, link, reports)))


def checkpoint_names(tmp_path: Path) -> set[str]:
    staging = StagingFolder(tmp_path / "staging", "test", "n0", "i0")
    pools = Pools()
    try:
        jobs = Jobs(staging, pools, CommitterClient("token"))
        jobs.job("a").note_persisted(0.5, 100)
        jobs.job("a").note_restored("memory", 0.1, 0)
        return names(registry_of("checkpoint", CheckpointMetrics(jobs, staging)))
    finally:
        pools.close()
        staging.remove()


def test_every_metric_is_listed_under_its_service(tmp_path: Path) -> None:
    table = {cells[0].strip("`"): cells[2] for cells in rows("Metrics")}
    found = dict.fromkeys(driver_names(), "driver") | dict.fromkeys(agent_names(), "executor")
    found |= dict.fromkeys(checkpoint_names(tmp_path), "checkpoint")
    assert table == found


def test_every_diagnostic_check_is_named() -> None:
    section = PAGE.split("\n## Nodes")[1].split("\n## ")[0]
    assert all(f"`{name}`" in section for name in Registry(made() for made in BUILT_IN).names)


def test_every_script_and_file_that_the_page_names_is_there() -> None:
    scripts = set(
        re.findall(r"`((?:driver|executor|checkpoint|link)/[a-z_]+\.sh|health\.sh)", PAGE)
    )
    assert len(scripts) >= 8
    for script in scripts:
        assert (REPOSITORY / "clients" / "grpcurl" / script).is_file(), script
