"""The bar: torchtitan's llama3 with FSDP2, tensor parallelism and torch.compile, on this machine.

    torchrun --nproc-per-node 8 benchmarks/peers/torchtitan.py --preset 7b \\
        --micro-batch 8 --global-batch 64 --compile
    torchrun --nproc-per-node 8 benchmarks/peers/torchtitan.py --preset 13b --tp 2 \\
        --global-batch 16 --async-tp

README.md has the versions and how to get them. The models are llama's: SwiGLU whose width gives a
layer (nearly) the weights of our GELU layer, RMSNorm, no biases, untied. Tokens are random; no data
are read, and no checkpoint is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    # As in torchtitan's own launcher; torch reads it when it is imported.
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import torch
import torch.distributed as dist
from benchmarks.peers import bar

from megascale_job.config import JobConfig

VERSION = "0.2.2"
_WIDTH_MULTIPLE = 256
# What torchtitan imports and this run does not use: module, names.
_UNUSED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "tokenizers": ("AddedToken", "Tokenizer"),
    "torch.utils.tensorboard": ("SummaryWriter",),
}


def main() -> None:
    """Measure one configuration; rank 0 prints the line."""
    parser = bar.parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile of each block")
    parser.add_argument(
        "--async-tp", action="store_true", help="tensor parallel collectives fused; compiles too"
    )
    options = parser.parse_args()
    options.compile |= options.async_tp
    if options.pp > 1:
        parser.error("this bar measures models without a pipeline")
    config = bar.swiglu(
        bar.job_of(options, options.dry_run or int(os.environ["WORLD_SIZE"])), _WIDTH_MULTIPLE
    )
    more = {"compile": options.compile, "async_tp": options.async_tp, "block": "serial"}
    line = bar.describe(config, options, system="torchtitan", version=VERSION, **more)
    if options.dry_run:
        bar.report(line, options.results)
        return
    device = bar.own_device()
    torch.cuda.set_device(device)
    _leave_out_what_is_missing()
    with TemporaryDirectory() as folder:
        trainer = _trainer(config, options, folder)
        batches = trainer.batch_generator(trainer.dataloader)

        def step() -> None:
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)

        timed = bar.take_times(step, options.steps, device)
        line |= bar.result(config, timed, device, _last_loss(trainer))
        line["memory_gib"] = None  # its logging resets torch's peak
        trainer.close()
    if dist.get_rank() == 0:
        bar.report(line, options.results)
    dist.destroy_process_group()


def _leave_out_what_is_missing() -> None:
    for name, attributes in _UNUSED.items():
        try:
            missing = importlib.util.find_spec(name) is None
        except ImportError:  # its parent is missing too
            missing = True
        if name == "torch.utils.tensorboard":  # torch has the module, which needs a package
            missing = importlib.util.find_spec("tensorboard") is None
        if missing:
            module = types.ModuleType(name)
            for attribute in attributes:
                setattr(module, attribute, type(attribute, (), {}))
            sys.modules[name] = module


def _trainer(config: JobConfig, options: argparse.Namespace, folder: str) -> Any:
    from torchtitan.config import JobConfig as Settings
    from torchtitan.models import attention
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    if options.attention == "flash":
        backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION]
        attention.ScaledDotProductAttentionWrapper.sdpa_backends = backends
    model = config.model
    sizes = {"dim": model.hidden_size, "n_layers": model.layers, "n_heads": model.heads}
    # torchtitan itself rounds 2/3 of 4 h up.
    shape = TransformerModelArgs(
        **sizes,
        vocab_size=model.vocab_size,
        multiple_of=_WIDTH_MULTIPLE,
        rope_theta=model.rope_theta,
    )
    spec = get_train_spec()
    spec.model_args = {options.preset: shape}
    spec.build_tokenizer_fn = spec.state_dict_adapter = spec.build_validator_fn = None
    spec.build_dataloader_fn = lambda dp_rank, **_: _RandomTokens(config, dp_rank)
    register_train_spec("bar", spec)

    settings = Settings()
    settings.job.dump_folder = folder
    settings.model.name, settings.model.flavor = "bar", options.preset
    training, sharding = settings.training, settings.parallelism
    training.seq_len, training.local_batch_size = (
        model.sequence_length,
        config.training.micro_batch_size,
    )
    training.global_batch_size, training.steps = config.training.global_batch_size, options.steps
    settings.lr_scheduler.warmup_steps = 2
    # Logging waits for the device: only at the first step and at the last.
    settings.metrics.log_freq = options.steps
    settings.metrics.disable_color_printing = True
    sharding.tensor_parallel_degree = options.tp
    sharding.enable_async_tensor_parallel = options.async_tp
    settings.compile.enable = options.compile
    settings.activation_checkpoint.mode = "none"
    settings.comm.trace_buf_size = 0
    init_logger()
    trainer = Trainer(settings)
    _remember_loss(trainer)
    return trainer


class _RandomTokens:
    """Endless random batches, with the protocol of torchtitan's loaders."""

    def __init__(self, config: JobConfig, dp_rank: int) -> None:
        generator = torch.Generator().manual_seed(17 + dp_rank)
        size = (config.training.micro_batch_size, config.model.sequence_length + 1)
        self._pool = [
            torch.randint(0, config.model.vocab_size, size, generator=generator) for _ in range(4)
        ]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for tokens in self._pool:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _remember_loss(trainer: Any) -> None:
    logger = trainer.metrics_processor.logger
    log = logger.log

    def remember(metrics: dict[str, Any], step: int) -> None:
        trainer.last_metrics = metrics
        log(metrics, step)

    logger.log = remember


def _last_loss(trainer: Any) -> float:
    return float(trainer.last_metrics["loss_metrics/global_avg_loss"])


if __name__ == "__main__":
    main()
