"""How the ranks of a restore agree: what one has found out, all decide on together."""

from __future__ import annotations

import numpy as np
import torch

from megascale_common.node.messages import ErrorKind
from megascale_trainer.parallel.groups import Group


class RestoreRefused(Exception):
    """The planned state cannot be had: ``kind`` is why, ``file`` which file is damaged.

    ``damage``: all ranks know by now that nothing else is wrong than this, on whichever rank, so
    that they may take an older checkpoint together; "" where they may not.
    """

    def __init__(self, kind: ErrorKind, problem: str, file: str, damage: str = "") -> None:
        super().__init__(problem)
        self.kind = kind
        self.file = file
        self.damage = damage


_DAMAGED, _OTHER = 1, 2
MAX_DAMAGE_CHARS = 1000


class Votes:
    """Small exchanges of all ranks; every rank calls each of them together."""

    def __init__(self, world: Group, device: torch.device) -> None:
        self._world, self._device = world, device

    def numbers(self, *mine: int) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        source = torch.tensor(mine, dtype=torch.int64, device=self._device)
        output = torch.empty(self._world.size * len(mine), dtype=torch.int64, device=self._device)
        self._world.all_gather(output, source)
        return [[int(n) for n in row] for row in output.view(self._world.size, -1).tolist()]

    def gather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        sizes = [row[0] for row in self.numbers(len(mine))]
        longest = max(1, *sizes)
        source = torch.zeros(longest, dtype=torch.uint8)
        source[: len(mine)] = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
        output = torch.empty(self._world.size * longest, dtype=torch.uint8, device=self._device)
        self._world.all_gather(output, source.to(self._device))
        rows = output.view(self._world.size, longest).cpu().numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, problem: RestoreRefused | None) -> None:
        """Go on only if no rank has a problem.

        Raises:
            RestoreRefused: the own problem; or COLLECTIVE, a symptom, for that of another rank.
        """
        mine = 0
        if problem is not None:
            mine = _DAMAGED if problem.kind == "CHECKPOINT_CORRUPT" else _OTHER
        broken = torch.tensor([mine], dtype=torch.int64, device=self._device)
        self._world.all_reduce_max(broken)
        worst = int(broken.item())
        if not worst:
            return
        damage = ""
        if worst == _DAMAGED:
            texts = self.gather(str(problem or "")[:MAX_DAMAGE_CHARS].encode())
            damage = next(text for text in texts if text).decode(errors="replace")
        if problem is not None:
            problem.damage = damage
            raise problem
        text = "another rank cannot restore; its log has the reason"
        raise RestoreRefused("COLLECTIVE", text, "", damage)
