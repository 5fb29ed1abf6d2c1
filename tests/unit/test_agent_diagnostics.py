"""Self-checks: each verdict for its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megascale.v1 import types_pb2
from megascale_common.node.messages import SelfCheck, SelfChecked, SelfCheckResult
from megascale_common.service.errors import DeviceQueryError
from megascale_executor.diagnostics import device_checks, disk, memory_room, rank_checks
from megascale_executor.diagnostics.devices import DeviceFacts, parse_gpus
from megascale_executor.diagnostics.finding import Finding, failures, verdict_of
from megascale_job import config as job_config
from megascale_job import loading
from megascale_trainer.process import self_check

_SMI = "0, GPU-aa, NVIDIA H200, 143771\n1, GPU-bb, NVIDIA H200, 143771\n"


def test_gpus_as_nvidia_smi_lists_them() -> None:
    first, second = parse_gpus(_SMI)
    assert (first.index, first.uuid, first.model, second.index) == (0, "GPU-aa", "NVIDIA H200", 1)
    assert first.memory_bytes == 143771 * 2**20
    with pytest.raises(DeviceQueryError, match="No devices"):
        parse_gpus("No devices were found\n")


def test_device_that_is_gone_or_exchanged_fails() -> None:
    registered = parse_gpus(_SMI)
    exchanged = DeviceFacts(1, "cuda", "GPU-cc", "NVIDIA H200", 1)
    verdicts = [
        finding.verdict
        for finding in device_checks.compare_present(registered, [registered[0], exchanged], 0.0)
    ]
    assert verdicts == ["PASS", "FAIL"]
    assert [f.verdict for f in device_checks.compare_present(registered, registered[:1], 0.0)] == [
        "PASS",
        "FAIL",
    ]


def test_disk_room(tmp_path: Path) -> None:
    assert disk.check_room(tmp_path).verdict in ("PASS", "DEGRADED")
    assert disk.check_room(tmp_path / "absent").verdict == "FAIL"
    assert [disk.evaluate_room("d", size, 0.0).verdict for size in (1 << 20, 1 << 29, 1 << 31)] == [
        "FAIL",
        "DEGRADED",
        "PASS",
    ]


def _config(uri: str) -> job_config.JobConfig:
    model = {"layers": 2, "hidden_size": 64, "heads": 2, "vocab_size": 256, "sequence_length": 16}
    return loading.from_accepted(
        {
            "name": "j",
            "model": model,
            "training": {"steps": 1, "global_batch_size": 4, "precision": "fp32"},
            "parallelism": {"tp": 2, "dp": 2},
            "checkpoint": {"uri": uri},
        }
    )


def test_memory_need_counts_every_parameter() -> None:
    # 2 layers of 12 h^2 weights, embedding and head; tp cuts them, dp does not; norms come on top.
    weights = 2 * 12 * 64**2 + 2 * 256 * 64
    wanted = memory_room.need(_config("/c"), [0, 1, 2, 3])
    # Each dp replica: 4 bytes weight + 4 gradient; once over both: 12 bytes of states, twice in
    # staging.
    assert (
        2 * 8 * weights + 12 * weights < wanted.state_bytes < 1.1 * (2 * 8 * weights + 12 * weights)
    )
    assert 24 * weights < wanted.staging_bytes < 1.1 * 24 * weights
    assert memory_room.need(_config(""), [0]).staging_bytes == 0
    # Half of the ranks keep their own two slots, and two for each replica of the other half.
    config = _config("/c")
    copied = replace(config, checkpoint=replace(config.checkpoint, replicas=1))
    assert (
        memory_room.need(copied, [0, 1]).staging_bytes
        == 2 * memory_room.need(config, [0, 1]).staging_bytes
    )
    assert memory_room.need(copied, [0, 1, 2, 3]) == wanted, "there is no other node"


def test_memory_need_counts_replicas_of_a_stage_that_can_be_smaller() -> None:
    """Ranks 0 and 1 have a dense layer, ranks 2 and 3 eight experts: whose replicas is open."""
    base = _config("/c")
    experts = replace(base.model.experts, count=8, ffn_size=256, dense_layers=1)
    model = replace(base.model, block="serial", mlp="swiglu", experts=experts)
    sizes = replace(base.parallelism, tp=1, pp=2, ep=2)
    config = replace(base, model=model, parallelism=sizes)
    copied = replace(config, checkpoint=replace(config.checkpoint, replicas=1))
    for ranks in ([0, 1], [2, 3]):
        own, all_slots = (memory_room.need(job, ranks).staging_bytes for job in (config, copied))
        assert all_slots - own == memory_room.need(config, [0, 1]).staging_bytes
    dense, sparse = (memory_room.need(config, ranks).staging_bytes for ranks in ([0, 1], [2, 3]))
    assert sparse > 2 * dense


def test_memory_room_verdicts() -> None:
    wanted = memory_room.MemoryNeed(state_bytes=600, staging_bytes=200)
    assert [
        memory_room.check_host(wanted, size, on_cpu=True).verdict for size in (700, 900, 2000)
    ] == [
        "FAIL",
        "DEGRADED",
        "PASS",
    ]
    assert memory_room.check_host(wanted, 700, on_cpu=False).verdict == "PASS"
    assert memory_room.check_staging(wanted, 100, "/dev/shm", already_held=False).verdict == "FAIL"
    assert memory_room.check_staging(wanted, 100, "/dev/shm", already_held=True).verdict == "PASS"
    none = memory_room.MemoryNeed(state_bytes=600, staging_bytes=0)
    assert memory_room.check_staging(none, 0, "/dev/shm", already_held=False).verdict == "SKIPPED"


def test_missing_answer_fails_and_one_rank_is_skipped_not_passed() -> None:
    passed = SelfCheckResult(
        name="compute", target="cpu:0", verdict="PASS", detail="", elapsed_s=0.1
    )
    answer = SelfChecked(rank=0, results=[passed])
    alone = rank_checks.evaluate(["cpu:0"], {0: answer}, 0.0)
    assert [(finding.name, finding.verdict) for finding in alone] == [
        ("compute", "PASS"),
        ("all_reduce", "SKIPPED"),
    ]
    both = rank_checks.evaluate(["cpu:0", "cpu:1"], {0: answer, 1: "no answer within 15 s"}, 0.0)
    assert [finding.target for finding in failures(both)] == ["cpu:1"]
    assert verdict_of("SPLENDID") == "FAIL"


def test_finding_on_the_wire() -> None:
    result = Finding("compute", "cpu:0", "SKIPPED", "why" * 1000, 0.25).to_proto()
    assert result.verdict == types_pb2.CHECK_VERDICT_SKIPPED
    assert result.elapsed.ToMilliseconds() == 250 and len(result.detail) == 1000


def test_compute_check_sees_one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert "known answer" in self_check.check_compute(cpu)
    known = self_check._known_product

    def tampered(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        left, right, tile = known(size)
        left[0, 0] += 1  # as a device would that computes one product wrongly
        return left, right, tile

    monkeypatch.setattr(self_check, "_known_product", tampered)
    with pytest.raises(self_check.CheckFailed, match="elements of a known product are wrong"):
        self_check.check_compute(cpu)
    answer = self_check.all_reduce_check(
        SelfCheck(
            rank=0,
            world_size=1,
            store_host="127.0.0.1",
            store_port=0,
            device_kind="cpu",
            device_index=0,
            timeout_s=1.0,
        )
    )
    assert [result.verdict for result in answer.results] == ["FAIL"]


def test_known_product_equals_an_independent_one() -> None:
    left, right, tile = self_check._known_product(64)
    exact = [
        [sum(int(a) * int(b) for a, b in zip(row, column, strict=True)) for column in right.T]
        for row in left
    ]
    assert np.array_equal(np.array(exact), np.tile(tile, (4, 4)))
