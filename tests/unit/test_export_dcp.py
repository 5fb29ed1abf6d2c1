"""The stock loader of torch.distributed.checkpoint reads an export, on any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.harness.checkpoint_files import STATES
from tests.harness.exporting import MODELS, STEP, job_of, random_values, write_model
from tests.harness.ranks import RankPool

from megascale_checkpoint.export.stored import ParameterReader, open_checkpoint
from megascale_common.service.errors import DamagedError
from megascale_job.config import JobConfig

# torch.distributed.checkpoint is imported when the tests run: it takes longer than torch itself, in
# each process of `make test`, which all collect these tests.
LAYOUT = {"tp": 2, "dp": 2}
CONFIG = job_of(MODELS["llama"][1], LAYOUT)
EXPERTS = job_of(MODELS["qwen3-moe"][1], {**LAYOUT, "ep": 2})


def export(stored: ParameterReader, folder: Path, seen: list[tuple[int, int]]) -> int:
    from megascale_checkpoint.export.dcp import export_dcp

    return export_dcp(stored, folder, lambda *figures: seen.append(figures))


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_the_stock_loader_reads_parameters_states_and_step(
    config: JobConfig, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import load

    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    seen: list[tuple[int, int]] = []
    size = export(stored, tmp_path / "out", seen)
    values = random_values(config)
    count = sum(each.size for each in values.values())
    assert size == 3 * 4 * count
    assert seen[-1] == (size, size)
    state = {
        "model": {name: torch.zeros(each.shape) for name, each in values.items()},
        "optimizer": {
            kind: {name: torch.zeros(each.shape) for name, each in values.items()}
            for kind in STATES[1:]
        },
        "step": torch.tensor(0),
    }
    load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["step"] == STEP
    for name, whole in values.items():
        assert np.array_equal(state["model"][name].numpy(), whole)
        for number, kind in enumerate(STATES[1:], start=1):
            expected = whole + np.float32(0.25 * number)  # as write_model makes them
            assert np.array_equal(state["optimizer"][kind][name].numpy(), expected)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")  # torch's own tool reads it as well
    nested = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(nested) == {"model", "optimizer", "step"}
    assert set(nested["optimizer"]) == set(STATES[1:])


def test_ranks_load_rows_and_columns_of_it(pool: RankPool, tmp_path: Path) -> None:
    write_model(tmp_path / "written", CONFIG)
    stored = open_checkpoint(str(tmp_path / "written"))
    export(stored, tmp_path / "out", [])
    found = pool.run(
        "tests.harness.exporting:load_dcp_shards",
        2,
        tmp_path / "ranks",
        export=str(tmp_path / "out"),
        names=["embedding.weight", "layers.1.q.weight"],
    )
    assert found == [{"embedding.weight": True, "layers.1.q.weight": True}] * 2


def test_a_damaged_file_leaves_no_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "written", CONFIG)
    stored = open_checkpoint(str(tmp_path / "written"))
    (file,) = (tmp_path / "written").glob("attempts/*/*/rank-00003.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"rank-00003\.safetensors: .* fails its checksum"):
        export(stored, tmp_path / "out", [])
    assert [path.name for path in tmp_path.iterdir()] == ["written"]
