"""Measures Megatron-core with Transformer Engine, in bf16 or FP8, for comparison with our trainer.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers/megatron_te.py \\
        --preset 175b-stage --layers 3 --tp 2 --fp8 tensorwise
    torchrun --standalone --nproc-per-node 1 benchmarks/peers/megatron_te.py \\
        --preset m2 --routing balanced --micro-batch 8 --cutlass

README.md has the versions and how to install them. `pair.py` gives it several measurements, which
it makes in turn; a model is freed before its line is printed.

A step is timed as `throughput.py` times ours: the same models and batches, three warm-up steps,
CUDA events at the ends of the others; each step counts as long as on its slowest rank, and the
median of the steps is reported. FLOP are counted by the same formula.

Transformer Engine provides norm and product in one layer with the weight gradient accumulated in
its GEMM, attention by cuDNN, fused rotary positions and AdamW. The head is Megatron's own layer, as
in Megatron's specification, so Apex's accumulation is replaced by ``torch.addmm`` into float32.
The overlap of data parallel gradients and parameters, of interleaved pipeline transfers and of
tensor parallel backward is on, as in Megatron's own training loop; the last of them requires
``CUDA_DEVICE_MAX_CONNECTIONS=1``.

Models with experts (presets m1 to m3) use Megatron's dropless dispatcher, auxiliary loss and router
in float32, and Transformer Engine's grouped GEMM, permutation and router. With ``--cutlass`` the
grouped GEMM is one CUTLASS kernel instead of a loop over experts, where it can be. ``--routing
balanced`` chooses experts by random logits: all loads are about even.

``--user-buffers`` cuts the transfers of tensor parallelism into pieces that run during the GEMMs.
They use CUDA IPC: NVLink multicast stays off everywhere, because some hosts do not survive it.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import ctypes
import gc
import json
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks import timing
from benchmarks.options import (
    PRESETS,
    ConfigurationRefused,
    Run,
    await_turn,
    job,
    sizes,
    to_arguments,
)
from benchmarks.timing import Sensors, Window, sensor_summary, shared

from megascale_job.config import JobConfig
from megascale_job.sizes import flops

VERSION = "0.16.1"


@dataclass(frozen=True)
class Parts:
    """What Megatron builds its model of, and the settings that this needs.

    Args:
        layer: specification of a layer; norm: of the norm behind the last.
        settings: of ``TransformerConfig``, which come before those of the model's shape.
    """

    layer: Any
    norm: Any
    settings: Mapping[str, Any]


def stand_in_for_apex() -> None:
    """Apex's fused_weight_gradient_mlp_cuda: main_grad += grad_output^T input, in float32."""

    def accumulate(
        source: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        torch.addmm(main_grad, grad_output.t(), source, out_dtype=main_grad.dtype, out=main_grad)

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules["fused_weight_gradient_mlp_cuda"] = module


def pad_a_copy() -> None:
    """Let Megatron pad a copy of the routing map.

    It pads the map in place, which Transformer Engine's router has saved for its backward: with
    ``moe_router_padding_for_quantization`` the backward then fails.
    """
    from megatron.core.transformer.moe import token_dispatcher

    pad = token_dispatcher.pad_routing_map
    token_dispatcher.pad_routing_map = lambda routing, multiple: pad(routing.clone(), multiple)


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and ``step``, which returns its loss on ranks of the last stage."""

    model: list[Any]
    optimizer: Any
    step: Callable[[], Any]

    def free(self) -> None:
        """Give back the memory: Megatron's hooks on gradients keep a model alive by themselves."""
        tensors: list[Any] = []
        for chunk in self.model:
            chunk.grad_accs.clear()
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                tensors += [buffer.grad_data, buffer.param_data]
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in each.shard_fp32_from_float16_groups:
                tensors += group
            for state in each.optimizer.state.values():
                tensors += state.values()
            each.optimizer.state.clear()
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.untyped_storage().resize_(0)


def prepare(config: JobConfig, parts: Parts, device: torch.device) -> Training:
    """The training of ``config``; groups of ranks are made anew for another layout."""
    from megatron.core.tensor_parallel.random import (
        initialize_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    _lay_out(config)
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234 + dist.get_rank())
    torch.set_float32_matmul_precision("high")
    torch._dynamo.reset()  # else the sizes of the next model would be compiled as dynamic ones
    transformer = _transformer_config(config, parts.settings)
    model = _model(config, transformer, parts, device)
    optimizer = _optimizer(model)
    return Training(model, optimizer, _step(config, transformer, model, optimizer, device))


def _lay_out(config: JobConfig) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    sizes = config.parallelism
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    get_moe_layer_wise_logging_tracker().clear()  # it has room for the layers of the last model
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.virtual_stages
        if sizes.virtual_stages > 1
        else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=1 if config.model.experts.count else None,
        create_gloo_process_groups=False,
    )


def _transformer_config(config: JobConfig, settings: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, sizes = config.model, config.parallelism
    interleaved, gated = sizes.virtual_stages > 1, model.mlp == "swiglu"
    shape: dict[str, Any] = dict(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        qk_layernorm=model.qk_norm,
        ffn_hidden_size=model.ffn_width,
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=gated,
        # With the fusion below gelu is the tanh form, as ours.
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=model.bias,
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
    return TransformerConfig(**shape, **_experts(config), **settings)


def _experts(config: JobConfig) -> dict[str, Any]:
    """Settings of a model with experts; none of a dense one."""
    experts, ep = config.model.experts, config.parallelism.ep
    if not experts.count:
        return {}
    found = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": config.model.expert_width,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.loss.global_balance,
        "moe_router_dtype": "fp32",
        "moe_router_force_load_balancing": config.training.forced_balance,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
    }
    if experts.shared_ffn_size:
        found["moe_shared_expert_intermediate_size"] = experts.shared_ffn_size
        found["moe_shared_expert_overlap"] = ep > 1
    return found


def _model(config: JobConfig, transformer: Any, parts: Parts, device: torch.device) -> list[Any]:
    """This rank's chunks, each wrapped for data parallelism."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    several = dist.get_world_size() > 1
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=several,
        overlap_param_gather=several,
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
            rotary_base=int(config.model.rope_theta),
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
        overlap_param_gather=dist.get_world_size() > 1,
    )
    return get_megatron_optimizer(settings, model, use_gloo_process_groups=False)


def _step(
    config: JobConfig, transformer: Any, model: list[Any], optimizer: Any, device: torch.device
) -> Callable[[], Any]:
    """Wired as in train() of megatron/training/training.py."""
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

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
        if config.model.experts.count:
            clear_aux_losses_tracker()
        return losses[-1]["loss"] if losses else None

    return step


def _mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


WITHOUT_MULTICAST = {
    "UB_SKIPMC": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# Where Transformer Engine looks for libraries, and torch's packages that hold them.
_LIBRARIES = {"CUDNN_HOME": "cudnn", "NVRTC_HOME": "cu13", "CURAND_HOME": "cu13"}
# Of delayed scaling: as in Megatron's own examples.
_AMAX_HISTORY = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}


def main() -> None:
    """Measure one configuration, or those of a sweep in turn; rank 0 prints the lines."""
    options = _checked(parser().parse_args())
    entries = [options]
    if options.sweep:
        sweep = json.loads(options.sweep.read_text())
        entries = [parsed(values) for values in sweep]
    ranks = options.dry_run or int(os.environ["WORLD_SIZE"])
    configs = [job_of(entry, ranks) for entry in entries]
    if options.dry_run:
        for entry, config in zip(entries, configs, strict=True):
            report(_described(entry, config), options.results)
        return
    os.environ.update(WITHOUT_MULTICAST)
    if not all(config.model.experts.count for config in configs):
        # Read when a device is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore")
    device = own_device()
    _load_libraries()
    stand_in_for_apex()
    pad_a_copy()
    connect(device)
    for number, (entry, config) in enumerate(zip(entries, configs, strict=True)):
        await_turn(options.turns, number, lambda: None)
        line = _described(entry, config) | _measured(entry, config, device)
        if dist.get_rank() == 0:
            report(line, options.results)
    dist.destroy_process_group()


def _described(options: argparse.Namespace, config: JobConfig) -> dict[str, Any]:
    return describe(
        config,
        options,
        system="megatron-core with Transformer Engine",
        version=VERSION,
        transformer_engine=_version(),
        block="serial",
        precision="fp8" if options.fp8 else "bf16",
        fp8=options.fp8,
        cutlass=options.cutlass,
        routing=options.routing if config.model.experts.count else None,
        user_buffers=options.user_buffers,
    )


def _measured(
    options: argparse.Namespace, config: JobConfig, device: torch.device
) -> dict[str, Any]:
    """The figures of one configuration, whose memory is free again; collective."""
    os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = str(int(options.cutlass))  # read at each call
    torch.cuda.reset_peak_memory_stats(device)
    training = prepare(config, _parts(config, options), device)
    timed = take_times(training.step, options.steps, device)
    loss = training.step()
    found = result(config, timed, device, None if loss is None else float(loss))
    found["parts"] = _chosen()
    torch.cuda.synchronize(device)
    dist.barrier()
    training.free()
    del training, loss
    _free_library(user_buffers=options.user_buffers)
    return found


def _free_library(*, user_buffers: bool) -> None:
    """Let Transformer Engine forget the last model, and give its memory back to the device."""
    from transformer_engine.pytorch.module.base import destroy_ub
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if user_buffers:
        destroy_ub()
    FP8GlobalStateManager.reset()
    gc.collect()
    torch.cuda.empty_cache()


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    found = common_options(__doc__)
    add = found.add_argument
    add(
        "--fp8",
        choices=["tensorwise", "delayed", "blockwise"],
        help="FP8 by this recipe; default: bf16",
    )
    add("--cutlass", action="store_true", help="one grouped GEMM, where it has one")
    add("--user-buffers", action="store_true", help="tensor parallel transfers beside the GEMMs")
    add("--sweep", type=Path, help="a JSON file of measurements, instead of the options above")
    add("--turns", type=Path, help="begin measurement N when the file N is in this folder")
    return found


def parsed(values: Mapping[str, Any]) -> argparse.Namespace:
    """The options of one measurement of a sweep."""
    return _checked(parser().parse_args(to_arguments(values)))


def _checked(found: argparse.Namespace) -> argparse.Namespace:
    if found.user_buffers and found.tp < 2:
        parser().error("--user-buffers: give --tp 2 or more")
    return found


def _version() -> str | None:
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return None


def _load_libraries() -> None:
    """Load torch's copy of cuDNN whole, and name the folders of torch's other libraries.

    Transformer Engine's library needs cuDNN's parts by name and would not look for them there.
    """
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for path in sorted(packages.glob("cudnn/lib/libcudnn*.so.9")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for variable, folder in _LIBRARIES.items():
        if (packages / folder).is_dir():
            os.environ.setdefault(variable, str(packages / folder))
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    for headers in (toolkit / "include", packages / "cu13" / "include"):
        if (headers / "cuda_runtime.h").exists():  # for what it compiles while it runs
            os.environ.setdefault("NVTE_CUDA_INCLUDE_DIR", str(headers))


def _parts(config: JobConfig, options: argparse.Namespace) -> Parts:
    """Megatron's layer of Transformer Engine's parts, and the settings that go with it."""
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.enums import AttnBackend

    if not HAVE_TE:
        raise RuntimeError("Transformer Engine cannot be imported; see README.md, Install")
    settings: dict[str, Any] = {
        "attention_backend": AttnBackend.fused,
        "apply_rope_fusion": True,
        "tp_comm_overlap": options.user_buffers,
    }
    experts = config.model.experts.count
    if experts:
        settings |= {
            "cross_entropy_fusion_impl": "te",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_fusion": True,
        }
    if options.fp8:
        kind = "e4m3" if options.fp8 == "blockwise" else "hybrid"
        settings |= {"fp8": kind, "fp8_recipe": options.fp8}
        if experts:
            settings["moe_router_padding_for_quantization"] = True
    if options.fp8 == "delayed":
        settings |= _AMAX_HISTORY
    if options.user_buffers:
        _start_user_buffers(config, fp8=bool(options.fp8))
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts or None,
        moe_grouped_gemm=bool(experts),
        qk_layernorm=config.model.qk_norm,
    )
    return Parts(layer, TENorm, settings)


def _start_user_buffers(config: JobConfig, *, fp8: bool) -> None:
    """What Megatron's start-up does for ``--tp-comm-overlap`` without a file of settings."""
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    mode = UserBufferQuantizationMode.FP8 if fp8 else UserBufferQuantizationMode.NONE
    tokens = config.training.micro_batch_size * config.model.sequence_length
    initialize_ub(
        shape=[tokens, config.model.hidden_size],
        tp_size=config.parallelism.tp,
        quantization_modes=[mode],
        bootstrap_backend="nccl",
    )


def _chosen() -> dict[str, str]:
    """The parts that really ran: the class of the optimizer, the kind of attention."""
    from megatron.core.optimizer import Adam

    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    backends = getattr(sys.modules.get(name), "_attention_backends", {})
    used = [kind for kind in ("flash", "fused", "unfused") if backends.get(f"use_{kind}_attention")]
    return {
        "adam": f"{Adam.__module__}.{Adam.__qualname__}",
        "attention": " ".join([*used, str(backends.get("fused_attention_backend"))]),
    }


WARMUP_STEPS = 3
TIMEOUT_S = 120.0
SHAPE = (
    *("preset", "layers", "tp", "pp", "vpp", "ep", "routing"),
    *("seq", "micro_batch", "global_batch", "steps"),
)


def common_options(description: str | None) -> argparse.ArgumentParser:
    """The options that every bar has: those of `throughput.py` of the same names."""
    found = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--preset", choices=PRESETS, default="7b")
    for name in ("layers", "seq", "micro-batch", "global-batch"):
        found.add_argument(f"--{name}", type=int, default=0, help="default: the preset's")
    for name in ("tp", "pp", "vpp", "ep"):
        found.add_argument(f"--{name}", type=int, default=1)
    found.add_argument("--routing", choices=["learned", "balanced"], default="learned")
    found.add_argument("--steps", type=int, default=10, help=f"the first {WARMUP_STEPS} warm up")
    found.add_argument("--results", type=Path, help="add the result to this file, as a JSON line")
    found.add_argument(
        "--dry-run",
        type=int,
        default=0,
        metavar="RANKS",
        help="print what this many ranks would run",
    )
    return found


def job_of(options: argparse.Namespace, ranks: int) -> JobConfig:
    """Our job of the same shape.

    Raises:
        SystemExit: with status 2, the layout does not fit the ranks or the model.
    """
    dense = "experts" not in PRESETS[options.preset].model
    run = Run(**{name: getattr(options, name) for name in SHAPE}, bias=dense)
    try:
        return job(run, ranks, cuda=True)
    except ConfigurationRefused as refusal:
        print(f"{Path(sys.argv[0]).name}: {refusal}", file=sys.stderr)
        raise SystemExit(2) from refusal


def describe(config: JobConfig, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The configuration by the names of our own results, and ``more`` of the bar's own."""
    return {
        "preset": options.preset,
        "torch": torch.__version__,
        **sizes(config),
        **more,
    }


def connect(device: torch.device) -> None:
    """Join the other ranks, on ``device``."""
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=TIMEOUT_S))


def own_device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def take_times(
    step: Callable[[], Any], steps: int, device: torch.device
) -> tuple[list[float], Window | None]:
    """Seconds of each step after those that warm up, on this rank, and its device meanwhile.

    The host launches ahead if ``step`` does not wait.
    """
    gc.collect()
    gc.disable()
    with Sensors(device) as sensors:
        clock = timing.StepClock(device)
        for _ in range(steps):
            step()
            clock.lap()
        times_s = clock.times_s()[WARMUP_STEPS:]
        seen = sensors.over(sum(times_s))
    gc.enable()
    return times_s, seen


def result(
    config: JobConfig,
    timed: tuple[list[float], Window | None],
    device: torch.device,
    loss: float | None,
) -> dict[str, Any]:
    """Figures over all ranks, from this rank's times and its loss, if it has one; collective.

    Args:
        timed: what :func:`take_times` returned.
    """
    times_s, seen = timed
    ranks = config.layout.world_size
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    values = [*times_s, float(peak), -1.0 if loss is None else loss]
    values += shared(seen, dist.get_rank(), ranks)
    slowest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    steps = len(times_s)
    times, (memory, largest_loss), sensed = (
        slowest[:steps].tolist(),
        slowest[steps : steps + 2].tolist(),
        slowest[steps + 2 :].tolist(),
    )
    found = timing.summary(times)
    tokens = config.training.global_batch_size * config.model.sequence_length
    tokens_per_s = tokens / found["p50"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    mfu = flops.mfu(config.model, tokens_per_s, ranks, name)
    return {
        "device": name,
        "tokens_per_s_per_device": tokens_per_s / ranks,
        "model_tflops": flops.flops_per_token(config.model).exact * tokens_per_s / ranks / 1e12,
        "step_time_s": found,
        "mfu_causal": asdict(mfu)["exact"] if mfu else None,
        "mfu_full": asdict(mfu)["full"] if mfu else None,
        "memory_gib": memory / 2**30,
        "sensors": sensor_summary(sensed, ranks, tokens * steps),
        "loss": largest_loss,
    }


def report(line: Mapping[str, Any], path: Path | None) -> None:
    """Print a line, and add it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
