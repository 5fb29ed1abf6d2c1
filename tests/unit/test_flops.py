"""FLOP counts against closed forms, brute force and the published formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.training import tiny_job

from megascale_job.config import ExpertsConfig, ModelConfig
from megascale_job.loading import from_accepted
from megascale_job.presets import MODELS
from megascale_job.sizes.flops import (
    active_parameters,
    flops_per_token,
    mean_keys,
    mfu,
    peak_bf16_flops,
)
from megascale_job.sizes.parameter_table import parameter_counts, parameter_table

SEVEN_B = ModelConfig(layers=32, hidden_size=4096, heads=32, vocab_size=51200, sequence_length=2048)


def test_full_count_is_the_published_formula() -> None:
    model = SEVEN_B
    h, s, v, layers = model.hidden_size, model.sequence_length, model.vocab_size, model.layers
    published = 72 * layers * h * h * (1 + s / (6 * h) + v / (12 * h * layers))
    assert flops_per_token(model).full == pytest.approx(published, rel=1e-12)


def test_seven_billion_parameters_cost_what_they_should() -> None:
    found = flops_per_token(SEVEN_B)
    assert found.gemm == pytest.approx(39.9e9, rel=2e-3)
    assert found.attention_exact == pytest.approx(6 * 32 * 2049 * 4096)


def test_grouped_heads_and_gates_change_the_gemms() -> None:
    model = ModelConfig(
        layers=1,
        hidden_size=64,
        heads=4,
        kv_heads=2,
        ffn_size=96,
        mlp="swiglu",
        vocab_size=100,
        sequence_length=8,
    )
    q = 64 * 64
    kv = 2 * 64 * 32
    assert flops_per_token(model).gemm == 6 * (2 * q + kv + 3 * 64 * 96 + 64 * 100)


@pytest.mark.parametrize("block", ["parallel", "serial"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_every_weight_but_the_tables_is_multiplied_once(block: str, mlp: str) -> None:
    """A multiply-add per weight and token, forward and twice backward; norms and biases aside."""
    config = from_accepted(
        tiny_job(model={"block": block, "mlp": mlp, "kv_heads": 2, "positions": "learned"})
    )
    table = parameter_table(config, 0)
    weights = sum(
        math.prod(piece.global_shape)
        for piece in table.slices
        if piece.decay and piece.name not in ("embedding.weight", "positions.weight")
    )
    assert flops_per_token(config.model).gemm == 6 * weights


@given(sequence=st.integers(1, 40), window=st.integers(0, 50))
def test_mean_keys_is_brute_force(sequence: int, window: int) -> None:
    keys = [min(query + 1, window or sequence) for query in range(sequence)]
    assert mean_keys(sequence, window) == pytest.approx(sum(keys) / sequence)


SWIGLU: dict[str, Any] = {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm"}
# A preset or a model, hidden, query and key columns, experts, top-k, width, shared width, layers
# with experts and without, width of these, vocabulary; and billions as published.
PUBLISHED = {
    "mixtral-8x7b": ((4096, 4096, 1024, 8, 2, 14336, 0, 32, 0, 0, 32000), 46.7, 12.9),
    "qwen3-30b-a3b": ((2048, 4096, 512, 128, 8, 768, 0, 48, 0, 0, 151936), 30.5, 3.3),
    # DeepSeek-V2-Lite (arXiv 2405.04434, appendix B) with plain attention, so nothing is published.
    "like deepseek": ((2048, 2048, 2048, 64, 6, 1408, 2816, 26, 1, 10944, 102400), 0.0, 0.0),
}
LIKE_DEEPSEEK: dict[str, Any] = {
    **SWIGLU,
    "layers": 27,
    "hidden_size": 2048,
    "heads": 16,
    "ffn_size": 10944,
    "vocab_size": 102_400,
    "sequence_length": 4096,
    "experts": {
        "count": 64,
        "top_k": 6,
        "ffn_size": 1408,
        "shared_ffn_size": 2816,
        "dense_layers": 1,
        "bias_rate": 0.001,
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_token_meets_the_experts_that_it_chooses(name: str) -> None:
    sizes, total, active = PUBLISHED[name]
    hidden, query, key, count, top_k, width, shared, layers, dense, ffn, vocab = sizes
    model = MODELS[name].model if name in MODELS else LIKE_DEEPSEEK
    config = from_accepted(tiny_job(model={**model, "bias": False}))
    attention = hidden * (2 * query + 2 * key)
    expert, always = 3 * hidden * width, attention + hidden * (count + 3 * shared)
    without = dense * (attention + 3 * hidden * ffn)
    met = layers * (always + top_k * expert) + without
    # A multiply-add per weight and token, three times; the embedding is only looked up.
    assert flops_per_token(config.model).gemm == 6 * (met + vocab * hidden)
    tables = 2 * vocab * hidden
    norms = (2 * (layers + dense) + 1) * hidden
    norms += 2 * 128 * layers if config.model.qk_norm else 0
    bias = layers * count if config.model.experts.bias_rate else 0
    found = active_parameters(config)
    assert found == met + tables + norms + bias
    whole = sum(parameter_counts(config).values()) - layers * count  # without the counts of choices
    assert whole == found + layers * (count - top_k) * expert
    if total:
        assert whole / 1e9 == pytest.approx(total, abs=0.05)
        assert found / 1e9 == pytest.approx(active, rel=0.02)


def test_a_dense_model_meets_all_of_its_parameters() -> None:
    config = from_accepted(tiny_job())
    assert active_parameters(config) == sum(parameter_counts(config).values())


def test_the_mfu_of_experts_is_that_of_the_active_parameters() -> None:
    dense = replace(SEVEN_B, block="serial", mlp="swiglu", ffn_size=4096)
    experts = replace(dense, experts=ExpertsConfig(count=16, top_k=2, ffn_size=2048))
    found, as_dense = (mfu(each, 1e5, 8, "NVIDIA H200") for each in (experts, dense))
    assert found is not None and as_dense is not None
    router = 32 * 4096 * 16 * 6 * 1e5 / (8 * 989e12)  # the only thing that comes on top
    assert found.exact == pytest.approx(as_dense.exact + router)


def test_windows_of_layers_are_counted_layer_by_layer() -> None:
    sizes = {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 8, "sequence_length": 32}
    mixed, full, narrow = (
        flops_per_token(ModelConfig(**sizes, layer_windows=windows)).attention_exact
        for windows in ((0, 4), (0, 0), (4, 4))
    )
    assert mixed == pytest.approx((full + narrow) / 2)
    assert full == flops_per_token(ModelConfig(**sizes)).attention_exact


def test_mfu_reproduces_a_measured_row() -> None:
    # 10,731 tokens/s per H200 of this model were published as 45.1 % exact and 46.8 % full
    found = mfu(SEVEN_B, 8 * 10_731.0, 8, "NVIDIA H200")
    assert found is not None
    assert (round(100 * found.exact, 1), round(100 * found.full, 1)) == (45.1, 46.8)


def test_a_cpu_has_no_mfu() -> None:
    assert peak_bf16_flops("cpu") is None
    assert mfu(SEVEN_B, 1.0, 1, "cpu") is None
