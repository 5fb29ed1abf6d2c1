"""Published and measured rows in the words of ``predict``, for the tests of the planner."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale_planner.devices import GPUS
from megascale_planner.prediction import Predictions, predict
from megascale_planner.systems import SYSTEMS
from megascale_planner.workload import from_row, points_of

DATA = Path(__file__).parents[1] / "data" / "planner"
Row = dict[str, Any]
METHODS = {"Megatron-LM": "megatron-lm-2023", "MegaScale": "megascale"}
# Layers, hidden, heads, pp, micro-batch, chunks: arXiv 2205.05198, Table 3; sequence 2,048, tp 8.
SEQUENCE_PARALLEL_MODELS = {
    "megatron-22B": (48, 6144, 64, 1, 4, 1),
    "gpt3-175B": (96, 12288, 96, 8, 1, 3),
    "turing-530B": (105, 20480, 128, 35, 1, 3),
    "megatron-1T": (128, 25600, 160, 64, 1, 1),
}
# Layers, hidden, heads, sequence, micro-batch of benchmarks/presets.py.
PRESETS = {
    "7b": (32, 4096, 32, 2048, 4),
    "13b": (40, 5120, 40, 2048, 4),
    "30b": (48, 7168, 56, 4096, 2),
    "175b": (12, 12288, 96, 2048, 4),
}


def table(name: str) -> list[dict[str, str]]:
    """The rows of a file of ``tests/data/planner``, without its first line, the source."""
    lines = (DATA / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def model_175b(system: str, dp: int, batch: int) -> Row:
    """MegaScale's 175B at tp 8, pp 8, six chunks on A100s (arXiv 2402.15627, Table 1)."""
    model = {"layers": 96, "hidden": 12288, "heads": 128, "vocab": 64000, "sequence": 2048}
    layout = {"tp": 8, "pp": 8, "vpp": 6, "dp": dp, "gpus": 64 * dp, "micro_batch": 1}
    return {"system": system, "gpu": "a100-80g", **model, **layout, "global_batch": batch}


def table_2() -> list[tuple[Row, float]]:
    """Rows of batch 768 and their measured seconds."""
    return [
        (
            model_175b(METHODS[row["method"]], int(row["dp"]), int(row["batch_size"])),
            float(row["iter_time_s"]),
        )
        for row in table("megascale_175b_batch768.csv")
    ]


def sc21() -> list[tuple[Row, float]]:
    """Rows of Megatron-LM's Table 1 and seconds: 96 B s l h^2 (1 + ...) over their FLOP/s."""
    found = []
    for row in table("megatron_sc21_first_half.csv"):
        layers, hidden, batch = (int(row[name]) for name in ("layers", "hidden", "batch_size"))
        tp, pp, gpus = (int(row[name]) for name in ("tp", "pp", "gpus"))
        counted = 96.0 * batch * 2048 * layers * hidden**2
        counted *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        values: Row = {"system": "megatron-lm-2021", "gpu": "a100-80g", "layers": layers}
        values |= {"hidden": hidden, "heads": int(row["heads"]), "tp": tp, "pp": pp, "gpus": gpus}
        values |= {"micro_batch": int(row["micro_batch"]), "global_batch": batch}
        values |= {"sequence": 2048, "vocab": 51200, "vpp": int(row["vpp_chunks"])}
        found.append((values, counted / (gpus * 1e12 * float(row["tflops_per_gpu"]))))
    return found


def own(
    preset: str, layers: int, layout: tuple[int, int, int, int], batch: int, **more: Any
) -> Row:
    """A row of our trainer on H200s; ``layout`` is tp, pp, vpp, dp."""
    _, hidden, heads, sequence, micro_batch = PRESETS[preset]
    tp, pp, vpp, dp = layout
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence}
    sizes |= {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "micro_batch": micro_batch}
    return {"system": "ours", "gpu": "h200", **sizes, "global_batch": batch, **more}


def own_seconds(row: Row, tokens_per_device: float) -> float:
    """Seconds of a step from tokens/s/GPU."""
    devices = row["tp"] * row["pp"] * row["dp"]
    return float(row["global_batch"] * row["sequence"] / (tokens_per_device * devices))


def predicted(rows: list[Row], **changed: float) -> Predictions:
    """Predictions of rows of one system and GPU; ``changed``: attributes of the system."""
    workloads = [from_row(row)[0] for row in rows]
    system = replace(SYSTEMS[workloads[0].system], **changed)
    return predict(points_of(workloads), GPUS[workloads[0].gpu], system)


def errors(rows: list[tuple[Row, float]], **changed: float) -> list[float]:
    """Relative errors of the predicted seconds."""
    found = predicted([row for row, _ in rows], **changed).step_time_s
    return [float(t) / measured - 1 for t, (_, measured) in zip(found, rows, strict=True)]


def fitted_share(rows: list[tuple[Row, float]]) -> float:
    """The ``kernel_share`` of 0.5 to 1.2 with the least mean error on ``rows``."""
    shares = [value / 200 for value in range(100, 241)]
    return min(shares, key=lambda share: sum(map(abs, errors(rows, kernel_share=share))))
