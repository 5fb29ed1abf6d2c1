"""Training batches on the device: on CUDA the next step's are copied while the present step runs.

A copy from ordinary memory blocks the host until the device reaches it, and then the device waits
for the host's next launches. So batches go through page-locked memory on a stream of their own,
into one of two fixed sets of tensors.
"""

from __future__ import annotations

import torch

from megascale_kernels.torch_calls import cuda_event, cuda_stream
from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.client import LoaderClient

_SETS = 2  # the running step reads one, the other is filled for the next step


class StepBatches:
    """The micro-batches of one step after the other, copied on request.

    :meth:`take` and :meth:`prefetch` raise as :meth:`LoaderClient.next_step`.
    """

    def __init__(self, loader: LoaderClient, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def take(self) -> list[MicroBatch]:
        """The next step's micro-batches, in order; valid until the next call but one."""
        return [batch.to(self._device) for batch in self._read()]

    def prefetch(self) -> None:
        """Start to copy the next step's batches; call it once the present step is launched."""

    def close(self) -> None:
        """Leave the loader."""
        self._loader.close()

    def _read(self) -> list[MicroBatch]:
        return [MicroBatch.from_numpy(arrays) for arrays in self._loader.next_step()]


class PrefetchedStepBatches(StepBatches):
    """Step batches on CUDA, with copies that block neither the host nor the computation."""

    def __init__(self, loader: LoaderClient, device: torch.device) -> None:
        super().__init__(loader, device)
        self._stream = cuda_stream(device)
        self._host: list[list[MicroBatch]] = [[] for _ in range(_SETS)]
        self._on_device: list[list[MicroBatch]] = [[] for _ in range(_SETS)]
        self._copied = [cuda_event() for _ in range(_SETS)]
        self._used = [cuda_event() for _ in range(_SETS)]
        self._taken = self._filled = 0  # steps

    def take(self) -> list[MicroBatch]:
        if self._filled == self._taken:
            self.prefetch()
        at = self._taken % _SETS
        # Everything that reads the other set has been launched by now, so its event marks when that
        # set can be filled again. The coming step waits on the device for its own copy.
        self._used[1 - at].record()
        self._copied[at].wait()
        self._taken += 1
        return self._on_device[at]

    def prefetch(self) -> None:
        """Fill the set that the step before the present one has read.

        Does nothing if the next step's copy is already in progress.
        """
        if self._filled > self._taken:
            return
        batches, at = self._read(), self._filled % _SETS
        if not self._host[at]:
            self._host[at] = [batch.pin() for batch in batches]
            # Allocated on the stream that computes with them, and never freed, so the caching
            # allocator cannot give this memory to another tensor while a copy writes it.
            self._on_device[at] = [
                batch.map(lambda tensor: torch.empty_like(tensor, device=self._device))
                for batch in batches
            ]
            self._used[at].record()  # earlier work on this memory may still be running
        else:
            # The device's copy out of this page-locked memory began two steps ago, so the host
            # hardly waits; without the wait it would overwrite values that are still being read.
            self._copied[at].synchronize()
            self._host[at] = _refilled(self._host[at], batches)
        with torch.cuda.stream(self._stream):
            self._used[at].wait()
            self._on_device[at] = _refilled(self._on_device[at], self._host[at])
            self._copied[at].record()
        self._filled += 1


def step_batches(loader: LoaderClient, device: torch.device) -> StepBatches:
    """The step batches that suit ``device``."""
    return (
        PrefetchedStepBatches(loader, device)
        if device.type == "cuda"
        else StepBatches(loader, device)
    )


def _refilled(targets: list[MicroBatch], sources: list[MicroBatch]) -> list[MicroBatch]:
    return [target.refilled(source) for target, source in zip(targets, sources, strict=True)]
