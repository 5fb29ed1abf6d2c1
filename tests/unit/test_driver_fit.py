"""Whether a job fits the known nodes: refused, warned of, and the reason for which it waits."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.desk import Desk
from tests.harness.simulated_cluster import demo_job

from megascale_common.node.process import file_view
from megascale_driver.core.values.cluster import AttemptPhase, Device, Identity
from megascale_driver.core.values.events import CancelRequested, JobSubmitted, NodeHello
from megascale_driver.core.values.job import JobPhase
from megascale_driver.placement.gang import Candidate, Capacity, fit_refusals, fit_warnings
from megascale_driver.service import admission
from megascale_job.config import DataConfig, DataSource, ExpertsConfig, JobConfig
from megascale_job.problems import JobError

GIB = 1 << 30


def capacities(*devices: int, memory_bytes: int = 24 * GIB, kind: str = "cuda") -> list[Capacity]:
    return [
        Capacity(Candidate(f"n{number}", kind, tuple(range(count))), memory_bytes)
        for number, count in enumerate(devices)
    ]


def job(tp: int = 2, pp: int = 2, dp: int = 2, spares: int = 0) -> JobConfig:
    config = demo_job("a", spares=spares)
    return replace(config, parallelism=replace(config.parallelism, tp=tp, pp=pp, dp=dp))


def test_a_rank_larger_than_every_known_device_is_refused() -> None:
    nodes = capacities(8, 8)
    (problem,) = fit_refusals(job(), 38 * GIB, nodes)
    assert "38.0 GiB" in problem.problem and "more than 24.0 GiB" in problem.problem
    assert "micro_batch_size" in problem.remedy
    assert fit_refusals(job(), 20 * GIB, nodes) == []
    larger = [*nodes, *capacities(8, memory_bytes=80 * GIB)]
    assert fit_refusals(job(), 38 * GIB, larger) == [], "one node is large enough"
    silent = [*nodes, *capacities(8, memory_bytes=0)]
    assert fit_refusals(job(), 38 * GIB, silent) == [], "one node does not report its memory"
    assert fit_refusals(job(), 38 * GIB, []) == [], "no node is known"


def test_a_tensor_parallel_group_larger_than_every_known_node_is_refused() -> None:
    (problem,) = fit_refusals(job(tp=4), GIB, capacities(2, 2, 2))
    assert problem.field == "trainer.parallelism.tp"
    assert "no known node has more than 2 devices" in problem.problem
    assert "at most 2" in problem.remedy
    assert fit_refusals(job(tp=4), GIB, capacities(2, 4)) == []


def with_experts(ep: int, across_nodes: bool = False, **axes: int) -> JobConfig:
    config = job(**axes)
    parallel = replace(config.parallelism, ep=ep, ep_across_nodes=across_nodes)
    experts = ExpertsConfig(count=24)
    return replace(
        config, parallelism=parallel, model=replace(config.model, experts=experts, mlp="swiglu")
    )


def test_an_expert_parallel_group_larger_than_every_known_node_is_refused() -> None:
    wide = with_experts(ep=8, tp=2, pp=1, dp=4)
    (problem,) = fit_refusals(wide, GIB, capacities(4, 4))
    assert problem.field == "trainer.parallelism.ep"
    assert "group of 8 stays within a node" in problem.problem
    assert "no known node has more than 4 devices" in problem.problem
    assert "an ep of 4" in problem.remedy and "ep_across_nodes: true" in problem.remedy
    assert fit_refusals(wide, GIB, capacities(4, 8)) == []
    assert fit_refusals(with_experts(8, True, tp=2, pp=1, dp=4), GIB, capacities(4, 4)) == []
    (problem,) = fit_refusals(with_experts(ep=2, tp=3, pp=1, dp=2), GIB, capacities(4, 4))
    assert "tp = 3 and of ep = 2, 6 ranks, stay within a node" in problem.problem
    assert "an ep of 1" in problem.remedy
    (problem,) = fit_refusals(with_experts(ep=8, tp=8, pp=1, dp=1), GIB, capacities(4))
    assert problem.field == "trainer.parallelism.tp", "one cause is refused once"


def test_an_expert_parallel_group_stays_on_one_node() -> None:
    """Of nodes with six devices each takes four ranks: one group of four and not half of one."""
    config = with_experts(ep=4, tp=2, pp=1, dp=4)
    assert fit_warnings(config, capacities(6, 6)) == []
    (text,) = fit_warnings(config, capacities(6, 2))
    assert "in groups of 4 on one node" in text and "can give 4" in text
    assert fit_warnings(with_experts(4, True, tp=2, pp=1, dp=4), capacities(6, 2)) == []
    desk = Desk("n1", "n2")  # of four devices each
    desk.feed(JobSubmitted(desk.now_s, with_experts(ep=3, tp=1, pp=1, dp=6), "me"))
    assert [slot.ranks for slot in desk.job().slots] == [(0, 1, 2), (3, 4, 5)]


def test_what_more_nodes_would_solve_is_a_warning() -> None:
    assert fit_warnings(job(), capacities(4, 4)) == []
    (text,) = fit_warnings(job(), capacities(4, 2))
    assert "needs 8 devices of one kind in groups of 2 on one node" in text and "can give 6" in text
    (text,) = fit_warnings(job(spares=100), capacities(4, 4, 4))
    assert text == (
        "recovery.spare_nodes: 100 are asked for, and of 3 nodes known so far 1 can be spared"
    )
    (text,) = fit_warnings(job(), [])
    assert "no node has joined yet" in text


def test_a_queued_job_says_what_is_missing() -> None:
    desk = Desk()
    desk.submit()
    assert desk.job().reason == (
        "waiting for nodes (it needs 8 devices, and no node may be used yet: `megascale nodes` "
        "has those that joined)"
    )
    desk.hello("n1")
    desk.report("n1", AttemptPhase.IDLE)
    assert (
        "needs 8 devices in groups of 2 on one node, and the nodes that may be used can give 4"
        in (desk.job().reason)
    )
    desk.hello("n2")
    assert "4 of 8 are free" in desk.job().reason
    desk.report("n2", AttemptPhase.IDLE)
    desk.wait(0.25)
    assert desk.job().phase is JobPhase.PREPARING
    desk.feed(JobSubmitted(desk.now_s, replace(demo_job("b"), name="b"), "me"))
    assert "0 of 8 are free" in desk.job("b").reason


@pytest.fixture
def files(tmp_path: Path) -> JobConfig:
    """A job whose corpus and load_uri are there."""
    for suffix in (".idx", ".bin"):
        (tmp_path / f"corpus{suffix}").touch()
    config = demo_job("a", dp=1, spares=0)
    return replace(
        config,
        data=DataConfig(sources=(DataSource(prefix=str(tmp_path / "corpus")),)),
        checkpoint=replace(config.checkpoint, load_uri=f"file://{tmp_path}"),
    )


def cluster(view: str) -> Desk:
    """A node of four devices with 1 GiB, which sees the files of ``view``."""
    desk = Desk()
    devices = tuple(Device(index, "cpu", memory_bytes=GIB) for index in range(4))
    desk.feed(NodeHello(desk.now_s, "n1", Identity("n1-1", devices=devices, file_view=view)))
    return desk


async def test_a_missing_corpus_is_refused_where_driver_and_nodes_see_the_same_files(
    files: JobConfig, tmp_path: Path
) -> None:
    desk = cluster(file_view())
    assert await admission.examine(files, desk.state) == []
    (tmp_path / "corpus.bin").unlink()
    missing = replace(
        files, checkpoint=replace(files.checkpoint, load_uri=str(tmp_path / "nowhere"))
    )
    with pytest.raises(JobError) as refusal:
        await admission.examine(missing, desk.state)
    assert [problem.field for problem in refusal.value.problems] == [
        "trainer.data.sources[0].prefix",
        "checkpoint.load_uri",
    ]
    assert "corpus.bin" in str(refusal.value) and "megascale data tokenize" in str(refusal.value)


@pytest.mark.parametrize("view", ["", "another kernel/1/2-3"])
async def test_what_only_the_driver_cannot_see_is_left_to_the_nodes(
    files: JobConfig, tmp_path: Path, view: str
) -> None:
    (tmp_path / "corpus.bin").unlink()
    assert await admission.examine(files, cluster(view).state) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
async def test_a_folder_that_the_driver_may_not_enter_proves_nothing(
    files: JobConfig, tmp_path: Path
) -> None:
    tmp_path.chmod(0)
    try:
        assert await admission.examine(files, cluster(file_view()).state) == []
    finally:
        tmp_path.chmod(0o700)


async def test_the_folder_of_another_job_is_refused_whatever_the_driver_sees(
    files: JobConfig,
) -> None:
    desk = cluster("")
    desk.feed(JobSubmitted(desk.now_s, files, "me"))
    second = replace(files, name="b", checkpoint=replace(files.checkpoint, load_uri=""))
    with pytest.raises(JobError, match=r"checkpoint\.uri: /checkpoints is the folder of job a"):
        await admission.examine(second, desk.state)
    desk.feed(CancelRequested(desk.now_s, "a", "never ran", "me"))
    assert await admission.examine(second, desk.state) == [], "it has written nothing there"


async def test_memory_is_compared_with_what_the_nodes_report(files: JobConfig) -> None:
    large = replace(
        files, model=replace(files.model, layers=4, hidden_size=16384, heads=128, ffn_size=0)
    )
    with pytest.raises(JobError, match=r"the largest rank needs about .* more than 1\.0 GiB"):
        await admission.examine(large, cluster("").state)
