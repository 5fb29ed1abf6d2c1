"""The bar: GPT training of Megatron-core without Transformer Engine and Apex, on this machine.

    torchrun --standalone --nproc-per-node 8 benchmarks/peers/megatron_core.py \\
        --preset 7b --tp 2 --pp 2 --vpp 2

README.md has the versions and how to get them. Quote it as "Megatron-core without Transformer
Engine": the weakest form that is still a fair bar. What stock Megatron-core lacks without those two
packages, and what replaces it here so that it is not slower:

- core attention: the stock one is not fused and keeps [s, s]; here torch's, on cuDNN.
- norm: the stock torch norm refuses sequence parallelism; here one whose weights have the attribute
  that makes Megatron sum their gradients over tensor parallel ranks.
- gradient accumulation in the weight-gradient GEMM: Apex's two functions, by ``torch.addmm`` into
  float32.
- AdamW: torch's fused one in place of its foreach one.

Overlap of data parallel gradients and parameters, of interleaved pipeline transfers and of tensor
parallel backward is on, as in Megatron's own training loop; the last of them requires
``CUDA_DEVICE_MAX_CONNECTIONS=1``.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers import bar
from torch.nn.attention import SDPBackend, sdpa_kernel

from megascale_job.config import JobConfig

VERSION = "0.16.1"
# In this order: the second where the first cannot run.
BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
}


@dataclass(frozen=True)
class Parts:
    """What Megatron builds its model of, and the settings that this needs.

    Args:
        layer: specification of a layer; norm: of the norm behind the last.
        settings: of ``TransformerConfig``, in place of those of this bar.
    """

    layer: Any
    norm: Any
    settings: Mapping[str, Any]


def main() -> None:
    """Measure one configuration; rank 0 prints the line."""
    options = bar.parser(__doc__).parse_args()
    config = bar.job_of(options, options.dry_run or int(os.environ["WORLD_SIZE"]))
    line = bar.describe(config, options, system="megatron-core", version=VERSION, block="serial")
    if options.dry_run:
        bar.report(line, options.results)
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when the device is first used
    warnings.filterwarnings("ignore")
    device = bar.own_device()
    stand_in_for_apex()
    bar.connect(device)
    step = prepare(config, Parts(*_layer(options.attention, device), {}), device)
    timed = bar.take_times(step, options.steps, device)
    loss = step()
    line |= bar.result(config, timed, device, None if loss is None else float(loss))
    if dist.get_rank() == 0:
        bar.report(line, options.results)
    dist.barrier()
    dist.destroy_process_group()


def stand_in_for_apex() -> None:
    """Apex's fused_weight_gradient_mlp_cuda: main_grad += grad_output^T input, in float32."""

    def accumulate(
        source: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        torch.addmm(main_grad, grad_output.t(), source, out_dtype=main_grad.dtype, out=main_grad)

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules["fused_weight_gradient_mlp_cuda"] = module

    class FusedAdamW(torch.optim.AdamW):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{"fused": True, **named})

    torch.optim.AdamW = FusedAdamW  # type: ignore[misc]


def prepare(config: JobConfig, parts: Parts, device: torch.device) -> Callable[[], Any]:
    """A training step of ``config`` that returns its loss, on ranks of the last stage."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = config.parallelism
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.virtual_stages
        if sizes.virtual_stages > 1
        else None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234 + dist.get_rank())
    torch.set_float32_matmul_precision("high")
    transformer = replace(_transformer_config(config), **parts.settings)
    model = _model(config, transformer, parts, device)
    return _step(config, transformer, model, _optimizer(model), device)


def _transformer_config(config: JobConfig) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, sizes = config.model, config.parallelism
    interleaved = sizes.virtual_stages > 1
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        ffn_hidden_size=model.ffn_width,
        normalization="LayerNorm",
        activation_func=F.gelu,  # with the fusion below: the tanh form, as ours
        add_bias_linear=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.virtual_stages if interleaved else None,
        sequence_parallel=sizes.tp > 1,
        gradient_accumulation_fusion=True,
        overlap_p2p_comm=interleaved,  # Megatron refuses it for plain 1F1B
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=sizes.pp > 1,
        cross_entropy_loss_fusion=True,
    )


def _model(config: JobConfig, transformer: Any, parts: Parts, device: torch.device) -> list[Any]:
    """This rank's chunks, each wrapped for data parallelism."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        align_param_gather=False,
        use_distributed_optimizer=True,
        average_in_collective=True,
    )
    chunks = []
    interleaved = config.parallelism.virtual_stages > 1
    for number in range(config.parallelism.virtual_stages):
        stage = {"vp_stage": number} if interleaved else {}
        if interleaved:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        layers = [parts.layer] * get_num_layers_to_build(transformer, **stage)
        chunk = GPTModel(
            config=transformer,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=layers, layer_norm=parts.norm
            ),
            vocab_size=config.model.vocab_size,
            max_sequence_length=config.model.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            parallel_output=True,
            **stage,
        ).to(device=device, dtype=torch.bfloat16)
        chunks.append(
            DistributedDataParallel(
                config=transformer,
                ddp_config=data_parallel,
                module=chunk,
                disable_bucketing=number > 0,
            )
        )
    return chunks


def _layer(attention: str, device: torch.device) -> tuple[Any, Any]:
    """Megatron's own layer with the replacements of Transformer Engine, and the norm by itself."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import MegatronModule

    class Attention(MegatronModule):  # type: ignore[misc]
        """Causal attention over [s, b, heads, size]."""

        def __init__(
            self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any
        ) -> None:
            super().__init__(config=config)
            self.softmax_scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            with sdpa_kernel(BACKENDS[attention], set_priority=True):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.softmax_scale
                )
            return out.permute(2, 0, 1, 3).flatten(2)

    class SequenceParallelNorm:
        """torch's LayerNorm, whose parameters Megatron takes for sequence parallel."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            norm = torch.nn.LayerNorm(
                hidden_size, eps=eps, dtype=config.params_dtype, device=device
            )
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            return norm

    layer = get_gpt_layer_local_spec(normalization="LayerNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelNorm
    parts.self_attention.submodules.core_attention = Attention
    parts.self_attn_bda = parts.mlp_bda = get_bias_dropout_add
    return layer, SequenceParallelNorm


def _optimizer(model: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        min_lr=1e-5,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    return get_megatron_optimizer(settings, model, use_gloo_process_groups=False)


def _step(
    config: JobConfig, transformer: Any, model: list[Any], optimizer: Any, device: torch.device
) -> Callable[[], Any]:
    """Wired as in train() of megatron/training/training.py."""
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    alone = len(model) == 1
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.no_sync_func = model[0].no_sync if alone else [chunk.no_sync for chunk in model]
    if not alone:
        transformer.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    samples, length = config.training.micro_batch_size, config.model.sequence_length
    generator = torch.Generator().manual_seed(17 + parallel_state.get_data_parallel_rank())
    size = (samples, length + 1)
    pool = [
        torch.randint(0, config.model.vocab_size, size, generator=generator).to(device)
        for _ in range(4)
    ]
    position = torch.arange(length, device=device).expand(samples, -1).contiguous()

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield from pool

    def forward(
        data: Iterator[torch.Tensor], chunk: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens = next(data)
        labels = tokens[:, 1:].contiguous()
        return chunk(tokens[:, :-1].contiguous(), position, None, labels=labels), _mean

    iterators = [batches() for _ in model]
    run = get_forward_backward_func()

    def step() -> torch.Tensor | None:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward,
            data_iterator=iterators[0] if alone else iterators,
            model=model[0] if alone else model,
            num_microbatches=config.micro_batches,
            seq_length=length,
            micro_batch_size=samples,
            decoder_seq_length=length,
            forward_only=False,
        )
        optimizer.step()  # waits for the gradient norm
        return losses[-1]["loss"] if losses else None

    return step


def _mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


if __name__ == "__main__":
    main()
