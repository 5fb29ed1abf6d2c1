"""A run continues in another layout: parameters, states and data position.

The ranks restore together, through a real daemon, from files that a run of another layout wrote.
Their next losses are those of a run of one rank that was never interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.harness.checkpoint_files import write_images
from tests.harness.checkpoint_node import DaemonProcess
from tests.harness.ranks import RankPool
from tests.harness.resharding import ROUTER_STATE
from tests.harness.training import tiny_job

from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.export.stored import ParameterReader
from megascale_job.loading import from_accepted
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.parameter_table import parameter_table, shard_layout

KEPT_STEP = 3
# As between layouts that train from the start (test_trainer_equality): sums in another order.
LOSS_TOLERANCE = 5e-6
MOST_READ = 1.05  # times the distinct bytes of the state
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2pp2vpp2-uneven": {"tp": 2, "pp": 2, "virtual_stages": 2, "stage_layers": [2, 1, 2, 1]},
    "tp2dp2": {"tp": 2, "dp": 2},
    "pp3": {"pp": 3},
    "pp2vpp2dp2-full-recompute": {"pp": 2, "virtual_stages": 2, "dp": 2, "recompute": "full"},
    "dp4": {"dp": 4},
    "cp2dp2": {"cp": 2, "dp": 2},
}
# An FFN of 101 is padded, to other widths at another tp.
MODEL = {
    "layers": 6,
    "hidden_size": 32,
    "kv_heads": 2,
    "ffn_size": 101,
    "mlp": "swiglu",
    "positions": "learned",
}
BLOCKS = ("parallel", "serial")
# Over two ranks of tp, over replicas, over a stage of which one has no experts.
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp4ep4": {"dp": 4, "ep": 4},
    "tp2ep2": {"tp": 2, "ep": 2},
    "tp2dp2ep4": {"tp": 2, "dp": 2, "ep": 4},
    "pp2dp2ep2-uneven": {"pp": 2, "dp": 2, "ep": 2, "stage_layers": [1, 3]},
    "dp8ep8": {"dp": 8, "ep": 8},
}
EXPERTS = {
    "hidden_size": 32,
    "kv_heads": 2,
    "ffn_size": 101,
    "block": "serial",
    "mlp": "swiglu",
    "bias": False,
    "experts": {
        "count": 8,
        "ffn_size": 24,
        "shared_ffn_size": 13,
        "dense_layers": 1,
        "bias_rate": 0.001,
    },
}


def test_the_next_losses_are_those_of_one_rank_that_went_on(pool: RankPool, tmp_path: Path) -> None:
    names = ["one", "tp2dp2", "cp2dp2", "tp2pp2vpp2-uneven"]
    check_all_pairs(pool, tmp_path, dense_jobs("parallel", names))


def test_experts_go_on_in_another_layout(pool: RankPool, tmp_path: Path) -> None:
    check_all_pairs(pool, tmp_path, expert_jobs(["one", "dp4ep4", "tp2ep2"]))


@pytest.mark.slow
def test_experts_go_on_from_every_layout_in_every_other(pool: RankPool, tmp_path: Path) -> None:
    assert check_all_pairs(pool, tmp_path, expert_jobs(list(EXPERT_LAYOUTS))) == 30


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_every_layout_goes_on_from_every_other(pool: RankPool, tmp_path: Path, block: str) -> None:
    assert check_all_pairs(pool, tmp_path, dense_jobs(block, list(LAYOUTS))) == 42


def dense_jobs(block: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """One job per layout."""
    model = {**MODEL, "block": block, "tie_embeddings": block == "parallel"}
    sizes = {"micro_batch_size": 2}
    return {
        name: tiny_job(model=model, parallelism=LAYOUTS[name], training=sizes) for name in names
    }


def expert_jobs(names: list[str]) -> dict[str, dict[str, Any]]:
    """One job per layout, of the same experts."""
    sizes = {"micro_batch_size": 1 if "dp8ep8" in names else 2}
    return {
        name: tiny_job(model=EXPERTS, parallelism=EXPERT_LAYOUTS[name], training=sizes)
        for name in names
    }


def check_all_pairs(pool: RankPool, folder: Path, jobs: dict[str, dict[str, Any]]) -> int:
    """Write with each of the jobs, resume with each other; returns the number of pairs."""
    resumed = {}
    with DaemonProcess(folder, "n0") as daemon:
        written = {name: write(pool, folder, name, job) for name, job in jobs.items()}
        for name, job in jobs.items():
            results = pool.run(
                "tests.harness.resharding:load_and_train",
                from_accepted(job).layout.world_size,
                folder / f"load-{name.lower()}",
                job=job,
                manifests={other: uri for other, (uri, _) in written.items() if other != name},
                kept_step=KEPT_STEP,
                daemon_socket=str(daemon.socket),
            )
            for other, losses in results[0]["losses"].items():
                read = sum(result["read_bytes"][other] for result in results)
                resumed[other, name] = losses, read
                stored = stored_routers(written[other][0])
                found = [result["routers"][other] for result in results]
                assert set().union(*found) == set(stored)
                for routers in found:  # whole on every rank of a stage, to the bit
                    assert routers.items() <= stored.items(), f"{other} to {name}"
    reference = written["one"][1]
    distinct = distinct_bytes(layouts_of(jobs["one"]))
    for (writer, reader), (losses, read) in resumed.items():
        pair = f"{writer} to {reader}"
        assert losses == pytest.approx(reference, abs=LOSS_TOLERANCE), pair
        assert distinct <= read <= MOST_READ * distinct, pair
    assert abs(reference[0] - reference[-1]) > 100 * LOSS_TOLERANCE, (
        "the model stands still: the comparison proves little"
    )
    return len(resumed)


def write(pool: RankPool, folder: Path, name: str, job: dict[str, Any]) -> tuple[str, list[float]]:
    """Train, keep a checkpoint, train on; its manifest, and the losses after it."""
    kept, layouts = folder / f"write-{name}", layouts_of(job)
    program = "tests.harness.resharding:train_and_keep"
    results = pool.run(program, len(layouts), kept, job=job, kept_step=KEPT_STEP)
    images = [bytearray((kept / f"image-{rank}").read_bytes()) for rank in range(len(layouts))]
    uri = write_images(folder / f"checkpoint-{name}", layouts, images, step=KEPT_STEP)
    return uri, results[0]["losses"]


def stored_routers(uri: str) -> dict[str, list[float]]:
    """The state of the routers in a checkpoint, by name; empty for a dense model."""
    reader = ParameterReader(*manifests.load(uri))
    return {
        name: reader.read(name).tolist() for name in reader.shapes if name.endswith(ROUTER_STATE)
    }


def layouts_of(job: dict[str, Any]) -> list[ShardLayout]:
    config = from_accepted(job)
    return [shard_layout(parameter_table(config, r)) for r in range(config.layout.world_size)]


def distinct_bytes(layouts: list[ShardLayout]) -> int:
    return sum(piece.size_bytes for layout in layouts for piece in layout.pieces if piece.primary)
