"""A GPT that computes from Megatron-core's files, written from its documented names and order.

It shares no code with the export: each tensor-parallel rank computes its own heads and its own part
of the FFN from its own file, and sums follow, as in Megatron's column- and row-parallel layers.
Megatron-core itself loads exports of one rank in tests/export/test_megatron.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]


class MegatronFiles:
    """The newest iteration of a folder: its arguments, and each rank's tensors by stage."""

    def __init__(self, folder: Path) -> None:
        newest = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
        name = newest if newest == "release" else f"iter_{int(newest):07d}"
        read = {
            path.parent.name: torch.load(path, weights_only=False)  # as Megatron does
            for path in (folder / name).glob("mp_rank_*/model_optim_rng.pt")
        }
        self.args: Any = read["mp_rank_00" if "mp_rank_00" in read else "mp_rank_00_000"]["args"]
        tp, pp = self.args.tensor_model_parallel_size, self.args.pipeline_model_parallel_size
        suffixes = [f"_{stage:03d}" for stage in range(pp)] if pp > 1 else [""]
        assert len(read) == tp * pp
        self.files = [
            [read[f"mp_rank_{rank:02d}{suffix}"] for rank in range(tp)] for suffix in suffixes
        ]
        self.stages: list[list[Tensors]] = [
            [{**file["model"]} for file in ranks] for ranks in self.files
        ]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, padded V] of ``tokens`` [B, S], float32."""
        args, first, last = self.args, self.stages[0], self.stages[-1]
        embedding = torch.cat([rank.pop("embedding.word_embeddings.weight") for rank in first])
        assert len(embedding) == args.padded_vocab_size
        hidden = embedding[tokens]
        for ranks in self.stages:
            for layer in range(args.num_layers // len(self.stages)):
                prefix = f"decoder.layers.{layer}."
                parts = [_taken(rank, prefix) for rank in ranks]
                hidden = hidden + self._attention(hidden, parts)
                hidden = hidden + self._mlp(hidden, parts)
        norms = [_taken(rank, "decoder.final_layernorm.") for rank in last]
        hidden = self._norm(hidden, norms[0]["weight"], norms[0].get("bias"))
        if args.untie_embeddings_and_output_weights or len(self.stages) > 1:
            head = torch.cat([rank.pop("output_layer.weight") for rank in last])
        else:
            head = embedding
        left = [name for ranks in self.stages for rank in ranks for name in rank]
        assert not left, f"Megatron's model has no {left}"
        return hidden @ head.T

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.args.normalization == "RMSNorm":
            assert bias is None
            scale = (x.square().mean(-1, keepdim=True) + self.args.norm_epsilon).rsqrt()
            return x * scale * weight
        assert bias is not None, "Megatron's LayerNorm has a bias"
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.args.norm_epsilon)

    def _attention(self, x: torch.Tensor, parts: list[Tensors]) -> torch.Tensor:
        args, total = self.args, torch.zeros_like(x)
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        groups //= len(parts)
        for part in parts:
            name = "self_attention.linear_qkv."
            weight, bias = part[f"{name}layer_norm_weight"], part.get(f"{name}layer_norm_bias")
            merged = functional.linear(
                self._norm(x, weight, bias), part[f"{name}weight"], part.get(f"{name}bias")
            )
            shape = (*x.shape[:2], groups, -1, args.kv_channels)
            grouped = merged.view(shape)  # of each group: its queries, its key, its value
            count = grouped.shape[3] - 2
            q = self._turned(self._of_heads(part, "q", grouped[..., :count, :]))
            k = self._of_heads(part, "k", grouped[..., count : count + 1, :])
            k = self._turned(k).expand_as(q)
            v = grouped[..., count + 1 :, :].expand_as(q)
            flat = [each.flatten(2, 3).transpose(1, 2) for each in (q, k, v)]
            found = functional.scaled_dot_product_attention(*flat, is_causal=True)
            total = total + functional.linear(
                found.transpose(1, 2).flatten(2), part["self_attention.linear_proj.weight"]
            )
        return total + _bias(parts, "self_attention.linear_proj.bias")

    def _of_heads(self, part: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
        if not self.args.qk_layernorm:
            return x
        prefix = f"self_attention.{name}_layernorm."
        return self._norm(x, part[f"{prefix}weight"], part.get(f"{prefix}bias"))

    def _mlp(self, x: torch.Tensor, parts: list[Tensors]) -> torch.Tensor:
        total = torch.zeros_like(x)
        for part in parts:
            name = "mlp.linear_fc1."
            weight, bias = part[f"{name}layer_norm_weight"], part.get(f"{name}layer_norm_bias")
            inner = functional.linear(
                self._norm(x, weight, bias), part[f"{name}weight"], part.get(f"{name}bias")
            )
            if self.args.swiglu:
                gate, up = torch.chunk(inner, 2, dim=-1)
                inner = functional.silu(gate) * up
            else:
                inner = functional.gelu(inner, approximate="tanh")  # its fusion with the bias
            total = total + functional.linear(inner, part["mlp.linear_fc2.weight"])
        return total + _bias(parts, "mlp.linear_fc2.bias")

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [B, S, G, heads, d]: column i turns with column i + d/2."""
        half = x.shape[-1] // 2
        rate = self.args.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        if self.args.use_rope_scaling:
            rate = _scaled(rate, self.args.rope_scaling_factor)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rate
        cos, sin = (each.float()[:, None, None, :] for each in (angle.cos(), angle.sin()))
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _scaled(rate: torch.Tensor, factor: float) -> torch.Tensor:
    """Llama 3.1's frequencies, with the constants that Megatron has."""
    turns = 8192 * rate / (2 * torch.pi)  # in the length that it was trained with first
    share = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return rate * (share + (1 - share) / factor)


def _taken(rank: Tensors, prefix: str) -> Tensors:
    return {name[len(prefix) :]: rank.pop(name) for name in [*rank] if name.startswith(prefix)}


def _bias(parts: list[Tensors], name: str) -> torch.Tensor | float:
    """A bias of a row-parallel layer, which every rank holds and the sum gets once."""
    found = [part[name] for part in parts if name in part]
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0] if found else 0.0
