"""The models of `megascale init --model`: a complete job each, except for its corpus.

Sizes of published models are from their config.json (Llama 3.1 and 3.2, Qwen 3, Mixtral), with its
coefficient of the balance of experts, and from the MegaScale paper (175B: Tables 1 and 2;
vocabulary 64,000, sequences of 2,048 tokens). The smaller GPT sizes are usual ones for that number
of parameters. Layouts fit devices of 80 GiB, by the memory estimate with even loads of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megascale_job.visible import counted

_LLAMA: dict[str, Any] = {
    "block": "serial",
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "kv_heads": 8,
    "vocab_size": 128_256,
    "sequence_length": 8192,
    "rope_theta": 500_000.0,
}
_QWEN: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000.0,
    "norm_epsilon": 1e-6,
    "qk_norm": True,
}
_MIXTRAL: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 32_000,
    "rope_theta": 1_000_000.0,
}
_GPT: dict[str, Any] = {
    "block": "parallel",
    "mlp": "gelu",
    "bias": True,
    "vocab_size": 64_000,
    "sequence_length": 2048,
}
_TEXT_AS_BYTES = "megascale data tokenize YOUR_TEXT --output corpus"
_TEXT_AS_BPE = (
    "megascale data tokenize YOUR_TEXT --tokenizer bpe --vocab-size {vocabulary} --output corpus"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingModel:
    """A model with a layout and a batch to start with, as sections of ``trainer``."""

    model: dict[str, Any]
    parallelism: dict[str, Any]
    training: dict[str, Any]
    learning_rate: float
    warmup_steps: int
    checkpoint_steps: int = 100
    device: str = "a GPU of 80 GiB"
    tokenizer: str = ""
    loss: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenize(self) -> str:
        """The command that makes its corpus."""
        if self.tokenizer:
            return f"megascale data tokenize YOUR_TEXT --tokenizer {self.tokenizer} --output corpus"
        if self.model["vocab_size"] == _BYTES_AND_END:
            return _TEXT_AS_BYTES
        return _TEXT_AS_BPE.format(vocabulary=self.model["vocab_size"])

    @property
    def sections(self) -> dict[str, Any]:
        """The sections under ``trainer`` in its job file."""
        tokenizer: dict[str, Any] = {"kind": "bytes"}
        if self.model["vocab_size"] != _BYTES_AND_END:
            tokenizer = {"kind": "bpe", "path": self.tokenizer or "corpus.tokenizer.json"}
        return {
            "model": self.model,
            "parallelism": self.parallelism,
            "training": self.training,
            "optimizer": {"learning_rate": self.learning_rate},
            "schedule": {"warmup_steps": self.warmup_steps},
            "loss": self.loss,
            "data": {"sources": [{"prefix": "corpus"}], "tokenizer": tokenizer},
        }

    def on(self, ranks: int) -> StartingModel:
        """The same model on so many ranks; dp is their number divided by tp and pp.

        If they are too few for the model's ep, it becomes the largest divisor that is possible.

        Raises:
            ValueError: they are not whole replicas, or the replicas do not divide the batch.
        """
        sizes, training = self.parallelism, self.training
        of_replica = sizes.get("tp", 1) * sizes.get("pp", 1)
        dp = ranks // of_replica
        if ranks % of_replica:
            raise ValueError(
                f"--ranks: {ranks} is not a multiple of {of_replica}, the ranks of one replica (tp "
                f"{sizes.get('tp', 1)} * pp {sizes.get('pp', 1)}); give one, or change the file"
            )
        sequences = training["global_batch_size"] // training["micro_batch_size"]
        if sequences % dp:
            raise ValueError(
                f"--ranks: {counted(dp, 'replica')} do not divide the "
                f"{counted(sequences, 'micro-batch')} of a step; "
                "give another number, or change the batch in the file"
            )
        changed = {**sizes, "dp": dp}
        if "ep" in sizes:
            changed["ep"] = math.gcd(sizes["ep"], sizes.get("tp", 1) * dp)
        return replace(self, parallelism=changed)


_BYTES_AND_END = 257


def _llama(factor: float, **model: Any) -> dict[str, Any]:
    """Llama 3.1 and 3.2: frequencies scaled from the 8,192 tokens of Llama 3."""
    scaling = {"kind": "llama3", "factor": factor, "original_sequence_length": 8192}
    return {**_LLAMA, **model, "rope_scaling": scaling}


def _layout(batch: int, micro_batch: int = 1, recompute: str = "none", **axes: int) -> Any:
    """(parallelism, training) of a run on GPUs; every axis above 1 is overlapped."""
    overlap = {axis: True for axis in ("tp", "pp", "dp") if axes.get(axis, 1) > 1}
    parallelism = {**axes, "recompute": recompute, "overlap": overlap}
    training = {
        "steps": 100_000,
        "global_batch_size": batch,
        "micro_batch_size": micro_batch,
        "precision": "bf16",
    }
    return parallelism, training


def _on_gpus(
    model: dict[str, Any],
    layout: tuple[dict[str, Any], dict[str, Any]],
    learning_rate: float,
    **loss: float,
) -> StartingModel:
    parallelism, training = layout
    return StartingModel(
        model=model,
        parallelism=parallelism,
        training=training,
        learning_rate=learning_rate,
        warmup_steps=2000,
        loss=loss,
    )


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {**_GPT, "layers": layers, "hidden_size": hidden, "heads": heads}


# For fine-tuning an imported model on one device; the job file can set another.
_IMPORTED_LEARNING_RATE = 1e-5
_LONGEST_SEQUENCE = 8192


def imported_model(
    model: Mapping[str, Any], tokenizer: str, loss: Mapping[str, Any]
) -> StartingModel:
    """An imported model with a layout and a batch; sequences of at most 8,192 tokens.

    Args:
        tokenizer: path of its tokenizer's file.
        loss: fields of trainer.loss that it was trained with.
    """
    length = min(model["sequence_length"], _LONGEST_SEQUENCE)
    parallelism, training = _layout(32)
    return StartingModel(
        model={**model, "sequence_length": length},
        parallelism=parallelism,
        training={**training, "steps": 1000},
        learning_rate=_IMPORTED_LEARNING_RATE,
        warmup_steps=100,
        device="a GPU",
        tokenizer=tokenizer,
        loss=dict(loss),
    )


_TINY_TRAINING: dict[str, Any] = {
    "steps": 200,
    "global_batch_size": 16,
    "micro_batch_size": 2,
    "precision": "fp32",
}

MODELS: dict[str, StartingModel] = {
    "tiny": StartingModel(
        model={
            "layers": 4,
            "hidden_size": 128,
            "heads": 4,
            "vocab_size": _BYTES_AND_END,
            "sequence_length": 128,
        },
        parallelism={},
        training=_TINY_TRAINING,
        learning_rate=2e-3,
        warmup_steps=10,
        checkpoint_steps=20,
        device="a CPU or a GPU",
    ),
    "tiny-experts": StartingModel(
        model={
            "layers": 4,
            "hidden_size": 128,
            "heads": 4,
            "vocab_size": _BYTES_AND_END,
            "sequence_length": 128,
            "block": "serial",
            "mlp": "swiglu",
            "norm": "rmsnorm",
            "experts": {"count": 8, "top_k": 2, "ffn_size": 128},
        },
        parallelism={},
        training=_TINY_TRAINING,
        learning_rate=2e-3,
        warmup_steps=10,
        checkpoint_steps=20,
        device="a CPU or a GPU",
        # As in Switch Transformers (arXiv 2101.03961) and ST-MoE (arXiv 2202.08906).
        loss={"global_balance": 0.01, "router_z_loss": 0.001},
    ),
    "llama3-1b": _on_gpus(
        _llama(
            32.0,
            layers=16,
            hidden_size=2048,
            heads=32,
            ffn_size=8192,
            tie_embeddings=True,
        ),
        _layout(64, dp=8),
        3e-4,
    ),
    "llama3-8b": _on_gpus(
        _llama(8.0, layers=32, hidden_size=4096, heads=32, ffn_size=14_336),
        _layout(128, tp=4, dp=2, recompute="selective"),
        3e-4,
    ),
    "llama3-70b": _on_gpus(
        _llama(8.0, layers=80, hidden_size=8192, heads=64, ffn_size=28_672),
        _layout(256, tp=8, pp=4, dp=2, recompute="selective"),
        1.5e-4,
    ),
    "qwen3-8b": _on_gpus(
        {**_QWEN, "layers": 36, "hidden_size": 4096, "heads": 32, "ffn_size": 12_288},
        _layout(128, tp=4, dp=2, recompute="selective"),
        3e-4,
    ),
    "qwen3-30b-a3b": _on_gpus(
        {
            **_QWEN,
            "layers": 48,
            "hidden_size": 2048,
            "heads": 32,
            "kv_heads": 4,
            "head_dim": 128,
            "ffn_size": 6144,
            "sequence_length": 4096,
            "experts": {"count": 128, "top_k": 8, "ffn_size": 768},
        },
        _layout(512, dp=16, ep=8, recompute="selective"),
        3e-4,
        global_balance=0.001,
    ),
    "mixtral-8x7b": _on_gpus(
        {
            **_MIXTRAL,
            "layers": 32,
            "hidden_size": 4096,
            "heads": 32,
            "ffn_size": 14_336,
            "sequence_length": 4096,
            "experts": {"count": 8, "top_k": 2},
        },
        _layout(512, tp=2, pp=2, dp=4, ep=8, recompute="selective"),
        3e-4,
        global_balance=0.02,
    ),
    "gpt-1b": _on_gpus(_gpt(24, 2048, 16), _layout(512, 4, dp=8), 2e-4),
    "gpt-7b": _on_gpus(_gpt(32, 4096, 32), _layout(512, 2, tp=2, dp=4), 1.2e-4),
    "gpt-13b": _on_gpus(
        _gpt(40, 5120, 40), _layout(768, 2, tp=2, pp=2, virtual_stages=2, dp=4), 1e-4
    ),
    "gpt-30b": _on_gpus(
        _gpt(48, 7168, 56), _layout(768, 2, tp=4, pp=2, virtual_stages=2, dp=4), 1e-4
    ),
    "gpt-175b": _on_gpus(
        _gpt(96, 12_288, 128), _layout(768, 1, tp=8, pp=8, virtual_stages=6, dp=4), 6e-5
    ),
}
