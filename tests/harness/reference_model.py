"""The decoder written down a second time, in float64 with ordinary autograd.

The trainer is compared with it.

It shares no code with the trainer: whole logical parameters by name, loops over heads' groups,
dense masks. Only the storage order of output projections, [in, out], is taken over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megascale_job.config import JobConfig

Arrays = Mapping[str, np.ndarray[Any, Any]]


class ReferenceModel:
    """Parameters by logical name, float64, from flattened values; losses are sums."""

    def __init__(self, config: JobConfig, flat: Arrays) -> None:
        self._config = config
        h = config.model.hidden_size
        self.parameters = {
            name: torch.tensor(value, dtype=torch.float64)
            .view((-1, h) if _is_matrix(name) else (-1,))
            .requires_grad_()
            for name, value in flat.items()
        }

    def loss(self, batches: Sequence[Arrays]) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy, mean z-loss) over all samples of a global batch, each array [S]."""
        weight = sum(float(batch["loss_weight"].sum()) for batch in batches)
        entropy, z = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            logits = self._logits(batch)
            log_z = torch.logsumexp(logits, -1)
            w = torch.tensor(batch["loss_weight"], dtype=torch.float64)
            chosen = logits[torch.arange(len(w)), torch.tensor(batch["targets"])]
            entropy = entropy + (w * (log_z - chosen)).sum()
            z = z + self._config.loss.z_loss * (w * log_z**2).sum()
        return entropy / weight, z / weight

    def _logits(self, batch: Arrays) -> torch.Tensor:
        model, p = self._config.model, self.parameters
        x = p["embedding.weight"][torch.tensor(batch["tokens"])]
        if model.positions == "learned":
            x = x + p["positions.weight"][torch.tensor(batch["position"])]
        for n in range(model.layers):
            name = f"layers.{n}."
            if model.block == "parallel":
                normed = self._norm(x, name + "norm")
                x = x + self._attention(normed, name, batch) + self._ffn(normed, name)
            else:
                x = x + self._attention(self._norm(x, name + "attention_norm"), name, batch)
                x = x + self._ffn(self._norm(x, name + "ffn_norm"), name)
        head = p["embedding.weight" if model.tie_embeddings else "head.weight"]
        return self._norm(x, "final_norm") @ head.T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        model, p = self._config.model, self.parameters
        if model.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        y = (
            x
            / (x.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
            * p[name + ".weight"]
        )
        return y + p.get(name + ".bias", 0.0)

    def _in(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.parameters[name + ".weight"].T + self.parameters.get(name + ".bias", 0.0)

    def _out(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.parameters[name + ".weight"] + self.parameters.get(name + ".bias", 0.0)

    def _ffn(self, x: torch.Tensor, name: str) -> torch.Tensor:
        up = self._in(x, name + "up")
        if self._config.model.mlp == "swiglu":
            gate = self._in(x, name + "gate")
            return self._out(gate * torch.sigmoid(gate) * up, name + "ffn_out")
        return self._out(
            0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))),
            name + "ffn_out",
        )

    def _attention(self, x: torch.Tensor, name: str, batch: Arrays) -> torch.Tensor:
        model = self._config.model
        window = model.window_of(int(name.split(".")[1]))
        d, size = model.head_size, x.shape[0]
        query, key = np.arange(size)[:, None], np.arange(size)[None, :]
        seen = (key <= query) & (key >= batch["document_start"][:, None])
        if window:
            seen &= key > query - window
        q, k, v = (self._in(x, name + part) for part in "qkv")
        heads = []
        for head in range(model.heads):
            group = head // (model.heads // model.key_value_heads)
            own, shared = slice(head * d, (head + 1) * d), slice(group * d, (group + 1) * d)
            query_head, key_head = q[:, own], k[:, shared]
            if model.qk_norm:
                query_head = self._head_norm(query_head, name + "q_norm")
                key_head = self._head_norm(key_head, name + "k_norm")
            scores = self._turn(query_head, batch) @ self._turn(key_head, batch).T / math.sqrt(d)
            weights = scores.masked_fill(~torch.tensor(seen), -math.inf).softmax(-1)
            heads.append(weights @ v[:, shared])
        return self._out(torch.cat(heads, -1), name + "attention_out")

    def _head_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size = (x.square().mean(-1, keepdim=True) + self._config.model.norm_epsilon).sqrt()
        return x / size * self.parameters[name + ".weight"]

    def _turn(self, x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        model = self._config.model
        if model.positions != "rope":
            return x
        half = model.head_size // 2
        frequency = torch.tensor(
            [self._frequency(model.rope_theta ** (-pair / half)) for pair in range(half)],
            dtype=torch.float64,
        )
        angle = torch.tensor(batch["position"])[:, None] * frequency
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat((turned.real, turned.imag), -1)

    def _frequency(self, plain: float) -> float:
        """One rotary frequency, as Meta's code for Llama 3.1 computes it."""
        scaling = self._config.model.rope_scaling
        if scaling.kind == "none":
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        length, wavelength = scaling.original_sequence_length, 2 * math.pi / plain
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        if wavelength < length / high:
            return plain
        if wavelength > length / low:
            return plain / scaling.factor
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * plain / scaling.factor + smooth * plain


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name
