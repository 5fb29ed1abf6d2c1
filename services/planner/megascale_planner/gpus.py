"""What a GPU and its links can do: datasheet values, and rates measured on large transfers.

A calibration file (:mod:`megascale_planner.calibration_file`) replaces the rates by those
that were measured on the reader's own devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of device.

    Attributes:
        peak_flops, peak_fp8_flops: dense, in FLOP/s; fp8 0: the device has none.
        gemm_share, gemm_fp8_share: of the peak that a large GEMM sustains while training.
        attention_share: of the peak that causal attention of long sequences reaches.
        hbm_bytes_s: what an elementwise kernel reaches.
        node_bytes_s: bus bandwidth of a collective inside a node, per device and direction.
        network_bytes_s: bus bandwidth between nodes, per device and direction.
        sources: where each rate is from.
    """

    name: str
    peak_flops: float
    peak_fp8_flops: float
    memory_bytes: float
    gemm_share: float
    gemm_fp8_share: float
    attention_share: float
    hbm_bytes_s: float
    node_bytes_s: float
    network_bytes_s: float
    devices_per_node: int = 8
    sources: tuple[tuple[str, str], ...] = ()


_A100_SOURCES = (
    ("peak_flops", "NVIDIA A100 80GB SXM data sheet, dense bf16"),
    (
        "gemm_share",
        "assumed: 0.85 for large products; a system's kernel_share is fitted on top of it",
    ),
    ("attention_share", "FlashAttention-2 on A100 reaches 50 to 73 % (arXiv 2307.08691, abstract)"),
    ("hbm_bytes_s", "assumed: 0.85 of the data sheet's 2,039 GB/s"),
    ("node_bytes_s", "assumed: 77 % of NVLink 3's 300 GB/s a direction"),
    ("network_bytes_s", "assumed: 90 % of one 200 Gbit/s NIC a device"),
)
_HOPPER_SOURCES = (
    ("peak_flops", "NVIDIA H100 and H200 SXM data sheets, dense bf16; FP8 twice that"),
    (
        "gemm_share",
        "8192^3 in training on H200: 772 TFLOP/s of 989 (benchmarks/results, 2026-11-21)",
    ),
    ("gemm_fp8_share", "1,370 to 1,540 of 1,979 TFLOP/s (benchmarks/results, 2026-11-22, FP8)"),
    ("attention_share", "cuDNN at sequences of 2,048 to 8,192 on H200, both directions together"),
    ("hbm_bytes_s", "copies on H200: 4.09 of 4.8 TB/s; on H100 the same share of 3.35 TB/s"),
    ("node_bytes_s", "NCCL on 8 H200, 64 to 256 MB: 241 to 325 GB/s; the middle"),
    ("network_bytes_s", "assumed: 90 % of one 400 Gbit/s NIC a device"),
)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100-80g",
            peak_flops=312e12,
            peak_fp8_flops=0.0,
            memory_bytes=80 * 2**30,
            gemm_share=0.85,
            gemm_fp8_share=0.0,
            attention_share=0.60,
            hbm_bytes_s=0.85 * 2.039e12,
            node_bytes_s=230e9,
            network_bytes_s=22.5e9,
            sources=_A100_SOURCES,
        ),
        Gpu(
            name="h100",
            peak_flops=989.5e12,
            peak_fp8_flops=1979e12,
            memory_bytes=80 * 2**30,
            gemm_share=0.78,
            gemm_fp8_share=0.74,
            attention_share=0.60,
            hbm_bytes_s=0.85 * 3.35e12,
            node_bytes_s=290e9,
            network_bytes_s=45e9,
            sources=_HOPPER_SOURCES,
        ),
        Gpu(
            name="h200",
            peak_flops=989.5e12,
            peak_fp8_flops=1979e12,
            memory_bytes=141e9,
            gemm_share=0.78,
            gemm_fp8_share=0.74,
            attention_share=0.60,
            hbm_bytes_s=4.09e12,
            node_bytes_s=290e9,
            network_bytes_s=45e9,
            sources=_HOPPER_SOURCES,
        ),
    )
}
