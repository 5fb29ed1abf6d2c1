"""Spans of real runs as test data: recorded by the trainer's own timers, kept in a small file.

    python -m tests.harness.recorded_spans --steps 1120 --output tests/data/spans/cpu-dp4.json.z

records a tiny job of four ranks on this host's CPU, each taken for a node of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.ranks import rank_pool

from megascale_common.node.spans.ring import SpanRingReader, SpanRingWriter
from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.table import SpanTable

RANKS = 4
CPU_DP4 = Path(__file__).resolve().parents[1] / "data/spans/cpu-dp4.json.z"


def record_rank(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], steps: int
) -> dict[str, str]:
    """Program of one rank: train ``steps`` steps with timers, return what they measured."""
    from tests.harness import training

    from megascale_job.loading import from_accepted
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
    return recorded.rank_entry(reader.ops(), data)


def read(path: Path) -> SpanTable:
    """The recorded spans; each rank is a node of its own, and the layout data parallel."""
    return recorded.load(path.read_bytes()).table


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
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(recorded.dump(ranks))
    table = read(options.output)
    size = options.output.stat().st_size
    print(f"{len(table)} spans, {size} bytes in {options.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
