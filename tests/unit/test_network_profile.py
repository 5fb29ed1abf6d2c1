"""The site's network profile on its way: file, driver, node, worker; and what a node finds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.harness.desk import Desk
from tests.harness.simulated_cluster import demo_job
from typer.testing import CliRunner

from megascale.v1 import link_pb2, types_pb2
from megascale_cli.app import build_app
from megascale_common.service.errors import AssignmentError
from megascale_driver.nodes.job_network import JobNetwork
from megascale_driver.nodes.orders import desired_state
from megascale_executor.agent.run.assignment import wanted_network
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.diagnostic import AttemptView, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.network_profile import (
    NetworkProfile,
    cards,
    compare_cards,
    compare_environment,
    compare_release,
)
from megascale_executor.diagnostics.wanted_network import WantedNetwork, WantedSetting
from megascale_job.config import JobConfig
from megascale_job.problems import JobError
from megascale_planner.network.profile import BadProfile, Site, parse, render
from megascale_trainer.process import worker
from megascale_trainer.telemetry.timer import Timeline

FILE: dict[str, Any] = {
    "nccl": "2.27",
    "nics": ["mlx5_0", "mlx5_1"],
    "traffic_class": 106,
    "split_ports": True,
    "flap_s": 10,
}
LONG = 2000 * "a"
EPOCH = types_pb2.Epoch(cluster_generation=1, create_revision=7)
CPU = DeviceFacts(0, "cpu", "cpu:0", "a CPU", 1)
GPU = DeviceFacts(0, "cuda", "GPU-aa", "NVIDIA H200", 1)
WANTED = WantedNetwork(
    nccl="2.27",
    cards=("mlx5_0", "mlx5_1"),
    settings=(
        WantedSetting("NCCL_IB_TIMEOUT", "19", "a flap of 10 s", "20"),
        WantedSetting("NCCL_IB_TC", "106", "the lossless class", "0"),
    ),
)


def test_a_file_says_what_the_options_of_the_command_say() -> None:
    site = parse(json.dumps(FILE))
    options = {"cards": ("mlx5_0", "mlx5_1"), "traffic_class": 106, "split_ports": True}
    assert site == Site(nccl=(2, 27), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nccl": None}, "nccl: None is no str"),
        ({"nccl": "two"}, "nccl 'two'"),
        ({"nics": "mlx5_0"}, "nics: 'mlx5_0' is no list"),
        ({"nics": ["mlx5_0", 1]}, "nics: give at most"),
        ({"nics": []}, "--nics"),
        ({"qps": True}, "qps: True is no int"),
        ({"qps": 0}, "--qps 0"),
        ({"flap_s": 40.0}, "--hang-floor-s 60"),
        ({"fabric": "token-ring"}, "fabric 'token-ring'"),
        ({"queue_pairs": 4}, "queue_pairs: there is no such key; there are nccl"),
    ],
)
def test_a_file_that_fits_no_cluster_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadProfile, match=says):
        parse(json.dumps({**FILE, **change}))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nccl": "2.27"}', '{"nics": ["mlx5_0"]}'])
def test_a_text_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(BadProfile):
        parse(text)


def job(watchdog_s: float) -> JobConfig:
    config = demo_job("a")
    return replace(config, recovery=replace(config.recovery, collective_timeout_s=watchdog_s))


def test_a_job_whose_watchdog_comes_before_nccls_is_refused_with_its_field() -> None:
    network = JobNetwork(parse(json.dumps(FILE)))
    network.check(job(300.0))
    with pytest.raises(JobError) as refused:
        network.check(job(14.0))  # NCCL tries for 15 s
    (problem,) = refused.value.problems
    assert problem.field == "recovery.collective_timeout_s"
    assert "flap of 10 s" in problem.problem and "the watchdog would end the job" in problem.problem
    # One that was accepted before the profile was: its nodes keep what they have.
    assert network.of(job(14.0)) is None


def test_nodes_get_each_setting_with_its_reason_and_older_nodes_get_none() -> None:
    desk = Desk("n1", "n2")
    desk.submit()
    node, held = desk.state.nodes["n1"], desk.job()
    network = JobNetwork(parse(json.dumps(FILE)))
    sent = desired_state(node, held, EPOCH, network=network).assignment
    site = parse(json.dumps(FILE), watchdog_s=held.config.recovery.collective_timeout_s)
    assert [(each.name, each.value, each.reason) for each in sent.network.settings] == [
        (each.name, each.value, each.reason) for each in render(site)
    ]
    assert all(each.reason for each in sent.network.settings)
    assert list(sent.network.cards) == FILE["nics"] and sent.network.nccl == "2.27"
    assert sent.network.ByteSize() < 4096
    for other in (
        desired_state(node, held, EPOCH, protocol=3, network=network),
        desired_state(node, held, EPOCH),
    ):
        assert not other.assignment.HasField("network")
    # What the driver sends, an agent accepts.
    wanted = wanted_network(sent)
    assert wanted is not None and len(wanted.settings) == len(sent.network.settings)
    assert wanted_network(link_pb2.AttemptAssignment()) is None


@pytest.mark.parametrize(
    "network",
    [
        link_pb2.NetworkProfile(settings=[link_pb2.NetworkSetting(name="LD_PRELOAD", value="x")]),
        link_pb2.NetworkProfile(settings=[link_pb2.NetworkSetting(name="NCCL_X", value="a\0b")]),
        link_pb2.NetworkProfile(settings=[link_pb2.NetworkSetting(name="NCCL_X", value=LONG)]),
        link_pb2.NetworkProfile(
            settings=[link_pb2.NetworkSetting(name=f"NCCL_{n}") for n in range(65)]
        ),
        link_pb2.NetworkProfile(cards=[f"mlx5_{n}" for n in range(65)]),
        link_pb2.NetworkProfile(cards=["../sda"]),
    ],
    ids=["no variable of NCCL", "zero byte", "long", "many", "many cards", "no card"],
)
def test_an_agent_refuses_what_are_no_settings(network: link_pb2.NetworkProfile) -> None:
    with pytest.raises(AssignmentError, match="network of the assignment"):
        wanted_network(link_pb2.AttemptAssignment(network=network))


def test_a_node_compares_its_environment_and_the_job_wins_over_the_profile() -> None:
    same = compare_environment(WANTED, {}, {"NCCL_IB_TC": "106"})
    assert (same.verdict, same.target) == ("PASS", "environment")
    node = compare_environment(WANTED, {}, {"NCCL_IB_TC": "3"})
    assert node.verdict == "DEGRADED"
    assert "NCCL_IB_TC is 3 on this node, the workers get 106 (the lossless class)" in node.detail
    secret = compare_environment(WANTED, {"NCCL_IB_TC": "7"}, {"NCCL_IB_TC": "3"})
    assert secret.verdict == "DEGRADED" and "NCCL_IB_TC is the job's own" in secret.detail
    assert "7" not in secret.detail and "is 3" not in secret.detail
    assert WANTED.for_workers({"NCCL_IB_TC": "7"}) == {"NCCL_IB_TIMEOUT": "19"}
    assert WANTED.for_workers({}) == {"NCCL_IB_TIMEOUT": "19", "NCCL_IB_TC": "106"}


def test_a_node_compares_nccl_and_cards(tmp_path: Path) -> None:
    assert compare_release(WANTED, "2.27.5").verdict == "PASS"
    assert compare_release(WANTED, "2.28.3").verdict == "DEGRADED"
    assert compare_release(WANTED, "").verdict == "SKIPPED"
    folder = tmp_path / "sys/class/infiniband"
    assert compare_cards(WANTED, cards(tmp_path)).verdict == "FAIL"
    for name in ("mlx5_0", "mlx5_10"):
        (folder / name).mkdir(parents=True)
    lacking = compare_cards(WANTED, cards(tmp_path))
    assert lacking.verdict == "FAIL"
    assert "this node has no mlx5_1; it has mlx5_0, mlx5_10" in lacking.detail
    (folder / "mlx5_1").mkdir()
    assert compare_cards(WANTED, cards(tmp_path)).verdict == "PASS"


async def found(device: DeviceFacts, network: WantedNetwork | None) -> list[Finding]:
    attempt = AttemptView(job=demo_job("a"), ranks=(0,), network=network)

    async def nothing() -> Any:
        raise AssertionError("neither daemon nor ranks are asked")

    node = NodeView(
        devices=[device], folder=Path("/"), daemon_endpoint=nothing, holds_slots=lambda _: False,
        probe_ranks=nothing, attempt=attempt,
    )  # fmt: skip
    return list(await NetworkProfile().run(node))


async def test_without_profile_or_gpu_nothing_is_compared() -> None:
    (none,) = await found(GPU, None)
    assert none.verdict == "SKIPPED" and "--network-profile" in none.detail
    (cpu,) = await found(CPU, WANTED)
    assert cpu.verdict == "SKIPPED" and "no GPU" in cpu.detail
    assert [each.target for each in await found(GPU, WANTED)] == ["environment", "nccl", "cards"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """os.environ as it was."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield


@pytest.mark.usefixtures("environment")
def test_a_worker_on_a_gpu_has_the_settings_before_its_first_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    class Rank(worker._Worker):
        def __init__(self, device: str) -> None:
            self._device, self._start = torch.device(device), Timeline()
            self._config, self._status = demo_job("a"), cast(Any, None)
            network = {"NCCL_IB_TC": "106"}
            values = {"store_host": "127.0.0.1", "job": "a", "attempt": 1, "rank": 0}
            given = SimpleNamespace(**values, network=network, rank_table="")
            self._assignment = cast(Any, given)

        def _store(self) -> Any:
            return None

    monkeypatch.setattr(worker, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(worker, "pin_collectives", lambda _: "")
    monkeypatch.setattr(worker, "compare_rank_tables", lambda *_: None)
    monkeypatch.setattr(
        worker, "create_groups", lambda *_, **__: seen.append(os.environ.get("NCCL_IB_TC"))
    )
    os.environ["NCCL_IB_TC"] = "3"
    Rank("cpu")._meet()
    Rank("cuda:0")._meet()
    assert seen == ["3", "106"]


def test_the_command_renders_the_drivers_file(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    file.write_text(json.dumps(FILE))
    command = ["net", "render", "--site", str(file), "--json"]
    shown = CliRunner().invoke(build_app(), command)
    assert shown.exit_code == 0, shown.output
    rendered = {each["name"]: each["value"] for each in json.loads(shown.stdout)["settings"]}
    assert rendered == {each.name: each.value for each in render(parse(json.dumps(FILE)))}
    assert rendered["NCCL_UID_STAGGER_THRESHOLD"] == "256"
    file.write_text("{}")
    refused = CliRunner().invoke(build_app(), command)
    assert refused.exit_code == 2 and "nccl: it is missing" in refused.output
