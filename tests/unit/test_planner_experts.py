"""The planner on models with experts: published rows, measured layers, terms, memory, search."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.harness import planner_rows as rows

from megascale_job.config import ExpertsConfig, ModelConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.flops import flops_per_token
from megascale_job.sizes.memory import largest_rank_memory
from megascale_planner.devices import GPUS
from megascale_planner.experts import copies, expert_times
from megascale_planner.prediction import predict_line, predict_one
from megascale_planner.search import search
from megascale_planner.step_time import EXPERT_TERMS
from megascale_planner.systems import SYSTEMS
from megascale_planner.workload import Refused, Workload, from_row, illegal, point_of

# Rows that nothing was fitted to: docs/planner.md has their errors.
HELD_OUT = {
    "qwen3-235b best": 0.04,
    "qwen3-30b 16 best": -0.03,
    "qwen3-30b 8": 0.055,
    "deepseek-v3 1024": -0.015,
    "qwen3-235b fsdp": 0.03,
    "qwen3-235b pp32": -0.04,
}
# Rows of which the planner lacks something: it predicts steps that are shorter.
LACKING = {
    "qwen3-30b 16 overlap": -0.067,
    "qwen3-30b 16 alone": -0.136,
    "qwen3-235b tp4": -0.295,
    "deepseek-v3 256 automodel": -0.13,
}
FITTED = ("qwen3-235b alone", "qwen3-235b overlap")


def error_of(name: str, **changed: Any) -> float:
    row, seconds, variant = rows.with_experts(name)
    (error,) = rows.errors([(row, seconds)], **{**variant, **changed})
    return error


@pytest.mark.parametrize("name", list(HELD_OUT))
def test_a_published_row_that_nothing_was_fitted_to_is_predicted_within_six_percent(
    name: str,
) -> None:
    assert abs(error_of(name)) <= 0.06
    assert error_of(name) == pytest.approx(HELD_OUT[name], abs=0.006)


@pytest.mark.parametrize("name", list(LACKING))
def test_what_the_model_lacks_is_known(name: str) -> None:
    assert error_of(name) == pytest.approx(LACKING[name], abs=0.006)


def test_the_share_of_megatron_core_is_fitted_on_one_device() -> None:
    measured = rows.megatron_h200()
    fitted = rows.fitted_share([measured["m1"], measured["m2-ep8"]])
    assert SYSTEMS["megatron-moe-2026"].kernel_share == pytest.approx(fitted, abs=0.006)
    # With 128 experts on a device, 9 % of a traced step were idle.
    (error,) = rows.errors([measured["m2"]])
    assert -0.09 < error < 0


def test_the_wait_for_the_host_is_fitted_on_two_rows_without_graphs() -> None:
    def mean(launch_s: float) -> float:
        return sum(abs(error_of(name, launch_s=launch_s)) for name in FITTED)

    fitted = min((value * 5e-5 for value in range(40)), key=mean)
    assert fitted == pytest.approx(rows.LAUNCH_S, abs=6e-5)
    assert all(abs(error_of(name)) <= 0.01 for name in FITTED)


def test_megascale_moe_on_1440_devices_is_predicted_from_smaller_runs() -> None:
    found = rows.megascale_moe()
    smaller, largest = found[:-1], found[-1]
    assert largest[0]["gpus"] == 1440
    fitted = rows.fitted_share(smaller)
    assert SYSTEMS["megascale-moe"].kernel_share == pytest.approx(fitted, abs=0.006)
    (error,) = rows.errors([largest])
    assert error == pytest.approx(0.023, abs=0.006)
    for held in range(len(found)):
        share = rows.fitted_share(found[:held] + found[held + 1 :])
        (error,) = rows.errors([found[held]], kernel_share=share)
        assert abs(error) <= 0.06


def test_the_352b_model_has_the_parameters_and_the_flops_of_its_paper() -> None:
    """352B and 32.48 % at 1,137 tokens/s a device: with a shared expert, and not without."""
    row, seconds = rows.megascale_moe()[0]
    found = rows.predicted([row])
    mfu = found.mfu_causal[0] * found.step_time_s[0] / seconds
    assert mfu == pytest.approx(0.3248, rel=0.005)
    model = rows.EXPERT_MODELS["megascale-352b"]
    experts = (model["experts"] + 1) * 3 * model["hidden"] * model["expert_ffn"]
    attention = 2.5 * model["hidden"] ** 2
    whole = model["layers"] * (experts + attention) + 2 * model["vocab"] * model["hidden"]
    assert whole / 1e9 == pytest.approx(352, abs=0.5)


def test_the_interval_holds_the_published_rows() -> None:
    for name in (*HELD_OUT, *FITTED, "qwen3-30b 16 overlap", "qwen3-30b 16 alone"):
        row, seconds, variant = rows.with_experts(name)
        found = rows.predicted([row], **variant)
        assert found.low_s[0] <= seconds <= found.high_s[0], name
    for row, seconds in rows.megascale_moe():
        found = rows.predicted([row])
        assert found.low_s[0] <= seconds <= found.high_s[0]


# A layer of experts, forward and backward, in one CUDA graph, in ms: bf16 and FP8; router with
# plan. benchmarks/results, 2026-11-29, grouped GEMMs and router on one H200.
LAYERS = {
    "m1": ((4096, 14336, 8, 2, 4), 53.9, 31.5, 0.154),
    "m2": ((2048, 768, 128, 8, 4), 7.71, 5.77, 0.147),
    "m2-32k": ((2048, 768, 128, 8, 8), 13.96, 9.71, 0.255),
    "m2-ep8": ((2048, 768, 16, 8, 4), 6.60, 4.69, 0.100),
    "m3": ((2048, 1408, 64, 6, 4), 9.46, 6.52, 0.112),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_layer_of_experts_takes_as_long_as_it_was_measured(name: str) -> None:
    (hidden, width, experts, top_k, micro_batch), bf16_ms, fp8_ms, router_ms = LAYERS[name]
    row = {"layers": 1, "hidden": hidden, "heads": 16, "experts": experts, "top_k": top_k}
    row |= {"expert_ffn": width, "micro_batch": micro_batch, "sequence": 4096, "gpu": "h200"}
    for precision, measured_ms in (("bf16", bf16_ms), ("fp8", fp8_ms)):
        workload, _ = from_row({**row, "precision": precision})
        own = expert_times(point_of(workload), GPUS["h200"], SYSTEMS["ours"])
        found = 3 * (own.products + own.activation) + own.gradients + 2 * own.permutation
        assert 1e3 * found == pytest.approx(measured_ms, rel=0.04)
        assert 2e3 * own.router == pytest.approx(router_ms, abs=0.07)


SMALL: dict[str, Any] = {
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "sequence": 4096,
    "vocab": 32000,
    "experts": 32,
    "top_k": 4,
    "expert_ffn": 1024,
    "micro_batch": 2,
    "global_batch": 64,
}


def one(**changes: Any) -> dict[str, Any]:
    return predict_one(from_row({**SMALL, **changes})[0])


def test_terms_of_experts_add_up_and_dense_rows_have_none() -> None:
    found = one(dp=8, ep=8)
    assert {*EXPERT_TERMS} <= {*found["terms"]}
    assert sum(found["terms"].values()) == pytest.approx(found["step_time_s"])
    dense = predict_line('{"layers": 8, "hidden": 2048, "heads": 16}', 1, None)
    assert not {*EXPERT_TERMS} & {*dense["terms"]}
    assert not {"ep", "experts", "imbalance", "head_dim"} & {*dense["assumed"]}


def test_tokens_travel_only_between_ranks_of_ep() -> None:
    alone, inside = one(dp=8, ep=1), one(dp=8, ep=8)
    assert alone["terms"]["dispatch"] == alone["terms"]["imbalance"] == 0
    across = one(dp=16, ep=16, ep_across_nodes=True)
    assert 0 < inside["terms"]["dispatch"] < across["terms"]["dispatch"]
    # The same rows, and fewer gradients to add per micro-batch.
    assert inside["terms"]["experts"] < alone["terms"]["experts"]
    assert inside["terms"]["router"] == alone["terms"]["router"]
    assert inside["terms"]["permutation"] == alone["terms"]["permutation"]


@pytest.mark.parametrize(("ep", "top_k"), [(8, 2), (16, 8)])
@pytest.mark.parametrize("dispatch", ["rows", "tokens"])
def test_copies_of_a_token_are_those_of_random_choices(dispatch: str, ep: int, top_k: int) -> None:
    experts, chance, tokens = 256, random.Random(3), 20_000
    inside = between = 0
    for _ in range(tokens):
        home = chance.randrange(ep)
        ranks = [choice * ep // experts for choice in chance.sample(range(experts), top_k)]
        if dispatch == "rows":
            between += sum(rank // 8 != home // 8 for rank in ranks)
            inside += sum(rank // 8 == home // 8 and rank != home for rank in ranks)
        else:
            between += len({rank // 8 for rank in ranks} - {home // 8})
            inside += len({*ranks} - {home})  # over NVLink behind the network too
    row = {**SMALL, "experts": experts, "top_k": top_k, "dp": ep, "ep": ep}
    workload, _ = from_row({**row, "ep_across_nodes": True})
    system = replace(SYSTEMS["ours"], dispatch=dispatch)
    found = copies(point_of(workload), GPUS["h100"], system)
    assert float(found[0]) == pytest.approx(inside / tokens, rel=0.03)
    assert float(found[1]) == pytest.approx(between / tokens, rel=0.03, abs=1e-9)


def test_groups_of_experts_keep_tokens_on_fewer_nodes() -> None:
    row = {**SMALL, "experts": 256, "top_k": 8, "dp": 64, "ep": 64, "ep_across_nodes": True}
    row["global_batch"] = 128
    system = replace(SYSTEMS["ours"], dispatch="tokens")
    free, limited = (
        copies(point_of(from_row({**row, **groups})[0]), GPUS["h100"], system)
        for groups in ({}, {"groups": 8, "groups_kept": 4})
    )
    assert float(limited[1]) <= 4 < float(free[1])
    assert float(limited[0]) < float(free[0])


def test_the_fullest_rank_is_waited_for() -> None:
    even, twice = (one(dp=8, ep=8, imbalance=value)["terms"] for value in (1.0, 2.0))
    assert even["imbalance"] == 0
    assert even["experts"] < twice["imbalance"] < 1.3 * even["experts"]  # and their activation
    assert twice["experts"] == even["experts"]
    loads = [from_row({**SMALL, "dp": ep, "ep": ep})[0].load for ep in (1, 2, 4, 8)]
    assert loads[0] == 1.0 and loads == sorted(loads) and loads[-1] < 1.3
    many = from_row({**SMALL, "experts": 256, "dp": 8, "ep": 8})[0].load
    assert many < loads[-1], "more experts on a rank even its load out"


def test_gradients_of_experts_travel_between_the_ranks_with_the_same_ones() -> None:
    def reduced_s(ep: int) -> float:
        found = rows.predicted([{**SMALL, "dp": 8, "ep": ep}], hidden_dp=0.0)
        return float(found.terms["data_parallel"][0])

    moved_bytes = 6 * 8 * 32 * 3 * 2048 * 1024  # gradients in float32 and parameters in bf16
    link = GPUS["h100"].node_bytes_s
    sent_s = {ep: moved_bytes / ep * (8 / ep - 1) / (8 / ep) / link for ep in (1, 2, 4, 8)}
    assert sent_s[8] == 0
    for ep in (2, 4, 8):
        assert reduced_s(1) - reduced_s(ep) == pytest.approx(sent_s[1] - sent_s[ep])


def test_dense_layers_and_recompute_change_what_they_should() -> None:
    base = one(dp=8, ep=8)["terms"]
    fewer = one(dp=8, ep=8, dense_layers=2)["terms"]
    assert fewer["experts"] == pytest.approx(base["experts"] * 6 / 8)
    assert fewer["gemm"] > base["gemm"]
    selective, full = (
        one(dp=8, ep=8, recompute=recompute)["terms"] for recompute in ("selective", "full")
    )
    # Rows are spread again and sent there again, a quarter of each of both terms.
    again = (base["permutation"] + base["dispatch"]) / 4
    attention = base["attention"] / 3.5
    assert selective["recompute"] == pytest.approx(attention + again)
    assert full["recompute"] > base["experts"] / 4


def test_both_counts_of_mfu_are_those_of_the_services() -> None:
    experts = ExpertsConfig(count=32, top_k=4, ffn_size=1024, shared_ffn_size=512, dense_layers=2)
    model = ModelConfig(
        layers=8,
        hidden_size=2048,
        heads=16,
        kv_heads=4,
        head_dim=96,
        block="serial",
        mlp="swiglu",
        ffn_size=5632,
        vocab_size=32000,
        sequence_length=4096,
        experts=experts,
    )
    row = {**SMALL, "kv_heads": 4, "head_dim": 96, "ffn": 5632, "shared_ffn": 512}
    found, flops = rows.predicted([{**row, "dense_layers": 2}]), flops_per_token(model)
    per_token = float(found.step_time_s[0]) * GPUS["h100"].peak_flops / (64 * 4096)
    assert found.mfu_causal[0] * per_token == pytest.approx(flops.exact, rel=1e-9)
    assert found.mfu_full[0] * per_token == pytest.approx(flops.full, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("shared", [0, 1024])
@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "dp", "ep", "stage_layers"),
    [
        (1, 1, 1, 8, 8, ()),
        (1, 1, 1, 4, 1, ()),
        (4, 1, 1, 2, 2, ()),
        (2, 2, 2, 2, 4, ()),
        (2, 2, 2, 2, 4, (5, 4, 4, 3)),
        (1, 4, 1, 2, 2, ()),
    ],
)
def test_memory_agrees_with_the_exact_count_of_a_job(
    tp: int, pp: int, vpp: int, dp: int, ep: int, stage_layers: tuple[int, ...],
    shared: int, precision: str, recompute: str,
) -> None:  # fmt: skip
    sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "recompute": recompute}
    row = {**SMALL, **sizes, "layers": 16, "vpp": vpp, "kv_heads": 4, "head_dim": 160, "qk_norm": 1}
    row |= {"shared_ffn": shared, "dense_layers": 1, "precision": precision, "ffn": 8192}
    job = from_accepted(
        {
            "name": "compared",
            "model": {
                "layers": 16,
                "hidden_size": 2048,
                "heads": 16,
                "kv_heads": 4,
                "head_dim": 160,
                "qk_norm": True,
                "vocab_size": 32000,
                "sequence_length": 4096,
                "block": "serial",
                "mlp": "swiglu",
                "norm": "rmsnorm",
                "ffn_size": 8192,
                "experts": {
                    "count": 32,
                    "top_k": 4,
                    "ffn_size": 1024,
                    "shared_ffn_size": shared,
                    "dense_layers": 1,
                },
            },
            "parallelism": {
                **sizes,
                "virtual_stages": vpp,
                "stage_layers": list(stage_layers),
                "overlap": {"tp": tp > 1},
            },
            "training": {
                "steps": 10,
                "global_batch_size": 64,
                "micro_batch_size": 2,
                "precision": precision,
                "kernels": "triton",
            },
        }
    )
    exact = largest_rank_memory(job).total_bytes
    found = rows.predicted([{**row, "stage_layers": list(stage_layers)}]).memory_bytes[0]
    assert found == pytest.approx(exact, rel=0.04)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ep": 3}, "ep: experts 32 are not a multiple of 3"),
        ({"ep": 8, "dp": 4}, "ep: tp 1 x dp 4 is not a multiple of 8"),
        ({"ep": 16, "dp": 16}, "ep: 16 on nodes of 8 devices; give ep_across_nodes"),
        ({"top_k": 33}, "top_k: 33 of 32 experts"),
        ({"top_k": 4, "groups": 16}, "top_k: 4 of 2 experts"),
        ({"groups": 5}, "groups: experts 32"),
        ({"groups": 4, "groups_kept": 5}, "groups_kept: 5 of 4"),
        ({"dense_layers": 8}, "dense_layers: 8 leaves no layer"),
        ({"block": "parallel"}, "block: parallel with experts"),
        ({"mlp": "gelu"}, "mlp: gelu with experts"),
        ({"imbalance": 0.5}, "imbalance: 0.5 is not a number of 1"),
        ({"imbalance": True}, "imbalance"),
        ({"ep_across_nodes": 1}, "ep_across_nodes: 1 is neither true nor false"),
        ({"qk_norm": 2}, "qk_norm: 2"),
        ({"experts": 0}, "top_k: the row has no experts; give experts, or leave it out"),
    ],
)
def test_a_row_that_cannot_run_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named.replace("(", r"\(")):
        from_row({**SMALL, **changes})


def model(**changes: Any) -> Workload:
    return from_row({**SMALL, "gpus": 32, "gpu": "h100", "global_batch": 256, **changes})[0]


def test_the_search_proposes_ep_inside_a_node() -> None:
    workload = model()
    found = search(workload, GPUS["h100"], SYSTEMS["ours"])
    sizes = {(one.ep, one.block) for one in found.ranked}
    assert {ep for ep, _ in sizes} == {1, 2, 4, 8}
    assert {block for _, block in sizes} == {"serial"}
    assert all(illegal(one) == "" for one in found.ranked)
    assert "ep" in found.rows(1)[0]
    wide = search(replace(workload, ep_across_nodes=True), GPUS["h100"], SYSTEMS["ours"])
    assert {one.ep for one in wide.ranked} == {1, 2, 4, 8, 16, 32}
    alone = predict_one(found.ranked[0])
    assert found.rows(1)[0]["step_time_s"] == pytest.approx(alone["step_time_s"], rel=1e-12)
    assert found.rows(1)[0]["memory_gib"] == pytest.approx(alone["memory_gib"], rel=1e-12)
    with pytest.raises(Refused, match="block: experts need serial"):
        search(workload, GPUS["h100"], SYSTEMS["ours"], ("parallel",))


def test_experts_that_no_device_can_hold_are_split_over_ep() -> None:
    large = model(experts=128, expert_ffn=4096, layers=16)
    found = search(large, GPUS["h100"], SYSTEMS["ours"])
    assert found.ranked and min(one.ep * one.pp for one in found.ranked) > 1
    assert any(item.reason.startswith("memory: needs") for item in found.rejected)
