"""Writes a complete checkpoint of step 0, from which a job starts with imported weights.

It is an ordinary checkpoint in a folder of its own: rank files, manifest, commit log. A job names
the folder as checkpoint.load_uri. Optimizer states are zeros, as at the start of a run. The small
state has no random state, so each rank keeps the one from its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from megascale_checkpoint.checksums import CHUNK_BYTES, checksum
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.manifest import File, Manifest
from megascale_checkpoint.commit.restore_decision import RestoreDecision
from megascale_checkpoint.commit.shard_file import Origin, encode_header
from megascale_checkpoint.export.output import Report
from megascale_checkpoint.export.stored import MODEL
from megascale_checkpoint.export.tokenizer_files import TOKENIZER
from megascale_checkpoint.export.values import Floats
from megascale_checkpoint.storage import Storage, join, open_storage
from megascale_common.service.errors import ExistsError
from megascale_job.config import ModelConfig, model_values
from megascale_job.restore import RestorePlan
from megascale_job.sizes.checkpoint_layout import DTYPE_BYTES, MASTER, ShardLayout, ShardPiece
from megascale_job.sizes.parameter_table import DEFAULT_STATES

JOB = "imported"  # in place of a job's name in the log's records
STEP = 0
FILE_BYTES = 8 << 30  # of one file with all states; several files, because many ranks read at once
_ZEROS = memoryview(bytes(CHUNK_BYTES))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in its global ``shape``; ``read`` is called twice.

    ``part``: the first value and the end of the part that ``read`` returns, in the flattened
    parameter, of which the other parts are parameters of the same name; None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Floats]
    part: tuple[int, int] | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """``part``, or that of the whole parameter."""
        return self.part or (0, math.prod(self.shape))

    @property
    def size_bytes(self) -> int:
        """Bytes of one of its states."""
        first, last = self.bounds
        return (last - first) * DTYPE_BYTES["float32"]


def write_first_checkpoint(
    uri: str,
    model: ModelConfig,
    parameters: Sequence[Parameter],
    progress: Report,
    file_bytes: int = FILE_BYTES,
    tokenizer: Mapping[str, Any] | None = None,
) -> str:
    """Write and commit the checkpoint of step 0 below ``uri``; return its manifest's address.

    ``tokenizer`` is stored in it for exports (:mod:`megascale_checkpoint.export.tokenizer_files`).

    Memory holds one parameter at a time. The COMMIT comes last: an interrupted import leaves no
    checkpoint, and a repeated call starts over in another attempt's folder.

    Raises:
        ExistsError: ``uri`` holds checkpoints, or belongs to a job.
        RequestError: the uri is not supported.
        ServiceError: the commit log is damaged.
        SupersededError: another import has begun in the same folder.
        OSError: a file cannot be read or written.
    """
    storage = open_storage(uri)
    log, attempt = _opened(storage)
    groups = _groups(parameters, file_bytes)
    folder = manifests.step_folder(attempt, STEP)
    total, done = 2 * sum(each.size_bytes for each in parameters), 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    files = tuple(
        _write_file(storage, folder, Origin(JOB, attempt, STEP, rank), group, count)
        for rank, group in enumerate(groups)
    )
    manifest = Manifest(
        job=JOB,
        attempt=attempt,
        step=STEP,
        world_size=len(files),
        layout={"tp": 1, "cp": 1, "dp": 1, "pp": len(files), "vpp": 1},
        files=files,
        small_state={
            "skipped_updates": 0,
            "consumed_samples": 0,
            MODEL: model_values(model),
            TOKENIZER: dict(tokenizer or {}),
        },
        rank_small_states={},
        created_at=manifests.now(),
    )
    # Order as in the committer: rank files, then the manifest, then the COMMIT.
    path = f"{folder}/{manifests.NAME}"
    data = manifests.write(storage, path, manifest)
    log.append_commit(attempt, STEP, manifests.commit_fields(manifest, path, data))
    return join(uri, path)


def _opened(storage: Storage) -> tuple[CommitLog, int]:
    """The log with an attempt opened in it, and the attempt's number."""
    log = CommitLog(storage)
    log.refresh()
    log.refuse_damaged()
    owner = next((job for job in log.state.jobs if job != JOB), None)
    if owner is not None or log.commits():
        held = f"belongs to job {owner}" if owner is not None else "holds a checkpoint"
        raise ExistsError(f"--to: {storage.uri} {held}: give a folder of its own")
    # A new attempt also after an interrupted import, which it fences.
    attempt = log.state.attempt + 1

    def fields() -> dict[str, Any]:
        nothing = RestoreDecision(RestorePlan()).to_record()
        return {"job": JOB, "world_size": 1, "epoch": [0, 0], "restored_from": nothing}

    log.append_open(attempt, fields)
    return log, attempt


def _groups(parameters: Sequence[Parameter], file_bytes: int) -> list[list[Parameter]]:
    """Parameters in order, cut so that a group's states are at most ``file_bytes`` (or one)."""
    groups: list[list[Parameter]] = [[]]
    room = file_bytes
    for parameter in parameters:
        size = parameter.size_bytes * len(DEFAULT_STATES)
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(parameter)
        room -= size
    return groups


def _write_file(
    storage: Storage,
    folder: str,
    origin: Origin,
    parameters: Sequence[Parameter],
    count: Callable[[int], None],
) -> File:
    # The header comes first and holds every piece's checksum, so values are read twice.
    pieces, offset = [], 0
    for state in DEFAULT_STATES:
        for parameter in parameters:
            piece = _piece(parameter, state, offset)
            offset += piece.size_bytes
            # Optimizer states are zeros, whose checksum needs no memory for them.
            if state == MASTER:
                digest = checksum(_bytes(parameter.read()))
                count(piece.size_bytes)
            else:
                digest = _checksum_of_zeros(piece.size_bytes)
            pieces.append((piece, digest))
    header, hasher, size = encode_header(origin, pieces), xxhash.xxh3_128(), 0

    def chunks() -> Iterator[memoryview]:
        nonlocal size
        for chunk in _file_chunks(header, parameters, count):
            hasher.update(chunk)
            size += len(chunk)
            yield chunk

    name = manifests.rank_file(origin.rank)
    storage.write(f"{folder}/{name}", chunks())
    layout = ShardLayout(tuple(piece for piece, _ in pieces), offset)
    return File(name, size, hasher.hexdigest(), origin.rank, layout.digest())


def _file_chunks(
    header: bytes, parameters: Sequence[Parameter], count: Callable[[int], None]
) -> Iterator[memoryview]:
    yield memoryview(header)
    for parameter in parameters:
        data = _bytes(parameter.read())
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
        count(len(data))
    for _ in DEFAULT_STATES[1:]:
        for parameter in parameters:
            yield from _zeros(parameter.size_bytes)


def _piece(parameter: Parameter, state: str, offset: int) -> ShardPiece:
    return ShardPiece(
        name=parameter.name,
        state=state,
        dtype="float32",
        global_shape=parameter.shape,
        start=(0,) * len(parameter.shape),
        stop=parameter.shape,
        flat_start=parameter.bounds[0],
        flat_stop=parameter.bounds[1],
        slot_offset_bytes=offset,
        primary=True,
    )


def _bytes(values: Floats) -> memoryview:
    return values.reshape(-1).data.cast("B")


def _zeros(size: int) -> Iterator[memoryview]:
    for start in range(0, size, CHUNK_BYTES):
        yield _ZEROS[: min(CHUNK_BYTES, size - start)]


def _checksum_of_zeros(size: int) -> str:
    hasher = xxhash.xxh3_128()
    for chunk in _zeros(size):
        hasher.update(chunk)
    return str(hasher.hexdigest())
