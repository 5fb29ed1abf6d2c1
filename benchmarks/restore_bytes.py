"""What a restore reads from storage, and what the ranks send each other, for pairs of layouts.

    python benchmarks/restore_bytes.py                              # 45 pairs of a 7B model
    python benchmarks/restore_bytes.py --preset 175b --write tp8,pp8,dp16 --read tp8,pp16,dp8
    python benchmarks/restore_bytes.py --preset 175b --write tp8,pp8,dp16 --read tp8,pp8,dp16 \\
        --lost 8

The plan alone, which is exact: the trainer reads what it says, and tests count that. For each pair:
bytes read over distinct bytes, the most that one rank reads over the mean, the share that is sent
on to another rank, the rounds, and the time of the plan on one core (every rank makes it; the
index of the files and the ranks' needs are given). With --lost N all ranks but N have their state
in memory. The last line of stdout is one JSON object. Exit status: 0, 1 if a pair reads more than
1.05 times the distinct bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from megascale_job.loading import from_accepted
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.parameter_table import parameter_table, shard_layout
from megascale_job.sizes.read_plan import (
    BYTES,
    FROM,
    TO,
    Rounds,
    Runs,
    chunk_bytes,
    decode,
    encode,
    join,
    plan_reads,
    runs_of,
)

# layers, hidden size, heads, vocabulary
PRESETS = {
    "tiny": (4, 128, 4, 1024),
    "7b": (32, 4096, 32, 32768),
    "175b": (96, 12288, 96, 51200),
}
GRIDS = (
    *("dp1", "tp2,dp2", "pp2,dp4", "dp8", "tp2,dp16", "dp32", "dp64"),
    *("tp4", "tp2,pp2,virtual_stages2", "pp4,dp2"),
)
MOST_READ = 1.05
WINDOW_BYTES = 16 << 20  # of megascale_trainer.save.stored_state


def layouts(preset: str, grid: str) -> list[ShardLayout]:
    """The slot layout of every rank; ``grid`` is such as tp2,dp4."""
    count, hidden, heads, vocabulary = PRESETS[preset]
    model = {"layers": count, "hidden_size": hidden, "heads": heads, "vocab_size": vocabulary}
    parallelism = {
        part.rstrip("0123456789"): int(part.lstrip("_abcdefghijklmnopqrstuvwxyz"))
        for part in grid.split(",")
    }
    config = from_accepted(
        {
            "name": "restore",
            "model": {**model, "sequence_length": 2048},
            "training": {"steps": 1, "global_batch_size": 1024},
            "parallelism": parallelism,
        }
    )
    return [shard_layout(parameter_table(config, rank)) for rank in range(config.layout.world_size)]


def needs(found: list[ShardLayout]) -> list[bytes]:
    """What each rank needs, as it sends it to the others."""
    return [encode(runs_of(layout.pieces, rank)) for rank, layout in enumerate(found)]


def index(found: list[ShardLayout]) -> list[bytes]:
    """What each rank's file holds, as its reader sends it to the others."""
    tables: list[Runs] = []
    for rank, layout in enumerate(found):
        pieces = [piece for piece in layout.pieces if piece.primary and piece.size_bytes]
        counts = [-(-piece.size_bytes // chunk_bytes(piece.size_bytes)) for piece in pieces]
        chunks = [["0" * 32] * count if count > 1 else [] for count in counts]
        tables.append(runs_of(pieces, rank, ["0" * 32] * len(pieces), chunks))
    return [encode(table) for table in tables]


def measure(write: str, read: str, stored: list[bytes], wanted: list[bytes], lost: int) -> Any:
    """The figures of one pair."""
    world = len(wanted)
    in_memory = [lost > 0 and rank < world - lost for rank in range(world)]
    began_s = time.monotonic()
    plan = plan_reads(join([*map(decode, stored)]), join([*map(decode, wanted)]), in_memory)
    rounds = Rounds(plan, WINDOW_BYTES)
    of_one = sum(1 for _ in rounds.of_rank(world - 1))
    spent_s = time.monotonic() - began_s
    total, moved = int(plan.storage_bytes.sum()), plan.copies[:, FROM] != plan.copies[:, TO]
    return {
        "write": write,
        "read": read,
        "ranks": world,
        "distinct_bytes": plan.distinct_bytes,
        "read_over_distinct": round(total / max(1, plan.distinct_bytes), 4),
        "most_over_mean": round(int(plan.storage_bytes.max()) * world / max(1, total), 3),
        "sent_share": round(int(plan.copies[moved, BYTES].sum()) / max(1, total), 3),
        "rounds": of_one,
        "plan_s": round(spent_s, 3),
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="7b")
    parser.add_argument("--write", help="the layout that wrote, such as tp2,dp4 (default: pairs)")
    parser.add_argument("--read", help="the layout that restores")
    parser.add_argument("--lost", type=int, default=0, help="ranks without their memory; 0: all")
    arguments = parser.parse_args()
    if bool(arguments.write) != bool(arguments.read):
        parser.error("give --write and --read, or neither")
    pairs = [*itertools.combinations(GRIDS, 2)]
    if arguments.write:
        pairs = [(arguments.write, arguments.read)]
    tables = {grid: layouts(arguments.preset, grid) for grid in {*itertools.chain(*pairs)}}
    rows = []
    for write, read in pairs:
        stored, wanted = index(tables[write]), needs(tables[read])
        rows.append(measure(write, read, stored, wanted, arguments.lost))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    most = max(row["read_over_distinct"] for row in rows)
    print(json.dumps({"preset": arguments.preset, "most_read_over_distinct": most, "pairs": rows}))
    return int(most > MOST_READ)


if __name__ == "__main__":
    raise SystemExit(main())
