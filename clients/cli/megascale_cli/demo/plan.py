"""Layout, devices and job of a demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascale_job.visible import counted

Sabotage = Literal["none", "no-kill", "no-spare", "loss"]

BYTES_VOCABULARY = 257  # 256 byte values and end of document
MAX_STEPS = 60
SNAPSHOTS = 6  # of the whole run; the node is killed after the second
MIN_COMMITS_BEFORE_KILL = 2
FAULT_STEPS = 1_000_000  # more than the demo of a fault waits for
# TP2 x PP2 over two nodes of two GPUs, or TP2 x PP2 x DP2 over two nodes of four CPU ranks.
USUAL: dict[Literal["cuda", "cpu"], dict[str, Any]] = {
    "cuda": {"devices_per_node": 2, "tp": 2, "pp": 2, "dp": 1},
    "cpu": {"devices_per_node": 4, "tp": 2, "pp": 2, "dp": 2},
}


class PlanError(ValueError):
    """The options do not fit together; the message names them and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """One demo; ``nodes`` includes the spare, and tp * pp * dp ranks fill the other nodes.

    ``small``: the job of the faults, with 0.1 million parameters instead of 0.85.
    """

    device: Literal["cpu", "cuda"]
    nodes: int
    devices_per_node: int
    tp: int
    pp: int
    dp: int
    steps: int
    sabotage: Sabotage = "none"
    small: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.dp

    @property
    def active_nodes(self) -> int:
        """Nodes that the job fills."""
        return -(-self.world_size // self.devices_per_node)

    @property
    def interval_steps(self) -> int:
        """Steps between two snapshots."""
        return 20 if self.small else max(2, self.steps // SNAPSHOTS)

    @property
    def cluster(self) -> tuple[object, ...]:
        """The options of `megascale up`."""
        devices = ("--device", self.device, "--devices-per-node", self.devices_per_node)
        return ("--nodes", self.nodes, *devices)

    @property
    def text(self) -> str:
        """Ranks and layout, for people."""
        return (
            f"{counted(self.world_size, f'{self.device} rank')} (TP{self.tp} x PP{self.pp} x "
            f"DP{self.dp}), a checkpoint every {counted(self.interval_steps, 'step')}"
        )

    def kill_loses_steps(self, commits: int, last_step: int) -> bool:
        """Whether a kill now takes steps from a job with so many complete checkpoints.

        It does half an interval after a snapshot's step at the earliest: right after that step
        the snapshot may still become complete, and nothing would be lost.
        """
        half = self.interval_steps // 2
        return commits >= MIN_COMMITS_BEFORE_KILL and last_step % self.interval_steps >= half

    def check(self) -> None:
        """Raise PlanError where the sizes do not fit together."""
        ranks, one = counted(self.world_size, "rank"), self.world_size == 1
        if self.devices_per_node % self.tp:
            raise PlanError(
                "tensor parallelism stays inside a node: "
                f"--devices-per-node {self.devices_per_node} is not a multiple of --tp {self.tp}"
            )
        if self.world_size % self.devices_per_node:
            raise PlanError(
                f"tp {self.tp} * pp {self.pp} * dp {self.dp} = {ranks} "
                f"{'does' if one else 'do'} not fill nodes of "
                f"{counted(self.devices_per_node, 'device')}: "
                "change --devices-per-node or the layout"
            )
        if self.nodes <= self.active_nodes and self.sabotage != "no-spare":
            raise PlanError(
                f"{ranks} {'fills' if one else 'fill'} {counted(self.active_nodes, 'node')} and "
                f"one node must be spare: use --nodes {self.active_nodes + 1} or more"
            )
        if not SNAPSHOTS * 2 <= self.steps <= MAX_STEPS:
            raise PlanError(f"--steps {self.steps}: use {SNAPSHOTS * 2} to {MAX_STEPS}")

    def job(self, name: str, corpus: Path, checkpoints: Path) -> dict[str, Any]:
        """The job as plain values, trained on bytes of text."""
        on_gpu, overlap = self.device == "cuda", {"tp": True, "pp": True, "dp": True}
        layers, hidden_size, heads = (2, 64, 2) if self.small else (4, 128, 4)
        # More micro-batches on GPUs, so a step is long enough to be interrupted.
        micro_batches = self.dp * (32 if on_gpu else 2 if self.small else 4)
        model = {"layers": layers, "hidden_size": hidden_size, "heads": heads}
        trainer = {
            "model": {**model, "vocab_size": BYTES_VOCABULARY, "sequence_length": hidden_size},
            "data": {"sources": [{"prefix": str(corpus)}], "tokenizer": {"kind": "bytes"}},
            "parallelism": {"tp": self.tp, "pp": self.pp, "dp": self.dp, "overlap": overlap},
            "training": {
                "steps": self.steps,
                "global_batch_size": 2 * micro_batches,
                "micro_batch_size": 2,
                "precision": "bf16" if on_gpu else "fp32",
            },
            "optimizer": {"learning_rate": 2e-3},
            "schedule": {"warmup_steps": 4, "decay": "cosine"},
        }
        spares, timeout_s = self.nodes - self.active_nodes, 120 if self.small else 60
        return {
            "name": name,
            "owner": "demo",
            "trainer": trainer,
            "checkpoint": {"uri": str(checkpoints), "interval_steps": self.interval_steps},
            "recovery": {"spare_nodes": spares, "collective_timeout_s": timeout_s},
        }


def fault_plan(*, pipeline: bool) -> DemoPlan:
    """A demo of one fault: four CPU ranks on as many nodes; ``pipeline``: PP2 x DP2, else DP4.

    Where a rank hangs, the others wait through the pipeline and the data-parallel groups. To see
    which rank is slow, at least three have to do the same work.
    """
    pp, dp = (2, 2) if pipeline else (1, 4)
    layout: dict[str, Any] = {"nodes": 4, "devices_per_node": 1, "tp": 1, "pp": pp, "dp": dp}
    return DemoPlan(device="cpu", steps=FAULT_STEPS, small=True, **layout)


def choose_plan(
    device: Literal["auto", "cpu", "cuda"],
    gpus: int,
    steps: int,
    sabotage: Sabotage,
    **given: int | None,
) -> DemoPlan:
    """Choose what is not ``given``: GPUs if there are enough (six by default), else CPU.

    Args:
        given: nodes, devices_per_node, tp, pp and dp; None: the demo chooses.

    Raises:
        PlanError: the options do not fit together or the machine has too few GPUs.
    """
    fixed = {name: size for name, size in given.items() if size is not None}
    chosen = {}
    for kind, usual in USUAL.items():
        sizes = usual | fixed
        active_nodes = -(-sizes["tp"] * sizes["pp"] * sizes["dp"] // sizes["devices_per_node"])
        sizes.setdefault("nodes", active_nodes + (sabotage != "no-spare"))
        chosen[kind] = DemoPlan(device=kind, steps=steps, sabotage=sabotage, **sizes)
    on_gpu = chosen["cuda"]
    enough = gpus >= on_gpu.nodes * on_gpu.devices_per_node
    if device == "cuda" and not enough:
        on_gpu.check()
        raise PlanError(
            f"{counted(on_gpu.nodes, 'node')} of {on_gpu.devices_per_node} GPUs "
            f"are more than the {gpus} GPUs of this machine: "
            "use --devices-per-node 1 --tp 1 --pp 2, or --device cpu"
        )
    plan = on_gpu if device != "cpu" and enough else chosen["cpu"]
    plan.check()
    return plan
