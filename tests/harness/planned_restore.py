"""A planned restore of all ranks in one process: the real rounds, bytes in place of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale_job.loading import from_accepted
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.parameter_table import parameter_table, shard_layout
from megascale_job.sizes.read_plan import (
    IN_MEMORY,
    ReadPlan,
    Round,
    Rounds,
    Runs,
    chunk_bytes,
    decode,
    encode,
    join,
    plan_reads,
    runs_of,
)


def trainer_layouts(model: dict[str, Any], parallelism: dict[str, Any]) -> list[ShardLayout]:
    """The slot layout of every rank of a job."""
    training = {"steps": 1, "global_batch_size": 64}
    values = {"name": "t", "model": model, "training": training, "parallelism": parallelism}
    config = from_accepted(values)
    return [shard_layout(parameter_table(config, r)) for r in range(config.layout.world_size)]


def wanted_runs(layouts: Sequence[ShardLayout]) -> Runs:
    """What all ranks need, as they learn it from each other."""
    return join([decode(encode(runs_of(o.pieces, r))) for r, o in enumerate(layouts)])


def stored_runs(layouts: Sequence[ShardLayout]) -> Runs:
    """What ranks of these layouts store, the slot images themselves standing for files."""
    tables = []
    for rank, layout in enumerate(layouts):
        pieces = [piece for piece in layout.pieces if piece.primary and piece.size_bytes]
        # No bytes are verified here: the checksum only has to arrive as it was.
        digests = [f"{rank + (255 << 120):032x}" for _ in pieces]
        counts = [-(-piece.size_bytes // chunk_bytes(piece.size_bytes)) for piece in pieces]
        chunks = [digests[:1] * count if count > 1 else () for count in counts]
        tables.append(decode(encode(runs_of(pieces, rank, digests, chunks))))
    return join(tables)


@dataclass
class Restored:
    """What a planned restore did: every rank's state, and what moved."""

    plan: ReadPlan
    images: list[bytearray]
    read_bytes: list[int] = field(default_factory=list)
    units_read: dict[tuple[int, int], int] = field(default_factory=dict)
    most_received: int = 0
    most_sent: int = 0


def restore_all(
    written: Sequence[ShardLayout],
    files: Sequence[bytearray],
    layouts: Sequence[ShardLayout],
    memories: dict[int, bytearray] | None = None,
    window_bytes: int = 4096,
) -> Restored:
    """Restore every rank of ``layouts`` from ``files``, the images of ranks of ``written``.

    ``memories``: the images of those ranks that have theirs in memory.
    """
    kept = memories or {}
    in_memory = [rank in kept for rank in range(len(layouts))]
    plan = plan_reads(stored_runs(written), wanted_runs(layouts), in_memory)
    images = [bytearray(kept.get(rank, bytes(o.slot_bytes))) for rank, o in enumerate(layouts)]
    done = Restored(plan, images, [0] * len(layouts))
    rounds = Rounds(plan, window_bytes)
    programs = [list(rounds.of_rank(rank)) for rank in range(len(layouts))]
    assert all(len(program) == rounds.count for program in programs)
    for number in range(rounds.count):
        _one_round(done, [program[number] for program in programs], files, kept)
    return done


def _one_round(
    done: Restored,
    rounds: list[Round],
    files: Sequence[bytearray],
    kept: dict[int, bytearray],
) -> None:
    outgoing: dict[tuple[int, int], bytes] = {}
    for rank, of_rank in enumerate(rounds):
        window = _window(done, rank, of_rank, files, kept)
        for at, target, size in of_rank.kept.tolist():
            done.images[rank][target : target + size] = window[at : at + size]
        buffer = b"".join(window[at : at + size] for at, size in of_rank.sent.tolist())
        done.most_sent = max(done.most_sent, len(buffer))
        begin = 0
        for peer, size in enumerate(of_rank.send_bytes.tolist()):
            outgoing[rank, peer] = buffer[begin : begin + size]
            begin += size
    for rank, of_rank in enumerate(rounds):
        received = b"".join(outgoing[peer, rank] for peer in range(len(rounds)))
        assert len(received) == int(of_rank.receive_bytes.sum())
        assert of_rank.exchanged or not received
        done.most_received = max(done.most_received, len(received))
        begin = 0
        for target, size in of_rank.received.tolist():
            done.images[rank][target : target + size] = received[begin : begin + size]
            begin += size


def _window(
    done: Restored,
    rank: int,
    of_rank: Round,
    files: Sequence[bytearray],
    kept: dict[int, bytearray],
) -> bytes:
    window = bytearray()
    for read in of_rank.reads:
        assert read.at == len(window), "a window has no holes"
        source = kept[rank] if read.file == IN_MEMORY else files[read.file]
        window += source[read.first + read.start : read.first + read.stop]
        if read.file != IN_MEMORY:
            assert read.checksum == f"{read.file + (255 << 120):032x}"
            key = (read.file, read.first)
            assert done.units_read.get(key, 0) == read.start, "units are read from first to last"
            done.units_read[key] = read.stop
            done.read_bytes[rank] += read.stop - read.start
    return bytes(window)
