"""Spans of real runs as test data: recorded by the trainer's own timers, kept in a small file.

    python -m tests.harness.recorded_spans --steps 1120 --output tests/data/spans/cpu-dp4.json.z

records a tiny job of four ranks on this host's CPU, each taken for a node of its own.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from tests.harness.ranks import rank_pool

from megascale_common.job.rank_layout import RankLayout
from megascale_common.node.spans import ops, record
from megascale_common.node.spans.ring import SpanRingReader, SpanRingWriter
from megascale_driver.analysis.spans.table import SpanTable

RANKS = 4
CPU_DP4 = Path(__file__).resolve().parents[1] / "data/spans/cpu-dp4.json.z"


def record_rank(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Program of one rank: train ``steps`` steps with timers, return what they measured."""
    from tests.harness import training

    from megascale_common.job.config import from_accepted
    from megascale_trainer.process.bootstrap import destroy_groups
    from megascale_trainer.telemetry.timer import step_timer
    from megascale_trainer.trainer import Trainer

    config, device = from_accepted(job), training.device_of(rank)
    path = folder / f"spans-{rank}"
    ring = SpanRingWriter(path, rank=rank, attempt=1, capacity=1 << 16)
    groups = training._groups(config, rank, folder)
    timer = step_timer(ring, "phases", device)
    trainer = Trainer(config, rank, groups, device, timer=timer)
    trainer.initialise()
    timer.begin_step(0)  # the first step is a warm-up
    training.step(trainer, rank).read()
    for number in range(1, steps + 1):
        timer.begin_step(number)
        training.step(trainer, rank).read()
    timer.close()
    destroy_groups()
    reader = SpanRingReader(path)
    data = reader.take(1 << 16)
    assert reader.dropped == 0
    columns = base64.b64encode(record.to_columns(data)).decode()
    return {"ops": ops.dump(reader.ops()).decode(), "columns": columns}


def write(path: Path, ranks: list[dict[str, Any]]) -> None:
    """Keep what :func:`record_rank` of each rank returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zlib.compress(json.dumps(ranks).encode(), 9))


def read(path: Path) -> SpanTable:
    """The recorded spans; each rank is a node of its own, and the layout data parallel."""
    ranks = json.loads(zlib.decompress(path.read_bytes()))
    return SpanTable.of_records(
        [
            (
                rank,
                record.from_columns(base64.b64decode(found["columns"])),
                ops.load(found["ops"].encode()),
            )
            for rank, found in enumerate(ranks)
        ],
        RankLayout(dp=len(ranks)),
        [f"n{rank + 1}" for rank in range(len(ranks))],
    )


def main() -> None:
    """Record and write."""
    from tests.harness.training import tiny_job

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1120)
    parser.add_argument("--output", type=Path, default=CPU_DP4)
    options = parser.parse_args()
    job = tiny_job(parallelism={"dp": RANKS}, training={"steps": options.steps + 1})
    with tempfile.TemporaryDirectory() as folder, rank_pool() as pool:
        ranks = pool.run(
            "tests.harness.recorded_spans:record_rank",
            RANKS,
            Path(folder),
            job=job,
            steps=options.steps,
        )
    write(options.output, ranks)
    table = read(options.output)
    size = options.output.stat().st_size
    print(f"{len(table)} spans, {size} bytes in {options.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
