"""Multiplies matrices on one GPU for a share of the time: what slows the other process there.

    python benchmarks/competing_gemms.py --device 2 --duty 0.6

It warms up, prints ``ready`` and waits for a line on stdin, so that the beginning is known; then it
prints ``running`` and goes on until its stdin is closed. No setting of the GPU is touched: kernels
of two processes take turns on it. The device's own clock of each burst sets how long it pauses.
"""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Sequence

import torch

SIZE = 8192  # of a square product: about 1.5 ms on an H100, so bursts end on time
BURST = 8  # products between two pauses


def burst(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Run one burst; returns its seconds."""
    began_s = time.perf_counter()
    for _ in range(BURST):
        torch.matmul(left, right, out=out)
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until stdin is closed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=int, required=True, help="index of the GPU")
    parser.add_argument("--duty", type=float, default=0.6, help="share of the time, up to 1")
    options = parser.parse_args(arguments)
    if not 0 < options.duty <= 1:
        parser.error("--duty: give a number above 0, at most 1")
    torch.cuda.set_device(options.device)
    left, right, out = (
        torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    for _ in range(3):
        burst(left, right, out)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 0
    print("running", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        busy_s = burst(left, right, out)
        time.sleep(busy_s * (1 / options.duty - 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
