"""A run continues in another layout: parameters, states and data position; 12 pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.harness.checkpoint_files import write_images
from tests.harness.ranks import rank_pool
from tests.harness.training import tiny_job

from megascale_common.job.config import from_accepted
from megascale_common.sizes.parameter_table import parameter_table, shard_layout

KEPT_STEP = 3
# As between layouts that train from the start (test_trainer_equality): sums in another order.
LOSS_TOLERANCE = 5e-6
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2pp2vpp2-uneven": {"tp": 2, "pp": 2, "virtual_stages": 2, "stage_layers": [2, 1, 2, 1]},
    "pp3": {"pp": 3},
    "tp2dp2": {"tp": 2, "dp": 2},
    "pp2vpp2dp2-full-recompute": {"pp": 2, "virtual_stages": 2, "dp": 2, "recompute": "full"},
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


def test_every_layout_goes_on_from_every_other(tmp_path: Path) -> None:
    jobs = {
        name: tiny_job(model=MODEL, parallelism=sizes, training={"micro_batch_size": 2})
        for name, sizes in LAYOUTS.items()
    }
    uris, uninterrupted, resumed = {}, {}, {}
    with rank_pool() as pool:
        for name, job in jobs.items():
            config, folder = from_accepted(job), tmp_path / f"write-{name}"
            world_size = config.layout.world_size
            program = "tests.harness.resharding:train_and_keep"
            uninterrupted[name] = pool.run(
                program, world_size, folder, job=job, kept_step=KEPT_STEP
            )[0]["losses"]
            layouts = [shard_layout(parameter_table(config, rank)) for rank in range(world_size)]
            images = [
                bytearray((folder / f"image-{rank}").read_bytes()) for rank in range(world_size)
            ]
            uris[name] = write_images(
                tmp_path / f"checkpoint-{name}", layouts, images, step=KEPT_STEP
            )
        for name, job in jobs.items():
            others = {other: uri for other, uri in uris.items() if other != name}
            results = pool.run(
                "tests.harness.resharding:load_and_train",
                from_accepted(job).layout.world_size,
                tmp_path / f"load-{name}",
                job=job,
                manifests=others,
                kept_step=KEPT_STEP,
            )
            resumed |= {(other, name): losses for other, losses in results[0].items()}
    assert len(resumed) == 12
    for (writer, reader), losses in resumed.items():
        assert losses == pytest.approx(uninterrupted[writer], abs=LOSS_TOLERANCE), (
            f"{writer} to {reader}"
        )
    first, last = uninterrupted["pp3"][0], uninterrupted["pp3"][-1]
    assert abs(first - last) > 100 * LOSS_TOLERANCE, (
        "the model stands still: the comparison proves little"
    )
