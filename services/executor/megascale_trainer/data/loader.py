"""The data loader process: one per node, it keeps rings of step batches filled for its workers.

    python -m megascale_trainer.data.loader --socket PATH --config JOB.json

It works ahead, listens on a unix socket that only its user can open, runs without torch, and ends
with the process that started it.

Messages (:mod:`megascale_common.node.framing`) over the unix socket:

    worker: open {version, stream, dp_rank, reader, readers, first_sample, geometry}
    loader: opened {version, geometry, identities, blend_scheme} with the ring's descriptor,
            or error; the last two fields identify the data
    loader: ready {filled}       number of steps from first_sample on that are in the ring or were
    worker: release {}           one more step has been copied out
    loader: error {message, corpus}   the end of this worker's data; ``corpus``: its files are why

The tp and pp ranks of one data-parallel rank (its readers) share a ring, so each step is packed
once. One thread serves all rings: it packs a step whenever a ring has a free slot, and otherwise
blocks in the kernel. The stream of held-out data repeats after ``evaluation.batches`` steps, so
every evaluation reads the same samples.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megascale_common.node import framing
from megascale_common.node.output import redact_streams, steady_streams
from megascale_common.node.process import arm_parent_death
from megascale_common.node.unix_sockets import listen
from megascale_job.config import JobConfig
from megascale_job.corpus_record import data_file_problems
from megascale_job.loading import from_json
from megascale_job.visible import counted
from megascale_trainer.data.indexed import CorpusError, DataError
from megascale_trainer.data.packing import SampleStream, sample_numbers
from megascale_trainer.data.ring import Geometry, create_memory

MAX_READERS = 256  # workers of one data-parallel rank on one node
MAX_CONNECTIONS = 512  # below the usual limit of 1024 descriptors
# A live worker never reaches it: at most `slots` short messages wait in its socket at a time.
_SEND_TIMEOUT_S = 10.0
_RECEIVE_BYTES = 65536


@dataclass(frozen=True)
class Stream:
    """A stream that workers can open: its samples, or the error that every worker gets instead.

    The stream starts again after ``repeat_after`` samples; 0: never.
    """

    samples: SampleStream | DataError
    repeat_after: int = 0


@dataclass(eq=False)
class _ConnectedWorker:
    """One worker's connection."""

    sock: socket.socket
    decoder: framing.Decoder = field(default_factory=framing.Decoder)
    ring: _Ring | None = None
    reader: int = -1


class _Ring:
    """One data-parallel rank's step batches from ``first_sample`` on, and its readers' progress."""

    def __init__(
        self,
        samples: SampleStream,
        geometry: Geometry,
        dp_rank: int,
        first_sample: int,
        readers: int,
        repeat_after: int,
    ) -> None:
        self.first_sample = first_sample
        self.readers = readers
        self._repeat_after = repeat_after
        self.members: dict[int, _ConnectedWorker] = {}
        self.abandoned = False  # a reader has left: the others can continue, none can join
        self.filled = 0
        self._released = [0] * readers
        self.samples = samples
        self._geometry = geometry
        self._dp_rank = dp_rank
        self.descriptor, self._memory = create_memory(geometry, f"data-{dp_rank}")

    @property
    def has_free_slot(self) -> bool:
        """True if every reader, joined or not, has released the next slot to fill."""
        return self.filled - min(self._released) < self._geometry.slots

    def fill(self) -> None:
        """Pack the next step into its slot.

        Raises:
            DataError: see :meth:`SampleStream.sample`.
        """
        shape = self._geometry
        views = shape.views(self._memory, self.filled % shape.slots)
        begin = self.first_sample + self.filled * shape.samples_per_step
        if self._repeat_after:
            begin %= self._repeat_after
        numbers = sample_numbers(
            begin, shape.micro_batches, shape.micro_batch_size, shape.dp, self._dp_rank
        )
        for micro_batch, row_numbers in enumerate(numbers):
            for row, number in enumerate(row_numbers):
                for name, values in self.samples.sample(int(number)).items():
                    views[name][micro_batch, row] = values
        self.filled += 1

    def release(self, reader: int) -> None:
        """Count one step as copied by ``reader``.

        Raises:
            ValueError: the step was never announced to the reader.
        """
        if self._released[reader] >= self.filled:
            raise ValueError("release of a step that was not announced")
        self._released[reader] += 1

    def leave(self, reader: int) -> None:
        """Remove ``reader``, which no longer holds any slot."""
        del self.members[reader]
        self.abandoned = True
        self._released[reader] = sys.maxsize

    def close(self) -> None:
        """Free this process's memory; readers keep their own mapping of it."""
        os.close(self.descriptor)
        self._memory.close()


class LoaderServer:
    """Serves rings over a listening unix socket until the process ends, which frees everything.

    Args:
        streams: the streams that workers can open, by name.
    """

    def __init__(
        self, listener: socket.socket, geometry: Geometry, streams: Mapping[str, Stream]
    ) -> None:
        self._listener = listener
        self._geometry = geometry
        self._streams = streams
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._workers: set[_ConnectedWorker] = set()
        # By stream and data-parallel rank: rings that readers can join. Abandoned rings are kept
        # apart until their last reader leaves.
        self._rings: dict[tuple[str, int], _Ring] = {}
        self._old_rings: set[_Ring] = set()

    def run_once(self) -> None:
        """Answer messages, then pack at most one step for each ring; blocks without work."""
        busy = any(ring.has_free_slot for ring in self._all_rings())
        for key, _ in self._selector.select(0 if busy else None):
            if key.data is None:
                self._accept()
            elif key.data in self._workers:
                self._serve(key.data)
        for ring in self._all_rings():
            if ring.has_free_slot:
                self._fill(ring)

    def _all_rings(self) -> list[_Ring]:
        return [*self._rings.values(), *self._old_rings]

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if len(self._workers) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.settimeout(_SEND_TIMEOUT_S)
        worker = _ConnectedWorker(sock)
        self._workers.add(worker)
        self._selector.register(sock, selectors.EVENT_READ, worker)

    def _serve(self, worker: _ConnectedWorker) -> None:
        try:
            data = worker.sock.recv(_RECEIVE_BYTES)
            messages = worker.decoder.feed(data)
            for message in messages:
                self._answer(worker, message)
        except (DataError, ValueError, TypeError, KeyError) as error:
            self._refuse(
                worker,
                str(error) if isinstance(error, DataError) else f"bad message: {error!r}",
                corpus=isinstance(error, CorpusError),
            )
        except OSError:
            self._drop(worker)
        else:
            if not data:
                self._drop(worker)

    def _answer(self, worker: _ConnectedWorker, message: framing.Message) -> None:
        if message["kind"] == "open" and worker.ring is None:
            self._open(worker, message)
        elif message["kind"] == "release" and worker.ring is not None:
            worker.ring.release(worker.reader)
        else:
            raise ValueError(f"unexpected {message['kind']!r}")

    def _open(self, worker: _ConnectedWorker, message: framing.Message) -> None:
        if message["version"] != framing.PROTOCOL_VERSION:
            raise DataError(
                f"the worker has protocol version {message['version']}, the loader "
                f"{framing.PROTOCOL_VERSION}"
            )
        if message["geometry"] != self._geometry.to_message():
            raise DataError(
                f"worker and loader were given different jobs: {message['geometry']} and "
                f"{self._geometry.to_message()}"
            )
        reader = _bounded(message, "reader", int(message["readers"]))
        ring = self._ring_for(message)
        if reader in ring.members:
            raise DataError(f"reader {reader} of dp rank {message['dp_rank']} is connected already")
        worker.ring = ring
        worker.reader = reader
        ring.members[reader] = worker
        opened = {
            "kind": "opened",
            "version": framing.PROTOCOL_VERSION,
            "geometry": self._geometry.to_message(),
            "identities": list(ring.samples.identities),
            "blend_scheme": ring.samples.blend_scheme,
        }
        framing.send(worker.sock, opened, [ring.descriptor])
        framing.send(worker.sock, {"kind": "ready", "filled": ring.filled})

    def _ring_for(self, message: framing.Message) -> _Ring:
        """The ring that an open message asks for: the existing one, or a new one."""
        name = str(message["stream"])
        stream = self._streams.get(name)
        if stream is None:
            raise DataError(f"the job has no {name} data; streams: {', '.join(self._streams)}")
        if isinstance(stream.samples, DataError):
            raise type(stream.samples)(str(stream.samples))
        dp_rank = _bounded(message, "dp_rank", self._geometry.dp)
        readers = _bounded(message, "readers", MAX_READERS + 1)
        first_sample = _bounded(message, "first_sample", 1 << 62)
        ring = self._rings.get((name, dp_rank))
        if ring is None or ring.abandoned:
            if ring is not None:
                self._old_rings.add(ring)
            ring = _Ring(
                stream.samples, self._geometry, dp_rank, first_sample, readers, stream.repeat_after
            )
            self._rings[name, dp_rank] = ring
        if (ring.first_sample, ring.readers) != (first_sample, readers):
            raise DataError(
                f"dp rank {dp_rank}: asked for sample {first_sample} with "
                f"{counted(readers, 'reader')}, but "
                f"its other readers asked for sample {ring.first_sample} with {ring.readers}"
            )
        return ring

    def _fill(self, ring: _Ring) -> None:
        problem, corpus = "", False
        try:
            ring.fill()
        except DataError as error:
            # Workers are refused below: as long as the error lives, its frames hold views of the
            # ring, which then could not be closed.
            problem, corpus = str(error), isinstance(error, CorpusError)
        for member in list(ring.members.values()):
            if problem:
                self._refuse(member, problem, corpus=corpus)
                continue
            try:
                framing.send(member.sock, {"kind": "ready", "filled": ring.filled})
            except OSError:
                self._drop(member)

    def _refuse(self, worker: _ConnectedWorker, problem: str, *, corpus: bool) -> None:
        try:
            framing.send(worker.sock, {"kind": "error", "message": problem, "corpus": corpus})
        except OSError:
            pass  # the worker has ended; its connection is dropped below
        self._drop(worker)

    def _drop(self, worker: _ConnectedWorker) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._selector.unregister(worker.sock)
        worker.sock.close()
        ring = worker.ring
        if ring is None:
            return
        ring.leave(worker.reader)
        if not ring.members:
            self._old_rings.discard(ring)
            self._rings = {key: other for key, other in self._rings.items() if other is not ring}
            ring.close()


def _bounded(message: framing.Message, name: str, limit: int) -> int:
    value = message[name]
    if not isinstance(value, int) or not 0 <= value < limit:
        raise ValueError(f"{name}={value!r} is not a whole number below {limit}")
    return value


DESCRIPTORS_PER_SOURCE = 2  # a mapped file keeps a descriptor of its own
OWN_DESCRIPTORS = 64


def main(arguments: list[str] | None = None) -> None:
    """Run the loader of one node until it is stopped; exits with status 2 if it cannot start."""
    arm_parent_death()
    steady_streams()
    redact_streams()
    parser = argparse.ArgumentParser(
        prog="megascale-loader", description="Prepare step batches for the workers of a node."
    )
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--config", type=Path, required=True, help="the job, as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        config = from_json(options.config.read_text())
        geometry = Geometry.of(config)
        listener = listen(options.socket, "loader", MAX_CONNECTIONS)
    except (OSError, ValueError, DataError) as error:
        print(
            f"data loader cannot start ({options.config}, {options.socket}): {error}",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        server = LoaderServer(listener, geometry, _open_streams(config))
        while True:
            server.run_once()
    finally:
        options.socket.unlink(missing_ok=True)


def _open_streams(config: JobConfig) -> dict[str, Stream]:
    """All of the job's data, opened and checked before the first step.

    A mistake in the evaluation data refuses the whole job: training does not begin.
    """
    make_room(config)
    training = _open(config, "data")
    streams = {"training": Stream(training)}
    if config.evaluates:
        # Every evaluation reads the same samples, whatever training skips.
        data = replace(config.data, sources=config.evaluation.sources, skips=())
        held_out = replace(config, data=data)
        repeat_after = config.evaluation.batches * config.training.global_batch_size
        streams["evaluation"] = Stream(_open(held_out, "evaluation"), repeat_after)
    for problem in data_file_problems(config):
        refused = Stream(CorpusError(str(problem)))
        return {name: refused for name in streams}
    return streams


def make_room(config: JobConfig) -> None:
    """Raise the limit of descriptors for all sources, as far as the hard limit allows.

    If that is not enough, opening the sources fails later and names the file.
    """
    sources = len(config.data.sources) + len(config.evaluation.sources)
    needed = DESCRIPTORS_PER_SOURCE * sources + MAX_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _open(config: JobConfig, section: str) -> SampleStream | DataError:
    try:
        return SampleStream.open(config, section)
    except DataError as error:
        return error  # reported to the workers, which wait for the data


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
