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
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in flat.items()}
        self.parameters = {
            name: value.view(self._shape(name)).requires_grad_()
            for name, value in values.items()
            if not name.endswith(("router.load", "router.bias"))
        }
        # The state of routers: choices of the step before, and biases; by layer.
        self.loads = _states(values, "load")
        self.biases = _states(values, "bias")
        self._choices: dict[int, torch.Tensor] = {}
        self._balance = self._router_z = torch.zeros((), dtype=torch.float64)

    def loss(self, batches: Sequence[Arrays]) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy, mean z-loss) over all samples of a global batch, each array [S]."""
        weight = sum(float(batch["loss_weight"].sum()) for batch in batches)
        entropy, z = torch.zeros(2, dtype=torch.float64)
        self._balance = self._router_z = torch.zeros((), dtype=torch.float64)
        self._choices = {layer: torch.zeros_like(load) for layer, load in self.loads.items()}
        for batch in batches:
            logits = self._logits(batch)
            log_z = torch.logsumexp(logits, -1)
            w = torch.tensor(batch["loss_weight"], dtype=torch.float64)
            chosen = logits[torch.arange(len(w)), torch.tensor(batch["targets"])]
            entropy = entropy + (w * (log_z - chosen)).sum()
            z = z + self._config.loss.z_loss * (w * log_z**2).sum()
        self._balance, self._router_z = self._balance / weight, self._router_z / weight
        return entropy / weight, z / weight

    @property
    def auxiliary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(balance, z-loss of the routers) of the last :meth:`loss`, means over its tokens."""
        return self._balance, self._router_z

    def move_routers(self) -> None:
        """Give the routers the state that follows from the choices of the last :meth:`loss`."""
        for layer, choices in self._choices.items():
            self.loads[layer] = choices
            if layer in self.biases:
                excess = choices - choices.mean()
                self.biases[layer] -= self._config.model.experts.bias_rate * torch.sign(excess)

    def _shape(self, name: str) -> tuple[int, ...]:
        model = self._config.model
        if name.endswith("experts_in.weight"):
            return (model.experts.count, 2 * model.expert_width, model.hidden_size)
        if name.endswith("experts_out.weight"):
            return (model.experts.count, model.hidden_size, model.expert_width)
        return (-1, model.hidden_size) if _is_matrix(name) else (-1,)

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
                normed = self._norm(x, name + "ffn_norm")
                x = x + (
                    self._experts(normed, n, batch)
                    if model.has_experts(n)
                    else self._ffn(normed, name)
                )
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

    def _experts(self, x: torch.Tensor, layer: int, batch: Arrays) -> torch.Tensor:
        """A loop over tokens and their experts; adds to the auxiliary losses and choices."""
        settings, loss, p = self._config.model.experts, self._config.loss, self.parameters
        name, length = f"layers.{layer}.", x.shape[0]
        logits = x @ p[name + "router.weight"].T
        scores = logits.softmax(-1) if settings.score == "softmax" else logits.sigmoid()
        key = scores.detach() + self.biases.get(layer, 0.0)
        rows = []
        for token in range(length):
            own = key[token].clone()
            if settings.groups > 1:
                sums = own.view(settings.groups, -1).sort(-1, descending=True).values[:, :2].sum(-1)
                kept = sums.sort(descending=True, stable=True).indices[: settings.groups_kept]
                for group in set(range(settings.groups)) - set(kept.tolist()):
                    own.view(settings.groups, -1)[group] = -math.inf
            chosen = own.sort(descending=True, stable=True).indices[: settings.top_k]
            self._choices[layer][chosen] += 1
            weights = scores[token, chosen]
            if settings.normalise:
                weights = weights / weights.sum()
            total = torch.zeros_like(x[token])
            for weight, expert in zip(weights * settings.scale, chosen, strict=True):
                gate, up = (p[name + "experts_in.weight"][expert] @ x[token]).chunk(2)
                inner = gate * torch.sigmoid(gate) * up
                total = total + weight * (p[name + "experts_out.weight"][expert] @ inner)
            rows.append((total, chosen))
        counts = torch.zeros_like(key[0])
        for _, chosen in rows:
            counts[chosen] += 1
        even = length * settings.top_k / settings.count
        load = self.loads[layer]
        whole = load / load.mean() if load.sum() > 0 else torch.ones_like(load)
        shares = loss.sequence_balance * counts / even + loss.global_balance * whole
        means = (scores / scores.sum(-1, keepdim=True)).mean(0)
        w = float(batch["loss_weight"].sum())
        self._balance = self._balance + w * (shares * means).sum()
        z = logits.logsumexp(-1).square().mean()
        self._router_z = self._router_z + w * loss.router_z_loss * z
        y = torch.stack([row for row, _ in rows])
        if settings.shared_ffn_size:
            gate, up = self._in(x, name + "shared_gate"), self._in(x, name + "shared_up")
            y = y + self._out(gate * torch.sigmoid(gate) * up, name + "shared_out")
        return y

    def _attention(self, x: torch.Tensor, name: str, batch: Arrays) -> torch.Tensor:
        model = self._config.model
        window = model.window_of(int(name.split(".")[1]))
        d, size = model.head_size, x.shape[0]
        query, key = np.arange(size)[:, None], np.arange(size)[None, :]
        seen = (key <= query) & (key >= batch["document_start"][:, None])
        if window:
            seen &= key > query - window
        q, k, v = (self._in(x, name + part) for part in "qkv")
        if model.qk_norm and model.qk_norm_over == "projection":
            q, k = self._rms_norm(q, name + "q_norm"), self._rms_norm(k, name + "k_norm")
        heads = []
        for head in range(model.heads):
            group = head // (model.heads // model.key_value_heads)
            own, shared = slice(head * d, (head + 1) * d), slice(group * d, (group + 1) * d)
            query_head, key_head = q[:, own], k[:, shared]
            if model.qk_norm and model.qk_norm_over == "heads":
                query_head = self._rms_norm(query_head, name + "q_norm")
                key_head = self._rms_norm(key_head, name + "k_norm")
            scores = self._turn(query_head, batch) @ self._turn(key_head, batch).T / math.sqrt(d)
            weights = scores.masked_fill(~torch.tensor(seen), -math.inf).softmax(-1)
            heads.append(weights @ v[:, shared])
        return self._out(torch.cat(heads, -1), name + "attention_out")

    def _rms_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size = (x.square().mean(-1, keepdim=True) + self._config.model.norm_epsilon).sqrt()
        return x / size * self.parameters[name + ".weight"]

    def _turn(self, x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        model = self._config.model
        if model.positions != "rope":
            return x
        half = model.head_size // 2
        frequency = torch.tensor(
            [self._frequency(pair, model.rope_theta ** (-pair / half)) for pair in range(half)],
            dtype=torch.float64,
        )
        angle = torch.tensor(batch["position"])[:, None] * frequency
        size = torch.full_like(angle, self._rotated_size())
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(size, angle)
        return torch.cat((turned.real, turned.imag), -1)

    def _rotated_size(self) -> float:
        """What rotation multiplies a head by: YaRN's temperature, of the scores, as its root."""
        scaling = self._config.model.rope_scaling
        if scaling.kind != "yarn":
            return 1.0
        return scaling.attention_factor or 1 + math.log(scaling.factor) / 10

    def _frequency(self, pair: int, plain: float) -> float:
        """One rotary frequency, as Meta's code for Llama 3.1 and that of YaRN's authors do it."""
        scaling = self._config.model.rope_scaling
        if scaling.kind == "none":
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        length, wavelength = scaling.original_sequence_length, 2 * math.pi / plain
        if scaling.kind == "yarn":
            # The (broken) number of the pair that turns so often, in whole pairs.
            spacing = math.log(self._config.model.rope_theta) / (self._config.model.head_size / 2)
            fast, slow = (
                math.log(length / (2 * math.pi * turns)) / spacing
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            first = max(0, math.floor(fast))
            share = min(1.0, max(0.0, (pair - first) / (math.ceil(slow) - first)))
            return plain * (share / scaling.factor + 1 - share)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        if wavelength < length / high:
            return plain
        if wavelength > length / low:
            return plain / scaling.factor
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * plain / scaling.factor + smooth * plain


def _states(values: dict[str, torch.Tensor], kind: str) -> dict[int, torch.Tensor]:
    suffix = f".router.{kind}"
    return {
        int(name.split(".")[1]): value.clone()
        for name, value in values.items()
        if name.endswith(suffix)
    }


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name
