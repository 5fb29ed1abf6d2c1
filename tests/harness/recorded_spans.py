"""Spans of real runs as test data: recorded by the trainer's own timers, kept in a small file.

    python -m tests.harness.recorded_spans --steps 1120 --output tests/data/spans/cpu-dp4.json.z

records a tiny job of four ranks on this host's CPU, each taken for a node of its own.

    python -m tests.harness.recorded_spans --hot

records one with experts instead, whose router prefers those of rank HOT_RANK by HOT_BIAS.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.harness.ranks import rank_pool

from megascale_common.node.spans.ring import SpanRingReader, SpanRingWriter
from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.table import SpanTable

RANKS = 4
DATA = Path(__file__).resolve().parents[1] / "data/spans"
CPU_DP4, CPU_EP4_HOT = DATA / "cpu-dp4.json.z", DATA / "cpu-ep4-hot.json.z"
HOT_RANK, HOT_BIAS = 2, 0.06
SERIAL = {"layers": 4, "block": "serial", "mlp": "swiglu", "bias": False, "sequence_length": 128}
EXPERTS: dict[str, Any] = {"count": 8, "ffn_size": 256, "bias_rate": 1e-6}


def record_rank(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], steps: int
) -> dict[str, str]:
    """Program of one rank: train ``steps`` steps with timers, return what they measured."""
    from tests.harness import training

    from megascale_job.loading import from_accepted
    from megascale_trainer.process.bootstrap import destroy_groups
    from megascale_trainer.process.expert_loads import ExpertLoads
    from megascale_trainer.telemetry.timer import step_timer
    from megascale_trainer.trainer import Trainer

    config, device = from_accepted(job), training.device_of(rank)
    path = folder / f"spans-{rank}"
    ring = SpanRingWriter(path, rank=rank, attempt=1, capacity=1 << 16)
    groups = training._groups(config, rank, folder)
    timer = step_timer(ring, "phases", device)
    trainer = Trainer(config, rank, groups, device, timer=timer)
    trainer.initialise()
    if config.model.experts.count:
        _prefer(config.model.experts.count, RANKS)
    loads = ExpertLoads(config, rank)
    timer.begin_step(0)  # the first step is a warm-up
    training.step(trainer, rank).read()
    for number in range(1, steps + 1):
        timer.begin_step(number)
        record = training.step(trainer, rank).read()
        # The warm-up was the trainer's first step.
        loads.pass_on(replace(record, step=number), timer)
    timer.close()
    destroy_groups()
    reader = SpanRingReader(path)
    data = reader.take(1 << 16)
    assert reader.dropped == 0
    return recorded.rank_entry(reader.ops(), data)


def _prefer(count: int, ranks: int) -> None:
    """Have routers choose the experts of HOT_RANK more often than others."""
    import torch

    from megascale_trainer.parallel.expert.experts import ExpertParallel

    preferred = torch.zeros(count)
    preferred[HOT_RANK * count // ranks : (HOT_RANK + 1) * count // ranks] = HOT_BIAS
    route = ExpertParallel.route

    def hot(self: Any, x: Any, weight: Any, bias: Any, *rest: Any, **named: Any) -> Any:
        return route(self, x, weight, bias + preferred, *rest, **named)

    ExpertParallel.route = hot  # type: ignore[method-assign]


def read(path: Path) -> SpanTable:
    """The recorded spans; each rank is a node of its own, and the layout data parallel."""
    return recorded.load(path.read_bytes()).table


def main() -> None:
    """Record and write."""
    from tests.harness.training import tiny_job

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1120)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--hot", action="store_true")
    options = parser.parse_args()
    sizes, training = {"dp": RANKS}, {"steps": options.steps + 1}
    job = tiny_job(parallelism=sizes, training=training)
    if options.hot:
        job = tiny_job(
            model={**SERIAL, "experts": EXPERTS},
            parallelism={**sizes, "ep": RANKS},
            training={**training, "global_batch_size": 32, "micro_batch_size": 4},
        )
    output = options.output or (CPU_EP4_HOT if options.hot else CPU_DP4)
    with tempfile.TemporaryDirectory() as folder, rank_pool() as pool:
        ranks = pool.run(
            "tests.harness.recorded_spans:record_rank",
            RANKS,
            Path(folder),
            job=job,
            steps=options.steps,
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    layout = {"dp": RANKS, "ep": RANKS if options.hot else 1}
    output.write_bytes(recorded.dump({"ranks": ranks, "layout": layout} if options.hot else ranks))
    table = read(output)
    print(f"{len(table)} spans, {output.stat().st_size} bytes in {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
