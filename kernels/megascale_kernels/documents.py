"""Documents packed into sequences: the offsets that variable-length attention takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

_LEAST_DOCUMENTS = 16  # in a ragged tensor


@dataclass(frozen=True)
class Documents:
    """The documents of B sequences of S tokens, one sequence after the other.

    No document crosses from one sequence to the next.

    Args:
        offsets: int32 [B * S + 1]: the first token of each of the ``number`` documents, then B * S
            in all further places. Its length does not depend on the documents, so that one tensor
            can be refilled with those of another micro-batch (a CUDA graph reads it in place).
        shape: (B, S).
        number, longest: the number of documents, and the tokens of the longest. They size a
            kernel's grid and its working memory, so the host holds them: it never waits for the
            device.
    """

    offsets: torch.Tensor
    shape: tuple[int, int]
    number: int
    longest: int

    @property
    def bounds(self) -> torch.Tensor:
        """int32 [number + 1], a view: a document ends where the next one begins."""
        return self.offsets[: self.number + 1]

    @property
    def kernels(self) -> int:
        """A number that is equal for documents for which attention launches the same kernels.

        0: each sequence is one document. Else it is the rounded number of
        :class:`RaggedDocuments`.
        """
        return 0 if self.number == self.shape[0] else _rounded(self)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Documents:
        """The same documents with ``function`` of the offsets, such as their copy on a device."""
        return replace(self, offsets=function(self.offsets))

    def starts(self) -> torch.Tensor:
        """int32 [B, S], on the device of ``offsets``: the start of each token's document."""
        batch, sequence = self.shape
        token = torch.arange(batch * sequence, dtype=torch.int32, device=self.offsets.device)
        first = self.offsets[torch.searchsorted(self.offsets, token, right=True) - 1]
        return (first % sequence).view(batch, sequence)


def documents_of(start: torch.Tensor) -> Documents:
    """The documents whose tokens have the same ``start``.

    Args:
        start: integer [B, S] on the host: the start in its sequence of a token's document.
    """
    tokens = start.numel()
    # The first token of a sequence begins a document, and so does each one with another start.
    first = torch.ones(start.shape, dtype=torch.bool)
    first[:, 1:] = start[:, 1:] != start[:, :-1]
    begins = first.flatten().nonzero().flatten()
    offsets = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    offsets[: begins.numel()] = begins
    longest = int(offsets[: begins.numel() + 1].diff().max())
    return Documents(offsets, (start.shape[0], start.shape[1]), begins.numel(), longest)


class RaggedDocuments:
    """Documents as a ragged tensor: their lengths, and their offsets in memory.

    Empty documents round their number up to a power of two, so that few numbers occur.
    """

    def __init__(self, documents: Documents) -> None:
        self.number = _rounded(documents)
        self._bounds = documents.offsets[: self.number + 1]
        self.lengths = self._bounds.diff()
        self._offsets: dict[int, torch.Tensor] = {}

    def offsets(self, width: int) -> torch.Tensor:
        """int32 [number + 1]: the offsets in elements, for tokens of ``width`` elements."""
        if width not in self._offsets:
            self._offsets[width] = self._bounds * width
        return self._offsets[width]


def _rounded(documents: Documents) -> int:
    tokens = documents.shape[0] * documents.shape[1]
    return min(max(1 << (documents.number - 1).bit_length(), _LEAST_DOCUMENTS), tokens)
