"""One rank of start_timeline.py: starts, trains two steps, prints its times as one JSON object."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from benchmarks.batches import Batches
from benchmarks.presets import Run, job

from megascale_job.config import JobConfig
from megascale_trainer.parallel.groups import Group, Groups
from megascale_trainer.process import bootstrap
from megascale_trainer.process.group_plan import PlannedGroup, group_plan
from megascale_trainer.telemetry.timer import Timeline
from megascale_trainer.trainer import Trainer

TIMEOUT_S = 60.0
HOST = "127.0.0.1"


class TimedFactory(bootstrap._Factory):
    """Notes the seconds of each group. It takes the place of the trainer's own."""

    seconds: dict[str, float] = {}  # noqa: RUF012 - one rank, one process

    def make(self, planned: PlannedGroup) -> Group | None:
        began_s = time.monotonic()
        group = super().make(planned)
        name = planned.name or f"alone {len(self.seconds)}"
        self.seconds[name] = round(time.monotonic() - began_s, 3)
        return group


class PlainFactory(TimedFactory):
    """torch's way: every rank makes every group of the job, with a barrier behind each."""

    def make_all(self, ring: bool) -> dict[str, Group | None]:
        """All groups of the job, in one order on all ranks; returns this rank's."""
        layout = self._layout
        planned = dict.fromkeys(
            (each.name, each.ranks, each.kind)
            for rank in range(layout.world_size)
            for each in group_plan(layout, rank, ring=ring)
            if each.kind != "alone"
        )
        own = {each.name: each for each in group_plan(layout, self._rank, ring=ring)}
        made: dict[str, Group | None] = {}
        for number, (name, ranks, kind) in enumerate(planned):
            began_s = time.monotonic()
            blocks = bootstrap._EDGE_BLOCKS if kind == "edge" else 0
            handle = dist.new_group(
                list(ranks), timeout=self._timeout, pg_options=self._options(blocks)
            )
            dist.barrier()
            if self._rank in ranks:
                made[name] = group = Group(name, ranks, self._rank, handle, self._status)
                if kind == "edge":
                    self._exchange(group, sends=own[name].sends)
                else:
                    group.all_reduce(torch.zeros(1, device=self._device))
            self.seconds[f"{number} {name}"] = round(time.monotonic() - began_s, 3)
        return made


def plain_groups(
    config: JobConfig, rank: int, store: Any, device: torch.device, timeline: Timeline
) -> Groups:
    """What :func:`bootstrap.create_groups` returns, made torch's way."""
    layout, ring = config.layout, config.parallelism.virtual_stages > 1
    with timeline.part("world"):
        factory = PlainFactory(layout, rank, bootstrap.Rendezvous(store, device, TIMEOUT_S))
        world = factory.world()
    with timeline.part("groups"):
        made = factory.make_all(ring)
    with timeline.part("all ranks"):
        dist.barrier()
    alone = {axis: Group(axis, (rank,), rank, None, None) for axis in ("tp", "dp")}
    edges = bootstrap._edges(layout.coordinates(rank).pp, layout.pp - 1, made)
    return Groups(world, made.get("tp") or alone["tp"], made.get("dp") or alone["dp"], edges, None)


def main() -> int:
    """Start, train, print."""
    rank, began_s = int(os.environ["RANK"]), float(os.environ["BEGAN_S"])
    order = json.loads(sys.argv[1])
    timeline = Timeline()
    timeline.seconds["imports"] = time.monotonic() - began_s
    cuda = order["device"] == "cuda"
    with timeline.part("device"):
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
    run = Run(
        preset=order["preset"], layers=order["layers"], steps=10,
        kernels="triton" if cuda else "torch", **order["layout"],
    )  # fmt: skip
    config = job(run, 4, cuda=cuda)
    with timeline.part("store"):
        store = dist.TCPStore(
            HOST, order["port"], 4, rank == 0, timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        )
    if order["mode"] == "plain":
        groups = plain_groups(config, rank, store, device, timeline)
    else:
        bootstrap._Factory = TimedFactory  # type: ignore[misc]
        ring = config.parallelism.virtual_stages > 1
        groups = bootstrap.create_groups(
            config.layout,
            rank,
            bootstrap.Rendezvous(store, device, TIMEOUT_S),
            ring=ring,
            timeline=timeline,
        )
    with timeline.part("build"):
        trainer = Trainer(config, rank, groups, device)
    with timeline.part("initial values"):
        trainer.initialise()
    with timeline.part("batches"):
        batches = Batches(config, rank, device)
    ready_s = time.monotonic() - began_s
    done_s = []
    for name in ("first step", "second step"):
        with timeline.part(name):
            trainer.train_step(batches.step(trainer.step)).read()
            if cuda:
                torch.cuda.synchronize()
        done_s.append(time.monotonic() - began_s)
    answer = {
        "phases": timeline.seconds, "groups": TimedFactory.seconds, "ready_s": ready_s,
        "first_step_done_s": done_s[0],
    }  # fmt: skip
    print(json.dumps(answer), flush=True)
    bootstrap.destroy_groups()
    return 0


if __name__ == "__main__":
    sys.exit(main())
