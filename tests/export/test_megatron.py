"""Megatron-core itself loads an export, and computes what the trainer computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.harness.exporting import (
    LLAMA,
    MODELS,
    STEP,
    job_of,
    tokens_of,
    trainer_logits,
    write_model,
)

from megascale_checkpoint.export.megatron import export_megatron
from megascale_checkpoint.export.megatron_layout import Cut
from megascale_checkpoint.export.stored import open_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # without Apex and Transformer Engine
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.export

TOLERANCE = 1e-6  # of the largest logit, in fp32: the order of sums
WHOLE: dict[str, dict[str, Any]] = {
    "llama": MODELS["llama"][1],
    "qwen-3-tied": {
        **LLAMA,
        "attention_bias": True,
        "qk_norm": True,
        "head_dim": 20,
        "tie_embeddings": True,
    },
}


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The groups of Megatron-core, for one process without a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # Random states of devices, for dropout, which is 0 here.
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def megatron_model(args: Any) -> tuple[GPTModel, dict[str, str]]:
    """The model that Megatron-core makes of a checkpoint's arguments.

    Its layers are those without Transformer Engine, which needs a GPU. Where their parameters have
    other names, Megatron-core's own table says so: it is returned too.
    """
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    layer = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    model = GPTModel(
        config,
        layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )
    return model, layer.submodules.sharded_state_dict_keys_map


def renamed(tensors: dict[str, torch.Tensor], table: dict[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of a file under the names of layers without Transformer Engine."""

    def local(name: str) -> str:
        for wanted, fused in table.items():
            name = name.replace(fused, wanted)
        return name

    return {local(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", WHOLE)
def test_megatron_loads_an_export(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = job_of(WHOLE[name])
    uri = write_model(tmp_path / "written", job_of(WHOLE[name], {"tp": 2, "dp": 2}))
    stored = open_checkpoint(str(tmp_path / "written"))
    export_megatron(stored, config.model, tmp_path / "out", "fp32", Cut(), lambda done, total: None)
    tokens = tokens_of(config)
    expected = trainer_logits(config, uri, STEP, tokens, tmp_path / "trainer")
    request.getfixturevalue("one_rank")  # the trainer's groups are gone by now
    path = tmp_path / "out" / f"iter_{STEP:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    file = torch.load(path, weights_only=False)  # as Megatron does
    model, names = megatron_model(file["args"])
    model.load_state_dict(renamed(file["model"], names), strict=True)
    model.eval()
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        found = model(tokens, torch.arange(length)[None].expand_as(tokens), mask)
    largest = expected.abs().max().item()
    assert largest > 0.5, "near zero everything is equal"
    difference = (found[..., : config.model.vocab_size] - expected).abs().max().item() / largest
    print(f"{name}: largest difference {difference:.1e} of the largest logit, {largest:.2f}")
    assert difference <= TOLERANCE
