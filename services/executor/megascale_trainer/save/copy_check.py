"""Whether a copy of the state to the host is what was on the device, found by sampling.

Checksums start where the bytes are on the host, so they do not see a copy that went wrong. Samples
of the copy are compared with the device's own bytes, behind the copy and on its stream: what runs
on the host is never waited for. The samples move from step to step and so cover everything in time.
"""

from __future__ import annotations

import torch

from megascale_trainer.save.host_copy import parts

WINDOW_BYTES = 1 << 20  # at least
# The training thread launches the comparison of each: 73 of them held it up for 4 ms (H200).
MOST_WINDOWS = 8
_GOLDEN = 0x9E3779B97F4A7C15  # spreads the steps evenly over the places of a stretch


def sampled(size_bytes: int, share: float, step: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of about ``share`` of the bytes: one window in each equal stretch."""
    if share <= 0 or not size_bytes:
        return []
    if share >= 1:
        return [(0, size_bytes)]
    wanted = round(share * size_bytes)
    window = min(max(WINDOW_BYTES, wanted // MOST_WINDOWS), size_bytes)
    count = max(1, min(size_bytes // window, round(wanted / window), MOST_WINDOWS))
    ranges = []
    for number in range(count):
        begin, end = number * size_bytes // count, (number + 1) * size_bytes // count
        places = -(-(end - begin) // window)
        start = min(begin + (step * _GOLDEN >> 32) % places * window, end - window)
        ranges.append((start, start + window))
    return ranges


class CopyCheck:
    """The comparison of one copy; ``image`` and ``slot`` are uint8, on the device and the host."""

    def __init__(self, image: torch.Tensor, slot: torch.Tensor, share: float, step: int) -> None:
        self._differs: torch.Tensor | None = None
        ranges = sampled(image.numel(), share, step)
        if not ranges:
            return
        self._differs = torch.zeros((), dtype=torch.bool, pin_memory=image.is_cuda)
        found = torch.zeros((), dtype=torch.bool, device=image.device)
        for start, stop in (part for each in ranges for part in parts(*each)):
            copied = slot[start:stop].to(image.device, non_blocking=True)
            found |= (copied != image[start:stop]).any()
        self._differs.copy_(found, non_blocking=True)

    def problem(self) -> str:
        """Once the copy has ended: "" or what is wrong with it."""
        if self._differs is None or not bool(self._differs):
            return ""
        return (
            "the copy to the host is not what was on the device: check the node's memory and PCIe"
        )
