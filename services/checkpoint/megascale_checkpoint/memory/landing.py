"""Checksums of a slot that is being written, computed while its bytes land.

The trainer's copy notes in the slot's last page how many bytes have landed, counted from the slot's
start. Threads follow that number, so that a seal waits for what landed last alone. Nothing depends
on the number being true: bytes that change after their checksum are found damaged when the slot is
persisted, replicated or restored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import xxhash

from megascale_checkpoint.checksums import CHUNK_BYTES, balanced
from megascale_checkpoint.concurrency import in_pool
from megascale_job.sizes.checkpoint_layout import ShardLayout

SEALING_THREADS = 4  # for one state: checksums run at some 20 GB/s in each
# Between two looks at the number of bytes: before the copy has begun, which may be a step later,
# and while it runs.
WAITING_S, COPYING_S = 0.02, 0.002

Part = tuple[int, int, int]  # index of a piece, and the bytes [start, stop) of the slot


class WrittenSlot(Protocol):
    """The memory of a slot that a trainer writes."""

    @property
    def view(self) -> memoryview:
        """Its bytes."""

    landed_bytes: int


class Landing:
    """The checksums of one slot's pieces, from its acquisition on; runs on the event loop."""

    def __init__(self, layout: ShardLayout, memory: WrittenSlot, pool: ThreadPoolExecutor) -> None:
        memory.landed_bytes = 0
        self._layout, self._memory, self._pool = layout, memory, pool
        self._image = memory.view
        self._hashers = [xxhash.xxh3_128() for _ in layout.pieces]
        self._done = 0
        self._ending = asyncio.Event()
        self.following = asyncio.create_task(self._follow(), name="checksums of what lands")

    def end(self) -> None:
        """No checksum is wanted any more; :attr:`following` ends with what its threads now do."""
        self._ending.set()

    async def checksums(self) -> tuple[str, ...]:
        """The checksum of each piece, in the layout's order, once all bytes have landed."""
        self.end()
        await self.following
        await self._advance(self._layout.slot_bytes)
        return tuple(hasher.hexdigest() for hasher in self._hashers)

    async def _follow(self) -> None:
        while not self._ending.is_set():
            landed = min(self._memory.landed_bytes, self._layout.slot_bytes)
            if landed > self._done:
                await self._advance(landed)
                continue
            pause_s = COPYING_S if 0 < self._done < self._layout.slot_bytes else WAITING_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()
            except TimeoutError:
                pass

    async def _advance(self, landed: int) -> None:
        """Add the bytes up to ``landed``; the parts of one piece follow each other in order."""
        parts = [
            (index, max(self._done, first), min(landed, last))
            for index, (first, last) in enumerate(self._bounds())
            if last > self._done and first < landed
        ]
        shares = balanced([stop - start for _, start, stop in parts], SEALING_THREADS)
        await asyncio.gather(
            *(in_pool(self._pool, self._add, [parts[each] for each in share]) for share in shares)
        )
        self._done = landed

    def _bounds(self) -> Sequence[tuple[int, int]]:
        return [
            (piece.slot_offset_bytes, piece.slot_offset_bytes + piece.size_bytes)
            for piece in self._layout.pieces
        ]

    def _add(self, parts: list[Part]) -> None:
        for index, begin, end in parts:
            for start in range(begin, end, CHUNK_BYTES):
                self._hashers[index].update(self._image[start : min(end, start + CHUNK_BYTES)])
