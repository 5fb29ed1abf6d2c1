"""Restore: fill a slot from storage in the rank's layout, whatever layout wrote the checkpoint.

A piece that was stored just as the rank needs it is read straight into the slot. For any other
piece the whole parameter is assembled from all its stored pieces and cut again, one parameter at a
time. Every piece is verified against its checksum as it is read, and every file against its size
when its header is read. The committer has checked the sizes of all files when it opened the
attempt, so ten thousand ranks need not each stat ten thousand files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale_checkpoint import manifest as manifests
from megascale_checkpoint import reshard
from megascale_checkpoint.checksums import checksum, piece_view
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.manifest import File, Manifest
from megascale_checkpoint.shard_file import Origin, StoredPiece, read_exactly, read_header
from megascale_checkpoint.storage import Storage
from megascale_common.service.errors import (
    CoverageError,
    DamagedError,
    MissingFileError,
    RequestError,
)
from megascale_common.sizes.checkpoint_layout import DTYPE_BYTES, ShardLayout, ShardPiece

Range = tuple[Any, ...]
Parameter = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Filled:
    """What :func:`fill` read: the rank's small state, and how many bytes of tensors."""

    small_state: dict[str, Any]
    bytes_read: int


def fill(
    manifest_uri: str,
    job_step: int,
    rank: int,
    layout: ShardLayout,
    image: memoryview,
    cancelled: Cancellation | None = None,
    manifest_xxh3: str = "",
) -> Filled:
    """Read a checkpoint into ``image``, a slot of ``layout``. Blocking.

    Bytes between the pieces are set to 0. ``manifest_xxh3`` is the checksum of the manifest that
    was committed; "" where the plan has none.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        RequestError: the checkpoint is of another model, the uri is not supported, or there is no
            manifest.
        SupersededError: cancelled.
        OSError: the storage does not answer.
    """
    try:
        storage, manifest = manifests.load(manifest_uri, manifest_xxh3)
    except MissingFileError as error:
        # The committer has just read the manifest on its node, so this node's folder is at fault
        # and the checkpoint must not be marked as damaged.
        raise RequestError(
            f"{error} on this node: is the checkpoint folder shared by all nodes?"
        ) from error
    if manifest.step != job_step:
        raise DamagedError(manifest_uri, f"is of step {manifest.step}, not {job_step}")
    # A piece may be shorter than its place in the slot; the trainer relies on zeros in the padding.
    np.frombuffer(image, np.uint8)[:] = 0
    reader = _Reader(storage, manifest, cancelled or Cancellation())
    rest = _read_exact(reader, rank, layout, image)
    _read_resharded(reader, rest, image)
    return Filled(manifest.small_state_of(rank, layout.digest()), reader.bytes_read)


@dataclass(slots=True)
class _Reader:
    """Reads a checkpoint's stored pieces; headers are read file by file, as they are needed.

    Attributes:
        exact: the stored pieces seen so far, by what they cover.
        by_parameter: the same pieces, by parameter and state.
    """

    storage: Storage
    manifest: Manifest
    cancelled: Cancellation
    bytes_read: int = 0
    exact: dict[Range, StoredPiece] = field(default_factory=dict)
    by_parameter: dict[Parameter, list[StoredPiece]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _seen: set[str] = field(default_factory=set)

    def read_header_of(self, file: File) -> None:
        """Read a file's header, once."""
        if file.path in self._seen:
            return
        self._seen.add(file.path)
        manifests.check_size(self.storage, file)
        origin = Origin(self.manifest.job, self.manifest.attempt, self.manifest.step, file.rank)
        try:
            pieces = read_header(self.storage, file.path, origin)
        except DamagedError as error:
            raise self._located(error) from error
        for stored in pieces:
            self.exact[_range(stored.piece)] = stored
            self.by_parameter[_parameter(stored.piece)].append(stored)

    def read(self, stored: StoredPiece, target: memoryview) -> None:
        """Read and verify one piece."""
        self.cancelled.check()
        try:
            read_exactly(self.storage, stored.file, stored.piece.slot_offset_bytes, target)
            if checksum(target) != stored.checksum:
                raise DamagedError(
                    stored.file, f"{stored.piece.name} ({stored.piece.state}) fails its checksum"
                )
        except DamagedError as error:
            raise self._located(error) from error
        self.bytes_read += len(target)

    def _located(self, error: DamagedError) -> DamagedError:
        return DamagedError(f"{self.storage.uri}/{error.file}", error.problem)


def _read_exact(
    reader: _Reader, rank: int, layout: ShardLayout, image: memoryview
) -> list[ShardPiece]:
    """Read the pieces that were stored just as the rank needs them; return the others.

    Headers are read from the rank's own file downwards. In the same layout the own file has every
    piece except those replicated over tensor parallelism, which the nearest lower rank with tp 0
    wrote (tp is the innermost axis).
    """
    wanted = [piece for piece in layout.pieces if piece.size_bytes]
    for file in sorted(
        reader.manifest.files, key=lambda file: (rank - file.rank) % reader.manifest.world_size
    ):
        if all(_range(piece) in reader.exact for piece in wanted):
            break
        reader.read_header_of(file)
    rest = []
    for piece in wanted:
        stored = reader.exact.get(_range(piece))
        if stored is None:
            rest.append(piece)
        else:
            reader.read(stored, piece_view(piece, image))
    return rest


def _read_resharded(reader: _Reader, wanted: Iterable[ShardPiece], image: memoryview) -> None:
    """Assemble each parameter that is needed in another cut; memory holds one at a time."""
    groups: dict[Parameter, list[ShardPiece]] = defaultdict(list)
    for piece in wanted:
        groups[_parameter(piece)].append(piece)
    for parameter, pieces in groups.items():
        whole = _assemble(reader, parameter, pieces[0])
        for piece in pieces:
            values = np.frombuffer(piece_view(piece, image), reshard.NUMPY_DTYPES[piece.dtype])
            reshard.take(whole, piece, values)


def _assemble(reader: _Reader, parameter: Parameter, wanted: ShardPiece) -> reshard.Array:
    stored = reader.by_parameter.get(parameter, [])
    where = (
        f"trainer.model: checkpoint {reader.storage.uri} does not fit this job: "
        f"{wanted.name} ({wanted.state})"
    )
    try:
        reshard.check_coverage(item.piece for item in stored)
    except CoverageError as error:
        raise RequestError(
            f"{where}: {error}; "
            "resume with the model and optimizer that wrote it, or in a new folder"
        ) from error
    have = stored[0].piece
    if (have.global_shape, have.dtype) != (wanted.global_shape, wanted.dtype):
        raise RequestError(
            f"{where} is {have.dtype} {have.global_shape} there and "
            f"{wanted.dtype} {wanted.global_shape} here; "
            "resume with the model and optimizer that wrote it, or in a new folder"
        )
    whole = np.empty(wanted.global_shape, reshard.NUMPY_DTYPES[wanted.dtype])
    for item in stored:
        buffer = bytearray((item.piece.flat_stop - item.piece.flat_start) * DTYPE_BYTES[have.dtype])
        reader.read(item, memoryview(buffer))
        reshard.put(whole, item.piece, np.frombuffer(buffer, whole.dtype))
    return whole


def _parameter(piece: ShardPiece) -> Parameter:
    return piece.name, piece.state


def _range(piece: ShardPiece) -> Range:
    return (
        piece.name,
        piece.state,
        piece.dtype,
        piece.global_shape,
        piece.start,
        piece.stop,
        piece.flat_start,
        piece.flat_stop,
    )
