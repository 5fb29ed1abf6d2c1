"""FLOPs per token, MFU by two counts, the pipeline's bubble, and scaled batches. Pure.

Published figures use two counts of attention, so both are always given: *exact* counts the scores
that the causal mask or window leaves, *full* counts every pair of tokens. For a parallel or serial
GELU model with f = 4 h and as many key/value heads as heads, *full* is 72 L h^2 (1 + s / 6h + V /
12hL) per token (Narayanan et al., arXiv 2104.04473, without recomputation). A multiply-add is two
operations; backward costs twice as much as forward. Of experts only those that a token chooses are
counted, so the MFU of a model with experts is that of its active parameters. Norms, activations,
padding, recomputed work and the shortening of attention by document boundaries are not counted.

:func:`ideal_bubble` is the waiting time of a pipeline stage if transfers take no time.
:func:`scaled_batch` changes the fields of a LAMB job with the size of the batch, so that the run
sees the same tokens. Source: You et al., arXiv 1904.00962, section 4 and Table 4 (BERT at batches
of 512 to 32,768): the learning rate grows with the square root of the batch, and the share of
warm-up steps with the batch itself ("linear-epoch warmup"), which at a fixed number of samples
leaves the number of warm-up steps unchanged. These are rules of thumb: the paper's rates were not
tuned per batch, and tuning yours may help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale_job.blocks.ends import head_unit
from megascale_job.blocks.layer import layer_units
from megascale_job.config import JobConfig, ModelConfig
from megascale_job.sizes.parameter_table import parameter_counts

_OF_EXPERTS = (".experts_in.weight", ".experts_out.weight")
_FORWARD_AND_BACKWARD = 3
_MULTIPLY_ADD = 2

# Dense bf16 peak of one device in FLOP/s, by part of the name that CUDA reports (NVIDIA data
# sheets, without sparsity).
_PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
)


@dataclass(frozen=True, slots=True)
class FlopsPerToken:
    """Training FLOPs (forward and backward) per token, in GEMMs and in attention.

    Attention is counted twice: exactly masked, and in full.
    """

    gemm: float
    attention_exact: float
    attention_full: float

    @property
    def exact(self) -> float:
        """GEMMs and the attention that the mask leaves."""
        return self.gemm + self.attention_exact

    @property
    def full(self) -> float:
        """GEMMs and attention between every pair of tokens."""
        return self.gemm + self.attention_full


@dataclass(frozen=True, slots=True)
class Mfu:
    """Share of the devices' dense bf16 peak that the model's own FLOPs reach, 0 to 1.

    For a model with experts the FLOPs are those of its active parameters.
    """

    exact: float
    full: float


def flops_per_token(model: ModelConfig) -> FlopsPerToken:
    """FLOPs per token of ``model`` at its full sequence length."""
    layers = layer_units(model)
    weights = sum(
        operator.gemm_weights for unit in (*layers, head_unit(model)) for operator in unit
    )
    # one multiply-add each for the score and for the weighted value, per query column
    per_key = 2 * sum(operator.attention_width for operator in layers[0])
    cost = _FORWARD_AND_BACKWARD * _MULTIPLY_ADD
    return FlopsPerToken(
        gemm=float(cost * weights),
        attention_exact=cost
        * per_key
        * sum(
            mean_keys(model.sequence_length, model.window_of(layer))
            for layer in range(model.layers)
        ),
        attention_full=float(cost * model.layers * per_key * model.sequence_length),
    )


def active_parameters(config: JobConfig) -> int:
    """Parameters that one token meets: all but the experts that it does not choose."""
    experts = config.model.experts
    return sum(
        size * experts.top_k // experts.count if name.endswith(_OF_EXPERTS) else size
        for name, size in parameter_counts(config).items()
        if not name.endswith(".router.load")  # counts of choices, no parameters
    )


def mean_keys(sequence: int, window: int) -> float:
    """Mean number of keys per query under a causal mask with ``window`` (0: none)."""
    width = min(window, sequence) if window else sequence
    return width * (2 * sequence - width + 1) / (2 * sequence)


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bf16 peak of one device in FLOP/s; None if unknown, as for a CPU (then no MFU)."""
    return next((peak for part, peak in _PEAK_BF16_FLOPS if part in device_name), None)


def mfu(model: ModelConfig, tokens_per_s: float, devices: int, device_name: str) -> Mfu | None:
    """MFU of ``devices`` that together train ``tokens_per_s``; None without a known peak."""
    peak = peak_bf16_flops(device_name)
    if peak is None:
        return None
    flops = flops_per_token(model)
    share = tokens_per_s / (devices * peak)
    return Mfu(flops.exact * share, flops.full * share)


def ideal_bubble(config: JobConfig) -> float:
    """(p - 1) / (v m): a stage's waiting time over its computing time; 0 without a pipeline.

    The formula is that of Narayanan et al., arXiv 2104.04473, section 2.2, for p stages, v virtual
    stages on each and m micro-batches. Zero bubble leaves a third of it if forward, input gradients
    and weight gradients take equally long (Qi et al., arXiv 2401.10241, section 2.3).
    """
    parallel = config.parallelism
    slots: float = parallel.pp - 1
    if parallel.pipeline_schedule == "zero_bubble":
        slots /= 3
    return slots / (parallel.virtual_stages * config.micro_batches)


@dataclass(frozen=True, slots=True)
class ScaledBatch:
    """Fields of ``training``, ``optimizer`` and ``schedule`` for another batch."""

    global_batch_size: int
    steps: int
    learning_rate: float
    warmup_steps: int


def scaled_batch(config: JobConfig, factor: float) -> ScaledBatch:
    """The fields of ``config``, a job that trains with LAMB, at ``factor`` times its batch.

    Steps are rounded up, so that no sample is left out; the batch is a multiple of micro_batch_size
    * dp. Warm-up never exceeds the run.

    Raises:
        ValueError: ``factor`` is not a positive finite number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"factor: {factor} is not a positive number: give 4 for 4 times the batch")
    training = config.training
    unit = training.micro_batch_size * config.parallelism.dp
    batch = max(1, round(training.global_batch_size * factor / unit)) * unit
    ratio = batch / training.global_batch_size
    steps = -(-training.steps * training.global_batch_size // batch)
    return ScaledBatch(
        batch,
        steps,
        config.optimizer.learning_rate * math.sqrt(ratio),
        min(config.schedule.warmup_steps, steps),
    )
