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


# Models with experts, from their config.json; MegaScale-MoE's from arXiv 2505.11432, Table 2. Its
# shared expert is not in that table: 352B in all and an MFU of 32.48 % at 240 GPUs follow with one
# of the width of the others, and neither does without. Projections of DeepSeek-V3 (MLA, arXiv
# 2412.19437, section 4.2): 7168 x 1536 + 1536 x 24576 + 7168 x 576 + 512 x 32768 + 16384 x 7168;
# its attention multiplies 192 columns of queries and 128 of values, 160 on average.
EXPERT_MODELS: dict[str, Row] = {
    "qwen3-30b-a3b": {
        "layers": 48,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 151936,
        "experts": 128,
        "top_k": 8,
        "expert_ffn": 768,
    },
    "qwen3-235b-a22b": {
        "layers": 94,
        "hidden": 4096,
        "heads": 64,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 151936,
        "experts": 128,
        "top_k": 8,
        "expert_ffn": 1536,
    },
    "deepseek-v3": {
        "layers": 61,
        "hidden": 7168,
        "heads": 128,
        "head_dim": 160,
        "projection_weights": 187_105_280,
        "ffn": 18432,
        "vocab": 129280,
        "experts": 256,
        "top_k": 8,
        "expert_ffn": 2048,
        "shared_ffn": 2048,
        "dense_layers": 3,
        "groups": 8,
        "groups_kept": 4,
    },
    "megascale-352b": {
        "layers": 60,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 65536,
        "sequence": 8192,
        "experts": 32,
        "top_k": 3,
        "expert_ffn": 14336,
        "shared_ffn": 14336,
    },
}
# Automodel's balanced gate gives token t the experts from t x top_k on: neighbours on one rank or
# two. Groups of top_k experts, of which one is kept, have the same traffic.
BY_TURN = {
    "qwen3-30b-a3b by turn": ("qwen3-30b-a3b", {"groups": 16, "groups_kept": 1}),
    "deepseek-v3 by turn": ("deepseek-v3", {"groups": 32, "groups_kept": 1}),
    # With a layer that predicts a second token, and the head once more, as twice the vocabulary.
    "deepseek-v3 and mtp": ("deepseek-v3", {"layers": 62, "vocab": 2 * 129280}),
}
# Layers of each virtual stage where the recipe counts embedding and head as layers.
SPLITS = {
    "qwen3-235b-a22b": {32: [2] + [3] * 30 + [2]},
    "deepseek-v3 and mtp": {32: [1] + [2] * 30 + [1]},
    "deepseek-v3 by turn": {32: [2] * 29 + [1] * 3},
}
LAUNCH_S = 1.05e-3  # fitted on the first two rows of experts_h100.csv
# Megatron-core by what a row runs with. eager: no CUDA graphs of router and plan. alone: nothing of
# dispatch and combine is hidden. rows: all-to-all of rows.
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "graphs alone": {"hidden_ep": 0.0},
    "eager": {"launch_s": LAUNCH_S},
    "eager alone": {"launch_s": LAUNCH_S, "hidden_ep": 0.0},
    "eager rows": {"launch_s": LAUNCH_S, "hidden_ep": 0.0, "dispatch": "rows"},
}


def megatron_h200() -> dict[str, tuple[Row, float]]:
    """Rows of Megatron-core on one H200, and their seconds."""
    found = {}
    for row in table("experts_megatron_h200.csv"):
        values: Row = {key: int(row[key]) for key in row if key not in ("id", "tokens_s")}
        values |= {"system": "megatron-moe-2026", "gpu": "h200", "imbalance": 1.0}
        values |= {"sequence": 4096, "global_batch": 16}
        found[row["id"]] = values, 65536 / float(row["tokens_s"])
    return found


def with_experts(name: str) -> tuple[Row, float, dict[str, Any]]:
    """A row of ``experts_h100.csv``, its seconds, and what differs from its system."""
    (row,) = (each for each in table("experts_h100.csv") if each["id"] == name)
    model, changes = BY_TURN.get(row["model"], (row["model"], {}))
    sizes = {key: int(row[key]) for key in ("gpus", "tp", "pp", "vpp", "ep")}
    values: Row = {"sequence": 4096, **EXPERT_MODELS[model], **changes, **sizes}
    values |= {key: int(row[key]) for key in ("micro_batch", "global_batch")}
    values |= {"recompute": row["recompute"], "precision": row["precision"], "imbalance": 1.0}
    values |= {"system": "megatron-moe-2026", "gpu": "h100"}
    virtual_stages = sizes["pp"] * sizes["vpp"]
    if row["model"] == "qwen3-235b-a22b" and virtual_stages == 96:
        values |= {"layers": 96}  # two of the 96 stages have embedding and head instead of a layer
    elif virtual_stages in SPLITS.get(row["model"], {}):
        values |= {"stage_layers": SPLITS[row["model"]][virtual_stages]}
    tokens = values["global_batch"] * values["sequence"]
    seconds = float(row["step_s"] or tokens / values["gpus"] / float(row["tokens_s_gpu"] or 1))
    return values, seconds, VARIANTS[row["how"]]


def megascale_moe() -> list[tuple[Row, float]]:
    """MegaScale-MoE's rows and seconds; its vpp is not published: 2."""
    found = []
    for row in table("megascale_moe_352b.csv"):
        gpus = int(row["gpus"])
        layout = {"tp": 8, "pp": 15, "vpp": 2, "ep": 8, "dp": gpus // 120, "gpus": gpus}
        values: Row = {"system": "megascale-moe", "gpu": "h800", "imbalance": 1.0}
        values |= EXPERT_MODELS["megascale-352b"] | layout | {"global_batch": 720}
        found.append((values, float(row["step_s"])))
    return found
