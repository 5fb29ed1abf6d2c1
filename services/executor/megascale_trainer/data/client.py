"""A worker's end of the data loader: blocking, with a bound on every wait."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy.typing as npt

from megascale_common.node import framing
from megascale_job.config import JobConfig
from megascale_trainer.data.indexed import CorpusError, DataError
from megascale_trainer.data.ring import BATCH_DTYPES, Geometry, map_for_reading

_CONNECT_RETRY_S = 0.02  # the loader may still be starting when the first worker connects

_STOPPED = "data loader has stopped: see its log file for the reason"

MicroBatchArrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RingRequest:
    """The ring of batches that a worker opens.

    Workers of a node that read the same data-parallel rank (its tp and pp ranks) share a ring; this
    one is ``reader`` of ``readers``. ``first_sample`` is the run's consumed samples, the same for
    all readers. ``stream`` chooses the job's training or evaluation data.
    """

    dp_rank: int
    reader: int
    readers: int
    first_sample: int
    stream: Literal["training", "evaluation"] = "training"


class LoaderClient:
    """The batches of one data-parallel rank, step by step.

    Args:
        socket_path: the loader's unix socket; it may not exist yet.
        timeout_s: limit for opening the ring, and for each wait for a step.

    Attributes:
        consumed_samples: position in the run after the last :meth:`next_step`.
        identities: identities of the corpora, in the order of the job's sources.
        blend_scheme: version of the order of the sources.

    Raises:
        DataError: the loader is not listening in time or refuses.
        CorpusError: the loader cannot use the job's files.
    """

    def __init__(
        self,
        socket_path: str | Path,
        config: JobConfig,
        ring: RingRequest,
        timeout_s: float,
    ) -> None:
        self._geometry = Geometry.of(config)
        self._timeout_s = timeout_s
        self._filled = self._read = 0
        self.consumed_samples = ring.first_sample
        deadline = time.monotonic() + timeout_s
        self._sock = _connect(Path(socket_path), deadline)
        try:
            request = {
                "kind": "open",
                "version": framing.PROTOCOL_VERSION,
                **asdict(ring),
                "geometry": self._geometry.to_message(),
            }
            self._send(request)
            message, descriptors = self._receive(deadline)
            if message.get("kind") != "opened" or len(descriptors) != 1:
                raise DataError(
                    f"data loader answered {message.get('kind')!r} to the opening of a ring"
                )
            self.identities = tuple(map(str, message.get("identities", ())))
            self.blend_scheme = int(message.get("blend_scheme", 1))
            self._memory = map_for_reading(self._geometry, descriptors[0])
        except BaseException:
            self._sock.close()
            raise

    def next_step(self) -> list[MicroBatchArrays]:
        """The micro-batches of the next step, in order, as copies that the caller owns.

        Each has ``tokens``, ``targets`` and ``position`` int64, ``loss_weight`` float32 and
        ``document_start`` int32, all [micro_batch_size, sequence_length]; their meaning is in
        :meth:`megascale_trainer.data.packing.SampleStream.sample`.

        Raises:
            DataError: the loader has ended, reports an error, or has nothing ready within
                ``timeout_s``.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._filled <= self._read:
            message, _ = self._receive(deadline)
            if message.get("kind") != "ready":
                raise DataError(f"data loader sent an unexpected {message.get('kind')!r}")
            self._filled = int(message["filled"])
        step = self._copy(self._read % self._geometry.slots)
        self._read += 1
        self.consumed_samples += self._geometry.samples_per_step
        self._send({"kind": "release"})
        return step

    def close(self) -> None:
        """Leave the ring. Arrays returned before stay valid."""
        self._sock.close()
        self._memory.close()

    def __enter__(self) -> LoaderClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _copy(self, slot: int) -> list[MicroBatchArrays]:
        # The views must not outlive this call: memory with a view cannot be unmapped.
        shared = self._geometry.views(self._memory, slot)
        return [
            {name: shared[name][number].astype(dtype) for name, dtype in BATCH_DTYPES.items()}
            for number in range(self._geometry.micro_batches)
        ]

    def _send(self, message: framing.Message) -> None:
        try:
            framing.send(self._sock, message)
        except (BrokenPipeError, ConnectionResetError):
            # The loader has ended. Its error message, sent before, is still unread and has the
            # reason, so the next receive reports it.
            return
        except OSError as error:
            raise DataError(f"data loader cannot be reached: {error}") from error

    def _receive(self, deadline: float) -> tuple[framing.Message, list[int]]:
        self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            received = framing.receive(self._sock)
        except TimeoutError as error:
            raise DataError(
                f"data loader had nothing ready within {self._timeout_s} s: is its storage slow?"
            ) from error
        except OSError as error:
            raise DataError(f"{_STOPPED} ({error})") from error
        if received is None:
            raise DataError(f"{_STOPPED} (its socket closed)")
        if received[0].get("kind") == "error":
            kind = CorpusError if received[0].get("corpus") else DataError
            raise kind(str(received[0].get("message")))
        return received


def _connect(path: Path, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sock.connect(str(path))
            return sock
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
            sock.close()
            if time.monotonic() + _CONNECT_RETRY_S >= deadline:
                raise DataError(f"{path}: no data loader is listening: {error}") from error
            time.sleep(_CONNECT_RETRY_S)
        except OSError as error:
            sock.close()
            raise DataError(f"{path}: cannot reach the data loader: {error}") from error
