"""Checkpoints on storage, written by the real writer without a daemon, for tests of readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale_checkpoint.checksums import checksum, piece_checksums
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.manifest import File, Manifest
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import SlotSeal
from megascale_checkpoint.save.persist import write_rank_file
from megascale_checkpoint.storage import FileStorage
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

Image = bytearray
STATES = ("master", "exp_avg", "exp_avg_sq")  # the same parameter has other values in each
# What a COMMIT has at the least, for tests that look at the log alone.
COMMIT = {
    "manifest": f"{manifests.step_folder(1, 10)}/{manifests.NAME}",
    "manifest_xxh3": checksum(b""),
}
Values = Mapping[str, NDArray[np.float32]]


def stored_plan(manifest_uri: str, step: int = 10) -> RestorePlan:
    """Restore the checkpoint with this manifest from storage."""
    return RestorePlan(RestoreSource.STORAGE, step, manifest_uri=manifest_uri)


def slot_bytes(pieces: Iterable[ShardPiece]) -> int:
    """Smallest slot that holds all pieces, rounded up to 4 KiB."""
    end = max((p.slot_offset_bytes + p.size_bytes for p in pieces), default=0)
    return -(-end // 4096) * 4096


def registration_of(
    uri: str,
    rank: int,
    world_size: int,
    layout: ShardLayout,
    attempt: int = 1,
    job: str = "job",
    committer: str = "none:0",
) -> RegisteredRank:
    """The registration of a worker."""
    info = {"tp": 1, "cp": 1, "dp": world_size, "pp": 1}
    return RegisteredRank(
        job,
        attempt,
        rank,
        world_size,
        uri,
        committer,
        2,
        layout=layout,
        digest=layout.digest(),
        layout_info=info,
    )


def image_of(layout: ShardLayout, values: Values) -> Image:
    """A slot image whose pieces are cut from whole parameters, in the slow and obvious way."""
    image = bytearray(layout.slot_bytes)
    for piece in layout.pieces:
        box = values[piece.name][
            tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
        ]
        state = STATES.index(piece.state)
        data = (
            box.flatten()[piece.flat_start : piece.flat_stop] + np.float32(0.25 * state)
        ).tobytes()
        image[piece.slot_offset_bytes : piece.slot_offset_bytes + len(data)] = data
    return image


def write_checkpoint(
    root: Path,
    layouts: Sequence[ShardLayout],
    values: Values,
    *,
    step: int = 10,
    attempt: int = 1,
    small_states: Sequence[dict[str, Any]] | None = None,
) -> str:
    """Write and commit one checkpoint of ``values`` below ``root``; returns the manifest's URI."""
    images = [image_of(layout, values) for layout in layouts]
    return write_images(
        root, layouts, images, step=step, attempt=attempt, small_states=small_states
    )


def write_images(
    root: Path,
    layouts: Sequence[ShardLayout],
    images: Sequence[Image],
    *,
    step: int = 10,
    attempt: int = 1,
    small_states: Sequence[dict[str, Any]] | None = None,
) -> str:
    """Write and commit a checkpoint of all ranks' slot images; returns the manifest's URI."""
    files, uri = [], str(root)
    for rank, layout in enumerate(layouts):
        registration = registration_of(uri, rank, len(layouts), layout, attempt)
        image = memoryview(images[rank])
        seal = SlotSeal(
            attempt, step, registration.digest, piece_checksums(layout, image), {"rank": rank}
        )
        (file,) = write_rank_file(registration, seal, image, Cancellation()).files
        files.append(File(file.path, file.size_bytes, file.xxh3, rank, registration.digest))
    states = dict(enumerate(small_states or [{"position": step}] * len(layouts)))
    manifest = Manifest(
        job="job",
        attempt=attempt,
        step=step,
        world_size=len(layouts),
        layout={},
        files=tuple(files),
        small_state=states[0],
        rank_small_states=manifests.differing(states),
        created_at=manifests.now(),
    )
    storage, data = FileStorage(root), manifests.encode(manifest)
    path = f"{manifests.step_folder(attempt, step)}/{manifests.NAME}"
    assert storage.create(path, data)
    log = CommitLog(storage)
    log.append_open(attempt, lambda: {"job": "job", "epoch": [1, 1]})
    fields = {"job": "job", "manifest": path, "manifest_xxh3": checksum(data)}
    log.append_commit(
        attempt, step, {**fields, "world_size": len(layouts), "size_bytes": manifest.size_bytes}
    )
    return f"{uri}/{path}"
