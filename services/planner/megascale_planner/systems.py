"""Training systems: a few constants each, on top of the devices' rates, with their sources.

``kernel_share`` is fitted; all other constants are properties of the software that its paper or
code states. No constant is fitted to a single row: docs/planner.md lists the rows behind each
constant and the error on held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One training system.

    Attributes:
        kernel_share: share of the devices' rates (GEMM, attention, memory) that its kernels reach.
        block, window, recompute: defaults for rows that do not state them; window 0: none.
        flash: attention without stored scores.
        sequence_parallel: norms and dropout are split over the tensor-parallel group.
        selective_splits: without ``sequence_parallel``, they are split under selective recompute,
            because both came with one release (arXiv 2205.05198).
        dropout: masks are written, read and kept.
        merged: a parallel block computes its two inputs, and its two outputs, as one GEMM each.
        hidden_tp, hidden_pp, hidden_dp: shares of communication hidden under computation. With
            ``chunked_dp`` 1 / (2 vpp) of data-parallel communication is exposed instead.
        gradient_bytes, gather_bytes: bytes moved per parameter by the reduction and the
            all-gather, in passes of a ring (an all-reduce counts twice).
        sharded_optimizer: states are split over the data-parallel group.
        lost_interleaving: share of the bubble that interleaving should save, but does not.
        fixed_s: data, launches and host work per step.
        slow_nodes, slowdown: share of slow nodes, and the part of a step by which they are slower;
            a step waits for the slowest node of the run.
        tied: embedding and head are one parameter.
        logit_bytes: bytes kept per logit.
        fp8_sums: time of a layer's FP8 products, relative to that with fast sums for all of them
            (in fewer bits than float32).
        counted_kept: activations are counted as in this project's trainer, with peer memory.
        dispatch: how tokens travel to experts, see Note [Copies of a token] in
            :mod:`megascale_planner.experts`: rows or tokens.
        hidden_ep: share of dispatch and combine hidden under computation.
        exchange_latency_s: of one way, on top of its bytes: counts, metadata, waiting for peers.
        row_moves: time of router and permutation, relative to their bytes at the rate of a copy.
        sequence_attention: attention is split over tp by the sequence, with all-to-all (Ulysses),
            instead of by heads: its collectives move (2 + 2 kv_heads / heads) / tp of the bytes.
        launch_s: of a layer with experts and a micro-batch: the device waits for the host.
        experts_error: added to ``error`` for models with experts.
        error: half-width of the interval, relative: the error on held-out rows, rounded up.
    """

    name: str
    kernel_share: float
    block: str
    window: int
    recompute: str
    flash: bool
    sequence_parallel: bool
    dropout: bool
    merged: bool
    hidden_tp: float
    hidden_pp: float
    hidden_dp: float
    chunked_dp: bool
    gradient_bytes: float
    gather_bytes: float
    sharded_optimizer: bool
    lost_interleaving: float
    fixed_s: float
    slow_nodes: float
    slowdown: float
    selective_splits: bool = False
    tied: bool = True
    logit_bytes: float = 4.0
    fp8_sums: float = 1.0
    counted_kept: bool = False
    dispatch: str = "rows"
    hidden_ep: float = 0.0
    exchange_latency_s: float = 15e-6
    row_moves: float = 1.0
    sequence_attention: bool = False
    launch_s: float = 0.0
    experts_error: float = 0.1
    error: float
    sources: tuple[tuple[str, str], ...]


_FITTED = "kernel_share"
_PASSES = "gradient_bytes"
_STRAGGLERS = (
    ("slow_nodes", "arXiv 2402.15627, section 5.1: about 0.5 % of machines are slow"),
    ("slowdown", "assumed: 3 % once the machines that are 10 % slow (section 5.1) are removed"),
)
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            name="megatron-lm-2021",
            kernel_share=0.93,
            block="serial",
            window=0,
            recompute="full",
            flash=False,
            sequence_parallel=False,
            dropout=True,
            merged=False,
            hidden_tp=0.0,
            hidden_pp=0.0,
            hidden_dp=0.0,
            chunked_dp=False,
            gradient_bytes=4.0,
            gather_bytes=0.0,
            sharded_optimizer=False,
            lost_interleaving=1.0,
            fixed_s=0.02,
            slow_nodes=0.005,
            slowdown=0.03,
            selective_splits=True,
            error=0.06,
            sources=(
                (_FITTED, "one value for arXiv 2104.04473, Table 1, rows of 1.7B to 39.1B"),
                ("hidden_tp", "no overlap in arXiv 2104.04473"),
                (_PASSES, "all-reduce of fp16 gradients, two passes of 2 bytes"),
                ("lost_interleaving", "as megatron-lm-2023"),
                ("fixed_s", "assumed: 20 ms of data and launches"),
                *_STRAGGLERS,
            ),
        ),
        System(
            name="megatron-lm-2023",
            kernel_share=0.98,
            block="serial",
            window=0,
            recompute="selective",
            flash=False,
            sequence_parallel=True,
            dropout=True,
            merged=False,
            hidden_tp=0.0,
            hidden_pp=0.0,
            hidden_dp=0.0,
            chunked_dp=False,
            gradient_bytes=8.0,
            gather_bytes=0.0,
            sharded_optimizer=False,
            lost_interleaving=1.0,
            fixed_s=0.1,
            slow_nodes=0.005,
            slowdown=0.03,
            error=0.06,
            sources=(
                (_FITTED, "one value for arXiv 2402.15627, Table 2, Megatron-LM, 256 to 1,024"),
                ("recompute", "arXiv 2205.05198: sequence parallelism with selective recompute"),
                ("hidden_tp", "arXiv 2402.15627, section 3.2: the baseline overlaps nothing"),
                (_PASSES, "all-reduce of float32 gradients, two passes of 4 bytes"),
                ("lost_interleaving", "same rows: m + p - 1 slots fit 256 to 1,024 devices"),
                ("fixed_s", "assumed: 0.1 s of data, launches and host work"),
                *_STRAGGLERS,
            ),
        ),
        System(
            name="megascale",
            kernel_share=0.96,
            block="parallel",
            window=1152,
            recompute="none",
            flash=True,
            sequence_parallel=True,
            dropout=False,
            merged=True,
            hidden_tp=0.7,
            hidden_pp=0.9,
            hidden_dp=0.0,
            chunked_dp=True,
            gradient_bytes=4.0,
            gather_bytes=2.0,
            sharded_optimizer=True,
            lost_interleaving=1.0,
            fixed_s=0.1,
            slow_nodes=0.005,
            slowdown=0.03,
            error=0.07,
            sources=(
                (_FITTED, "one value for arXiv 2402.15627, Table 2, MegaScale, 256 to 1,024"),
                ("window", "not published; its MFU counts 1 % less than full attention: 1,152"),
                ("hidden_tp", "assumed; Table 3 gains 0.52 s of about 1.4 s and half is merged"),
                ("hidden_pp", "assumed: section 3.2 hides all transfers but those of the ends"),
                ("chunked_dp", "section 3.2: 1 / (2 vpp) of data-parallel transfers are exposed"),
                ("lost_interleaving", "as megatron-lm-2023: m + p - 1 slots fit the same rows"),
                ("fixed_s", "assumed: 0.1 s of data, launches and host work"),
                *_STRAGGLERS,
            ),
        ),
        System(
            name="megatron-core-2024",
            kernel_share=0.75,
            block="serial",
            window=0,
            recompute="none",
            flash=True,
            sequence_parallel=True,
            dropout=False,
            merged=False,
            hidden_tp=0.7,
            hidden_pp=0.8,
            hidden_dp=0.9,
            chunked_dp=False,
            gradient_bytes=4.0,
            gather_bytes=2.0,
            sharded_optimizer=True,
            lost_interleaving=0.0,
            fixed_s=0.05,
            slow_nodes=0.005,
            slowdown=0.03,
            error=0.12,
            sources=(
                (_FITTED, "Megatron-LM README of core_r0.8.0: 175B, 96 to 4,608 H100, 47 to 42 %"),
                ("hidden_tp", "assumed under --tp-comm-overlap, which that README switches on"),
                ("hidden_dp", "same rows, with --overlap-grad-reduce and --overlap-param-gather"),
                ("lost_interleaving", "its transfers between stages are overlapped by default"),
                ("fixed_s", "assumed: 50 ms of data, launches and host work"),
                *_STRAGGLERS,
            ),
        ),
        System(
            name="megatron-moe-2026",
            kernel_share=0.92,
            block="serial",
            window=0,
            recompute="none",
            flash=True,
            sequence_parallel=True,
            dropout=False,
            merged=False,
            hidden_tp=0.0,
            hidden_pp=0.8,
            hidden_dp=0.9,
            chunked_dp=False,
            gradient_bytes=4.0,
            gather_bytes=2.0,
            sharded_optimizer=True,
            lost_interleaving=0.0,
            fixed_s=0.02,
            slow_nodes=0.005,
            slowdown=0.03,
            dispatch="tokens",
            hidden_ep=0.37,
            row_moves=4.0,
            experts_error=0.0,
            error=0.16,
            sources=(
                (_FITTED, "one value for two rows of Megatron-core 0.16.1 on one H200, 2026-11-29"),
                ("row_moves", "traces of the same: 3.9 and 4.0 at 16,384 and 32,768 tokens"),
                ("dispatch", "DeepEP and HybridEP; all-to-all sends rows"),
                ("hidden_ep", "Megatron-Bridge, trace of Qwen3-30B-A3B on 16 H100: 36.55 %"),
                (
                    "launch_s",
                    "0 with the router in CUDA graphs; else 1.05 ms (docs/planner.md)",
                ),
                ("hidden_tp", "Megatron-Bridge's recipe of Qwen3-235B: tp_comm_overlap is off"),
                ("lost_interleaving", "as megatron-core-2024"),
                ("fixed_s", "assumed: 20 ms of data, launches and host work"),
                *_STRAGGLERS,
            ),
        ),
        System(
            name="megascale-moe",
            kernel_share=0.67,
            block="serial",
            window=0,
            recompute="none",
            flash=True,
            sequence_parallel=True,
            dropout=False,
            merged=False,
            hidden_tp=0.8,
            hidden_pp=0.9,
            hidden_dp=0.0,
            chunked_dp=True,
            gradient_bytes=2.0,
            gather_bytes=2.0,
            sharded_optimizer=True,
            lost_interleaving=0.0,
            fixed_s=0.1,
            slow_nodes=0.005,
            slowdown=0.03,
            hidden_ep=0.8,
            sequence_attention=True,
            experts_error=0.0,
            error=0.06,
            sources=(
                (_FITTED, "one value for arXiv 2505.11432, Table 3, MegaScale-MoE, 240 to 960"),
                ("hidden_ep", "assumed: section 4 overlaps inside and between operators"),
                ("hidden_tp", "as hidden_ep"),
                ("hidden_pp", "as megascale: section 6.1 takes its overlap of pp and dp over"),
                (_PASSES, "section 5: gradients travel in bf16"),
                ("lost_interleaving", "assumed; vpp is not published, 2 in the rows"),
                ("fixed_s", "assumed: 0.1 s of data, launches and host work"),
                *_STRAGGLERS,
            ),
        ),
        System(
            name="ours",
            kernel_share=0.938,
            block="parallel",
            window=0,
            recompute="none",
            flash=True,
            sequence_parallel=True,
            dropout=False,
            merged=True,
            hidden_tp=0.75,
            hidden_pp=0.8,
            hidden_dp=0.8,
            chunked_dp=False,
            gradient_bytes=4.0,
            gather_bytes=2.0,
            sharded_optimizer=True,
            lost_interleaving=0.3,
            fixed_s=0.02,
            slow_nodes=0.005,
            slowdown=0.03,
            tied=False,
            logit_bytes=2.0,
            fp8_sums=1.0125,
            counted_kept=True,
            error=0.06,
            sources=(
                (_FITTED, "one value for the rows on 2 H200s, benchmarks/results, 2026-11-21"),
                ("hidden_tp", "assumed; measured on 2 H200s: at most 0.7 % of a step exposed"),
                ("hidden_dp", "assumed; overlap.dp brought 1.6 to 2.0 % on 2 H200s"),
                ("lost_interleaving", "assumed; a row of PP2 VPP2 on 2 H200s agrees within 1 %"),
                ("fixed_s", "idle and host time of a traced step on 2 H200s: 13 to 20 ms"),
                ("fp8_sums", "6 % of gradients in float32, on 2 H200s; others in proportion"),
                ("hidden_ep", "the all-to-all of rows runs by itself; not measured on devices"),
                *_STRAGGLERS,
            ),
        ),
    )
}
