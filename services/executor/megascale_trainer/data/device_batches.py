"""Training batches on the device: on CUDA the next step's are copied there while the present step
runs.

A copy from ordinary memory holds the host until the device reaches it, and the device then waits
for the host's next launches. So batches go through page-locked memory on a stream of their own,
into one of two fixed sets of tensors.
"""

from __future__ import annotations

import torch

from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.client import LoaderClient

_SETS = 2  # one that the running step reads, the other is being filled for the next


class StepBatches:
    """The micro-batches of one step after the other, copied when they are asked for.

    Raises:
        DataError: from :meth:`take` and :meth:`prefetch`, as :meth:`LoaderClient.next_step` says.
    """

    def __init__(self, loader: LoaderClient, device: torch.device) -> None:
        self._loader, self._device = loader, device

    def take(self) -> list[MicroBatch]:
        """The next step's micro-batches, in order; they stay whole until the next call but one."""
        return [batch.to(self._device) for batch in self._read()]

    def prefetch(self) -> None:
        """Begin to bring the next step's to the device; call it when the present step has been
        launched.
        """

    def close(self) -> None:
        """Leave the loader."""
        self._loader.close()

    def _read(self) -> list[MicroBatch]:
        return [MicroBatch.from_numpy(arrays) for arrays in self._loader.next_step()]


class PrefetchedStepBatches(StepBatches):
    """The same on CUDA, with copies that neither hold the host nor wait for what the device
    computes.
    """

    def __init__(self, loader: LoaderClient, device: torch.device) -> None:
        super().__init__(loader, device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._host: list[list[MicroBatch]] = [[] for _ in range(_SETS)]
        self._on_device: list[list[MicroBatch]] = [[] for _ in range(_SETS)]
        self._copied = [torch.cuda.Event() for _ in range(_SETS)]  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in range(_SETS)]  # type: ignore[no-untyped-call]
        self._taken = self._filled = 0  # steps

    def take(self) -> list[MicroBatch]:
        if self._filled == self._taken:
            self.prefetch()
        at = self._taken % _SETS
        # Whatever reads the other set has been launched by now, and the step to come reads this
        # one.
        self._used[1 - at].record()
        self._copied[at].wait()
        self._taken += 1
        return self._on_device[at]

    def prefetch(self) -> None:
        """Fill the set that the step before the present one has read; nothing if the next step's is
        under way.
        """
        if self._filled > self._taken:
            return
        batches, at = self._read(), self._filled % _SETS
        if not self._host[at]:
            self._host[at] = [batch.pin() for batch in batches]
            # Made on the stream that computes with them, and kept: the allocator never hands this
            # memory on.
            self._on_device[at] = [
                batch.map(lambda tensor: torch.empty_like(tensor, device=self._device))
                for batch in batches
            ]
            self._used[at].record()  # what used this memory before may still be running
        else:
            self._copied[at].synchronize()  # two steps ago: the page-locked memory is free again
            self._host[at] = _refilled(self._host[at], batches)
        with torch.cuda.stream(self._stream):
            self._used[at].wait()
            self._on_device[at] = _refilled(self._on_device[at], self._host[at])
            self._copied[at].record()
        self._filled += 1


def step_batches(loader: LoaderClient, device: torch.device) -> StepBatches:
    """The kind that suits ``device``."""
    return (
        PrefetchedStepBatches(loader, device)
        if device.type == "cuda"
        else StepBatches(loader, device)
    )


def _refilled(targets: list[MicroBatch], sources: list[MicroBatch]) -> list[MicroBatch]:
    return [target.refilled(source) for target, source in zip(targets, sources, strict=True)]
