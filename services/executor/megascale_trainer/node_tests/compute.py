"""Node tests of one device at a time: GEMM rates, memory bandwidth, and a bitwise hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch

from megascale_job.visible import counted
from megascale_trainer.node_tests.measurement import Measured, device_of, median_s

# m, n, k: square, a projection of many tokens, and one with a long inner dimension.
CUDA_SHAPES = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 4096, 16384))
CPU_SHAPES = ((512, 512, 512), (1024, 256, 256), (256, 256, 1024))
CUDA_COPY_BYTES, CPU_COPY_BYTES = 1 << 30, 64 << 20
BITWISE_REPEATS = 3
_SEED = 20240215


def gemm(kind: str, devices: Sequence[int], budget_s: float) -> list[Measured]:
    """TFLOP/s of three shapes per device: bf16 on GPUs, fp32 on CPUs; a product has 2mnk FLOPs."""
    shapes = CUDA_SHAPES if kind == "cuda" else CPU_SHAPES
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    each_s = budget_s / (len(shapes) * len(devices))
    found = []
    for index in devices:
        device = device_of(kind, index)
        for m, n, k in shapes:
            a = torch.randn(m, k, device=device, dtype=dtype)
            b = torch.randn(k, n, device=device, dtype=dtype)
            out = torch.empty(m, n, device=device, dtype=dtype)
            elapsed_s = median_s(partial(torch.mm, a, b, out=out), device, each_s)
            rate = 2 * m * n * k / elapsed_s / 1e12
            shape = f"{m}x{n}x{k}"
            found.append(
                Measured(
                    target=f"{kind}:{index}",
                    value=rate,
                    unit="TFLOP/s",
                    target_class=shape,
                    detail=f"{shape} {str(dtype).removeprefix('torch.')}",
                )
            )
    return found


def memory_bandwidth(kind: str, devices: Sequence[int], budget_s: float) -> list[Measured]:
    """GB/s of a copy within the device's memory; bytes read and bytes written both count."""
    size = CUDA_COPY_BYTES if kind == "cuda" else CPU_COPY_BYTES
    found = []
    for index in devices:
        device = device_of(kind, index)
        source = torch.ones(size // 4, device=device, dtype=torch.float32)
        target = torch.empty_like(source)
        elapsed_s = median_s(
            partial(target.copy_, source),
            device,
            budget_s / len(devices),
        )
        wrong = "" if bool((target == 1).all()) else "the copy differs from its source"
        found.append(
            Measured(
                target=f"{kind}:{index}",
                value=2 * size / elapsed_s / 1e9,
                unit="GB/s",
                detail=f"copy of {size >> 20} MiB",
                wrong=wrong,
            )
        )
    return found


def bitwise(kind: str, devices: Sequence[int], budget_s: float) -> list[Measured]:
    """Gradients of two layers from fixed weights and input, hashed, three times per device.

    Hashes that vary on one device show transient silent corruption. A hash that differs from the
    node's other devices shows a persistent error; the driver compares nodes.
    """
    if kind == "cuda":  # on CPUs these operators are deterministic; the call imports 900 modules
        torch.use_deterministic_algorithms(mode=True)
    hashes: dict[int, list[str]] = {
        index: [gradient_hash(device_of(kind, index)) for _ in range(BITWISE_REPEATS)]
        for index in devices
    }
    return compare_hashes(kind, hashes)


def compare_hashes(kind: str, hashes: dict[int, list[str]]) -> list[Measured]:
    """Compare each device's hashes with each other, and with the node's majority."""
    steady = [found[0] for found in hashes.values() if len(set(found)) == 1]
    majority = max(sorted(set(steady)), key=steady.count) if steady else ""
    results = []
    for index, found in hashes.items():
        wrong = ""
        if len(set(found)) > 1:
            wrong = (
                f"{counted(len(set(found)), 'different result')} of {len(found)} equal computations"
            )
        elif len(steady) > 2 and steady.count(majority) > len(steady) / 2 and found[0] != majority:
            wrong = f"hash {found[0]} differs from {majority} of most devices of the node"
        results.append(
            Measured(
                target=f"{kind}:{index}",
                value=None,
                unit="",
                detail=f"hash {found[0]}",
                wrong=wrong,
            )
        )
    return results


def gradient_hash(device: torch.device) -> str:
    """First 16 hex digits of the SHA-256 of the gradients of a fixed two-layer network."""
    size = 2048 if device.type == "cuda" else 128
    generator = torch.Generator().manual_seed(_SEED)
    draw = [torch.randn(size, size, generator=generator) * size**-0.5 for _ in range(3)]
    x, *weights = (each.to(device) for each in draw)
    for weight in weights:
        weight.requires_grad_()
    hidden = torch.nn.functional.gelu(x @ weights[0], approximate="tanh")
    (hidden @ weights[1]).square().mean().backward()
    digest = hashlib.sha256()
    for weight in weights:
        assert weight.grad is not None
        digest.update(weight.grad.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
