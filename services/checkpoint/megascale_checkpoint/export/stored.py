"""One complete checkpoint, read parameter by parameter: memory holds one parameter at a time.

The experts of a layer are one parameter, which can be read in ranges instead. Every piece is
verified against its checksum as it is read, so an export writes exactly what was committed, or
fails.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megascale_checkpoint.checksums import checksum, shown
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.manifest import Manifest
from megascale_checkpoint.commit.shard_file import StoredPiece, located, pieces_of, read_exactly
from megascale_checkpoint.export.tokenizer_files import TOKENIZER
from megascale_checkpoint.export.values import Floats
from megascale_checkpoint.restore import reshard
from megascale_checkpoint.storage import Storage, join, open_storage
from megascale_common.service.errors import (
    CoverageError,
    DamagedError,
    NotFoundError,
    RequestError,
    invalid,
)
from megascale_job.config import JobConfig, ModelConfig
from megascale_job.loading import from_accepted
from megascale_job.problems import JobError
from megascale_job.sizes.checkpoint_layout import DTYPE_BYTES, MASTER, ShardPiece
from megascale_job.sizes.read_plan import chunk_bytes
from megascale_job.visible import counted

MODEL = "model"  # of the small state: the fields of trainer.model


class ParameterReader:
    """Reads the parameters of a checkpoint.

    Attributes:
        manifest: the checkpoint's manifest.
        shapes: global shape of each parameter, in the order of the files.
        states: names of the optimizer states, the float32 parameters ("master") first.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self.manifest = manifest
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = defaultdict(list)
        self._checked: set[tuple[str, str]] = set()  # parameters whose pieces cover them
        self._last: tuple[tuple[str, int], bytearray] | None = None  # the chunk read last
        for file in manifest.files:
            manifests.check_size(storage, file)
            for stored in pieces_of(storage, manifest, file):
                self._pieces[stored.piece.name, stored.piece.state].append(stored)
        # Shapes from the float32 parameters alone, because optimizer states repeat them.
        self.shapes = {
            name: pieces[0].piece.global_shape
            for (name, state), pieces in self._pieces.items()
            if state == MASTER
        }
        others = {state for _, state in self._pieces} - {MASTER}
        self.states = (MASTER, *sorted(others))

    @property
    def model(self) -> ModelConfig | None:
        """The model in the small state, as the job described it; None if it has none."""
        values = self.manifest.small_state.get(MODEL)
        if values is None:
            return None
        name = f"{self._storage.uri}/{manifests.NAME}"
        layers = values.get("layers") if isinstance(values, dict) else None
        # Checked before a list of all layers is made, which a wrong number could make enormous.
        if not isinstance(layers, int) or layers > len(self.shapes):
            raise DamagedError(
                name,
                f"its model is of {shown(layers)} layers with "
                f"{counted(len(self.shapes), 'parameter')}",
            )
        return _model(values, name)

    def read(self, name: str, state: str = MASTER) -> Floats:
        """A whole parameter, float32 in its global shape.

        Raises:
            DamagedError: a file is missing, cut short or changed, or the pieces are incomplete.
            OSError: the storage does not answer.
        """
        stored = self._covering(name, state)
        # Left uninitialised: check_coverage has proved that every element is stored exactly once.
        whole = np.empty(stored[0].piece.global_shape, np.float32)
        for each in stored:
            data = self._unit(each, 0, each.piece.size_bytes, each.checksum)
            reshard.put(whole, each.piece, np.frombuffer(data, np.float32))
        return whole

    def read_range(self, name: str, first: int, last: int, state: str = MASTER) -> Floats:
        """The values ``first`` to ``last`` (exclusive) of a flattened parameter, float32, 1-D.

        Memory holds of the parameter at most them and one chunk of a piece, or a piece
        without chunks. It is kept, so that ranges that follow each other read each chunk once.

        Raises:
            as :meth:`read`.
        """
        found = np.empty(last - first, np.float32)
        for each in self._covering(name, state):
            begin = self._begin(each.piece)
            size = each.piece.flat_stop - each.piece.flat_start
            low, high = max(first, begin), min(last, begin + size)
            if low < high:
                self._copy(each, low - begin, found[low - first : high - first])
        return found

    def size_bytes(self, states: tuple[str, ...]) -> int:
        """Bytes of these states of all parameters."""
        shapes = [shape for state in states for shape in self.shapes_of(state).values()]
        return sum(map(math.prod, shapes)) * DTYPE_BYTES["float32"]

    def shapes_of(self, state: str) -> dict[str, tuple[int, ...]]:
        """``shapes`` of the parameters that have this state; counts of routers can have fewer."""
        return {name: shape for name, shape in self.shapes.items() if (name, state) in self._pieces}

    def _covering(self, name: str, state: str) -> list[StoredPiece]:
        """The pieces of a parameter, which hold each of its values once, in float32."""
        stored = self._pieces.get((name, state), [])
        if (name, state) in self._checked:
            return stored
        try:
            reshard.check_coverage(each.piece for each in stored)
        except CoverageError as error:
            raise DamagedError(self._storage.uri, f"{name} ({state}): {error}") from error
        dtype = stored[0].piece.dtype
        if dtype != "float32":
            raise DamagedError(self._storage.uri, f"{name} ({state}) is {dtype}, not float32")
        self._checked.add((name, state))
        return stored

    def _begin(self, piece: ShardPiece) -> int:
        """The index of a piece's first value in the flattened parameter."""
        row = piece.global_shape[1:]
        if piece.box_shape[1:] != row:
            raise DamagedError(self._storage.uri, f"{piece.name} is stored in parts of its rows")
        return piece.start[0] * math.prod(row) + piece.flat_start

    def _copy(self, stored: StoredPiece, first: int, target: Floats) -> None:
        """Fill ``target`` with a piece's values from ``first`` on, one chunk at a time."""
        size = stored.piece.size_bytes
        length = chunk_bytes(size) if stored.chunks else size
        begin, end = first * target.itemsize, first * target.itemsize + target.nbytes
        view = target.data.cast("B")
        for number in range(begin // length, -(-end // length)):
            at = number * length
            key = (stored.file, stored.piece.slot_offset_bytes + at)
            if self._last is None or self._last[0] != key:
                self._last = None  # memory holds one chunk, not two
                digest = stored.chunks[number] if stored.chunks else stored.checksum
                self._last = key, self._unit(stored, at, min(length, size - at), digest)
            low, high = max(begin, at), min(end, at + length)
            view[low - begin : high - begin] = memoryview(self._last[1])[low - at : high - at]

    def _unit(self, stored: StoredPiece, at: int, size: int, digest: str) -> bytearray:
        """Bytes ``at`` to ``at + size`` of a piece, which have the checksum ``digest``."""
        piece, buffer = stored.piece, bytearray(size)
        try:
            offset = piece.slot_offset_bytes + at
            read_exactly(self._storage, stored.file, offset, memoryview(buffer))
            if checksum(memoryview(buffer)) != digest:
                raise DamagedError(stored.file, f"{piece.name} ({piece.state}) fails its checksum")
        except DamagedError as error:
            raise located(self._storage, error) from error
        return buffer


def open_checkpoint(uri: str, step: int | None = None) -> ParameterReader:
    """The newest complete checkpoint below ``uri``, or that of ``step``.

    ``uri`` is a job's checkpoint.uri, or a folder that holds one checkpoint with its manifest, as
    `megascale checkpoint fetch` writes it.

    Raises:
        NotFoundError: it holds no such checkpoint.
        DamagedError: a file is missing, cut short or changed.
        RequestError: the uri is not supported.
        OSError: the storage does not answer.
    """
    storage = open_storage(uri)
    if storage.size(manifests.NAME) is not None:
        storage, manifest = manifests.load(join(uri, manifests.NAME))
        if step not in (None, manifest.step):
            raise NotFoundError(
                f"--step: {uri} holds step {manifest.step} alone; leave the option out"
            )
        return ParameterReader(storage, manifest)
    log = CommitLog(storage)
    log.refresh(whole=step is not None)  # a snapshot of the log leaves out the oldest steps
    commits = log.commits()
    if step is None or step not in {each.step for each in commits}:
        log.refuse_damaged()  # the requested step may be after the damage
    if not commits:
        raise NotFoundError(
            f"{uri} holds no complete checkpoint: give a job's checkpoint.uri, or a folder that "
            "`megascale checkpoint fetch` wrote"
        )
    record = next((each for each in commits if step in (None, each.step)), None)
    if record is None:
        steps = sorted({each.step for each in commits})
        shown = ", ".join(map(str, steps[-10:]))
        raise NotFoundError(
            f"--step: {uri} has no complete checkpoint of step {step}; give one of {shown}"
        )
    manifest_uri = join(uri, record.values["manifest"])
    xxh3 = record.values["manifest_xxh3"]
    return ParameterReader(*manifests.load(manifest_uri, xxh3))


def model_of(stored: ParameterReader, job_file: Path | None) -> ModelConfig:
    """The model of a checkpoint, from the job file if one is given.

    Raises:
        RequestError: neither describes it, or the file is not a job.
        OSError: the file cannot be read.
    """
    if job_file is None:
        if stored.model is None:
            raise invalid(
                "--job",
                "missing, and an earlier version wrote this checkpoint without its model",
                "give the file of the job that wrote it",
            )
        return stored.model
    return _job_of(job_file).model


def tokenizer_of(stored: ParameterReader, job_file: Path | None) -> Any:
    """The fields of the job's tokenizer, from the job file if one is given; None: not known.

    Raises:
        RequestError: the file is not a job.
        OSError: it cannot be read.
    """
    if job_file is None:
        return stored.manifest.small_state.get(TOKENIZER)
    return asdict(_job_of(job_file).data.tokenizer)


def _job_of(job_file: Path) -> JobConfig:
    try:
        values = yaml.safe_load(job_file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise invalid(
            "--job", f"{job_file} is not valid YAML: {error}", "give a job file"
        ) from error
    try:
        return from_accepted(values)
    except JobError as error:
        raise RequestError(f"--job: {job_file}: {error}") from error


def _model(values: Mapping[str, Any], file: str) -> ModelConfig:
    job = {"name": "model", "model": values, "training": {"steps": 1, "global_batch_size": 1}}
    try:
        return from_accepted(job).model
    except JobError as error:
        raise RequestError(
            f"{file}: {error}: a newer version wrote this checkpoint; give the job file with --job"
        ) from error
