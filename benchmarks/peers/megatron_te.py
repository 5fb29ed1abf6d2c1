"""Measures Megatron-core with Transformer Engine, in bf16 or FP8, for comparison with our trainer.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers/megatron_te.py \\
        --preset 175b-stage --layers 3 --tp 2 --fp8 tensorwise

README.md has the versions and how to install them. A step is timed as `throughput.py` times ours:
the same models and batches, three warm-up steps, CUDA events at the ends of the others; each step
counts as long as on its slowest rank, and the median of the steps is reported. FLOP are counted by
the same formula.

Transformer Engine provides norm and product in one layer with the weight gradient accumulated in
its GEMM, attention by cuDNN, fused rotary positions and AdamW. The head is Megatron's own layer, as
in Megatron's specification, so Apex's accumulation is replaced by ``torch.addmm`` into float32.
The overlap of data parallel gradients and parameters, of interleaved pipeline transfers and of
tensor parallel backward is on, as in Megatron's own training loop; the last of them requires
``CUDA_DEVICE_MAX_CONNECTIONS=1``.

``--user-buffers`` cuts the transfers of tensor parallelism into pieces that run during the GEMMs.
They use CUDA IPC: NVLink multicast stays off everywhere, because some hosts do not survive it.
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
from benchmarks.options import PRESETS, ConfigurationRefused, Run, job, sizes
from benchmarks.timing import Sensors, Window, sensor_summary, shared

from megascale_job.config import JobConfig
from megascale_job.sizes import flops

VERSION = "0.16.1"


@dataclass(frozen=True)
class Parts:
    """What Megatron builds its model of, and the settings that this needs.

    Args:
        layer: specification of a layer; norm: of the norm behind the last.
        settings: of ``TransformerConfig``, in place of those of this
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
    """Measure one configuration; rank 0 prints the line."""
    options = _options()
    config = job_of(options, options.dry_run or int(os.environ["WORLD_SIZE"]))
    line = describe(
        config,
        options,
        system="megatron-core with Transformer Engine",
        version=VERSION,
        transformer_engine=_version(),
        block="serial",
        precision="fp8" if options.fp8 else "bf16",
        fp8=options.fp8,
        user_buffers=options.user_buffers,
    )
    if options.dry_run:
        report(line, options.results)
        return
    os.environ.update(WITHOUT_MULTICAST)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when the device is first used
    warnings.filterwarnings("ignore")
    device = own_device()
    _load_libraries()
    stand_in_for_apex()
    connect(device)
    step = prepare(config, _parts(config, options), device)
    timed = take_times(step, options.steps, device)
    loss = step()
    line |= result(config, timed, device, None if loss is None else float(loss))
    line["parts"] = _chosen()
    if dist.get_rank() == 0:
        report(line, options.results)
    torch.cuda.synchronize(device)
    dist.barrier()
    if options.user_buffers:
        from transformer_engine.pytorch.module.base import destroy_ub

        destroy_ub()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--fp8", choices=["tensorwise", "delayed"], help="hybrid FP8 by this recipe; default: bf16"
    )
    parser.add_argument(
        "--user-buffers", action="store_true", help="tensor parallel transfers beside the GEMMs"
    )
    options = parser.parse_args()
    if options.user_buffers and options.tp < 2:
        parser.error("--user-buffers: give --tp 2 or more")
    return options


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
    if options.fp8:
        settings |= {"fp8": "hybrid", "fp8_recipe": options.fp8}
    if options.fp8 == "delayed":
        settings |= _AMAX_HISTORY
    if options.user_buffers:
        _start_user_buffers(config, fp8=bool(options.fp8))
    return Parts(get_gpt_layer_with_transformer_engine_spec(), TENorm, settings)


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
SHAPE = ("preset", "layers", "tp", "pp", "vpp", "seq", "micro_batch", "global_batch", "steps")


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
    for name in ("tp", "pp", "vpp"):
        found.add_argument(f"--{name}", type=int, default=1)
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
    run = Run(**{name: getattr(options, name) for name in SHAPE}, bias=True)
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
