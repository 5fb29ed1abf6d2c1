"""Fill a slot from storage, in the layout of the rank that asks, whatever layout wrote the
checkpoint.

A piece that was stored as it is wanted is read straight into the slot. For anything else the whole
parameter is put together from all its stored pieces and cut again, one parameter at a time. Every
piece that is read is verified against its checksum, and every file that is looked into against its
size: all files were, once, when the attempt was opened, and ten thousand ranks need not each look
at ten thousand files.
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
from megascale_checkpoint.errors import DamagedError, RequestError
from megascale_checkpoint.manifest import File, Manifest
from megascale_checkpoint.shard_file import Origin, StoredPiece, read_exactly, read_header
from megascale_checkpoint.storage import Storage
from megascale_common.sizes.checkpoint_layout import DTYPE_BYTES, ShardLayout, ShardPiece

Range = tuple[Any, ...]
Parameter = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Filled:
    """What :func:`fill` did: the rank's small state, and the bytes of tensors that were read for
    it.
    """

    small_state: dict[str, Any]
    bytes_read: int


def fill(
    manifest_uri: str,
    job_step: int,
    rank: int,
    layout: ShardLayout,
    image: memoryview,
    cancelled: Cancellation | None = None,
) -> Filled:
    """Read a checkpoint into ``image``, a slot of ``layout``. Bytes between the pieces are set to
    0. Blocks.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        RequestError: the checkpoint is whole but of another model, the uri is not supported, or
            there is no manifest.
        SupersededError: cancelled.
        OSError: the storage does not answer.
    """
    try:
        storage, manifest = manifests.load(manifest_uri)
    except manifests.MissingError as error:
        # The committer has just read it: that it is not here says something about this node, not
        # about the checkpoint.
        raise RequestError(
            f"{error} on this node: is the checkpoint folder shared by all nodes?"
        ) from error
    if manifest.step != job_step:
        raise DamagedError(manifest_uri, f"is of step {manifest.step}, not {job_step}")
    # A piece may be shorter than its place (padding); the trainer counts on zeros there.
    np.frombuffer(image, np.uint8)[:] = 0
    reader = _Reader(storage, manifest, cancelled or Cancellation())
    rest = _read_exact(reader, rank, layout, image)
    _read_resharded(reader, rest, image)
    return Filled(manifest.small_state_of(rank, layout.digest()), reader.bytes_read)


@dataclass(slots=True)
class _Reader:
    """Stored pieces of a checkpoint, found file by file as they are needed."""

    storage: Storage
    manifest: Manifest
    cancelled: Cancellation
    bytes_read: int = 0
    exact: dict[Range, StoredPiece] = field(default_factory=dict)
    by_parameter: dict[Parameter, list[StoredPiece]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _seen: set[str] = field(default_factory=set)

    def look_into(self, file: File) -> None:
        """Take in a file's header."""
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
    """Read what was stored just as it is wanted; return the other pieces.

    Files are looked into from the own rank's downwards: in the same layout all is in the own one,
    but for what is replicated over tensor parallelism, which the nearest rank below wrote (tp is
    the innermost axis).
    """
    wanted = [piece for piece in layout.pieces if piece.size_bytes]
    for file in sorted(
        reader.manifest.files, key=lambda file: (rank - file.rank) % reader.manifest.world_size
    ):
        if all(_range(piece) in reader.exact for piece in wanted):
            break
        reader.look_into(file)
    rest = []
    for piece in wanted:
        stored = reader.exact.get(_range(piece))
        if stored is None:
            rest.append(piece)
        else:
            reader.read(stored, piece_view(piece, image))
    return rest


def _read_resharded(reader: _Reader, wanted: Iterable[ShardPiece], image: memoryview) -> None:
    """Put each parameter together that is wanted in another cut; memory holds one at a time."""
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
    where = f"checkpoint {reader.storage.uri} does not fit this job: {wanted.name} ({wanted.state})"
    try:
        reshard.check_coverage(item.piece for item in stored)
    except reshard.CoverageError as error:
        raise RequestError(
            f"{where}: {error}; resume with the model that wrote it, or in a new folder"
        ) from error
    have = stored[0].piece
    if (have.global_shape, have.dtype) != (wanted.global_shape, wanted.dtype):
        raise RequestError(
            f"{where} is {have.dtype} {have.global_shape} there and {wanted.dtype} {wanted.global_shape} here; "
            "resume with the model that wrote it, or in a new folder"
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
