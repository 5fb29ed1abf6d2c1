"""A dry run of benchmarks/fp8_gemms.py: sections give figures, with the errors of the formats."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import fp8_gemms
from benchmarks.fp8_recipes import LAYERS, RECIPES
from benchmarks.power import sustained
from tests.harness.fp8 import right_fp8_conversion  # noqa: F401

pytest.importorskip("triton")


def test_a_layer_has_the_gemms_of_a_parallel_block() -> None:
    layer = LAYERS["175b tp4"]
    assert layer.gemms()["in, forward"] == (8192, 21504, 12288)
    assert layer.gemms()["out, wgrad"] == (15360, 12288, 8192)
    flops = sum(2 * rows * columns * depth for rows, columns, depth in layer.gemms().values())
    assert flops == layer.flops


def test_a_cpu_runs_an_operation_once() -> None:
    runs: list[int] = []
    found = sustained(lambda: runs.append(1), torch.device("cpu"), 10.0)
    assert runs == [1]
    assert found.median_ms == found.low_ms >= 0 and found.power_w is None


@pytest.mark.slow
@pytest.mark.usefixtures("right_fp8_conversion")
def test_a_dry_run_measures(capsys: pytest.CaptureFixture[str]) -> None:
    sections = "products", "layers", "errors", "linear"
    assert fp8_gemms.main(["--quick", "--models", "7b tp2", "--only", ",".join(sections)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"machine", *sections}, "all of it in one line"
    assert {row["recipe"] for row in found["layers"]} == {"bf16, torch", "bf16, chosen", *RECIPES}
    assert {row["product"] for row in found["products"]} == set(LAYERS["7b tp2"].gemms())
    assert not [row for row in found["products"] if "problem" in row]
    for row in found["errors"]:
        if row["recipe"] == "bf16":
            assert row["y"] < 3e-3
        elif row["data"] == "normal":
            gradient = 0.08 if "e5m2" in row["recipe"] else 0.05
            assert row["y"] < 0.05 and row["dx"] < gradient and row["dw"] < gradient, row
