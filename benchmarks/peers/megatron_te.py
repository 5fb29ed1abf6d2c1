"""The strong bar: GPT training of Megatron-core with Transformer Engine, in bf16 or FP8.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers/megatron_te.py \\
        --preset 175b-stage --layers 3 --tp 2 --fp8 tensorwise

Model, layout, data and timing are those of `megatron_core.py`. What stands in for Transformer
Engine there is the real one here: norm and product in one layer with the weight gradient
accumulated in its GEMM, attention by cuDNN, fused rotary positions and AdamW. The head stays
Megatron's own layer, as in Megatron's specification, and with it the stand-in for Apex.

``--user-buffers`` cuts the transfers of tensor parallelism into pieces beside the GEMMs. They go by
CUDA IPC: NVLink multicast stays off everywhere, because some hosts do not survive it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from benchmarks.peers import bar, megatron_core
from benchmarks.peers.megatron_core import Parts

from megascale_job.config import JobConfig

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
    config = bar.job_of(options, options.dry_run or int(os.environ["WORLD_SIZE"]))
    line = bar.describe(
        config,
        options,
        system="megatron-core with Transformer Engine",
        version=megatron_core.VERSION,
        transformer_engine=_version(),
        block="serial",
        precision="fp8" if options.fp8 else "bf16",
        fp8=options.fp8,
        user_buffers=options.user_buffers,
    )
    if options.dry_run:
        bar.report(line, options.results)
        return
    os.environ.update(WITHOUT_MULTICAST)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when the device is first used
    warnings.filterwarnings("ignore")
    device = bar.own_device()
    _load_libraries()
    megatron_core.stand_in_for_apex()
    bar.connect(device)
    step = megatron_core.prepare(config, _parts(config, options), device)
    timed = bar.take_times(step, options.steps, device)
    loss = step()
    line |= bar.result(config, timed, device, None if loss is None else float(loss))
    line["parts"] = _chosen()
    if dist.get_rank() == 0:
        bar.report(line, options.results)
    torch.cuda.synchronize(device)
    dist.barrier()
    if options.user_buffers:
        from transformer_engine.pytorch.module.base import destroy_ub

        destroy_ub()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = bar.parser(__doc__)
    parser.add_argument(
        "--fp8", choices=["tensorwise", "delayed"], help="hybrid FP8 by this recipe; default: bf16"
    )
    parser.add_argument(
        "--user-buffers", action="store_true", help="tensor parallel transfers beside the GEMMs"
    )
    options = parser.parse_args()
    if options.attention != "cudnn":
        parser.error("--attention: Transformer Engine's is cuDNN's, leave it at cudnn")
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
    """What really ran, for the line: whose optimizer, which attention."""
    from megatron.core.optimizer import Adam

    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    backends = getattr(sys.modules.get(name), "_attention_backends", {})
    used = [kind for kind in ("flash", "fused", "unfused") if backends.get(f"use_{kind}_attention")]
    return {
        "adam": f"{Adam.__module__}.{Adam.__qualname__}",
        "attention": " ".join([*used, str(backends.get("fused_attention_backend"))]),
    }


if __name__ == "__main__":
    main()
