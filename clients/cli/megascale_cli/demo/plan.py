"""What the demos run: their devices and layout, and the jobs that they submit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascale_cli.demo.cluster import ClusterPlan
from megascale_job.visible import counted

Sabotage = Literal["none", "no-kill", "no-spare", "loss"]

BYTES_VOCABULARY = 257  # 256 byte values and end of document
MAX_STEPS = 60
SNAPSHOTS = 6  # of the whole run; the node is killed after the second
MIN_COMMITS_BEFORE_KILL = 2
FAULT_HANG_FLOOR_S = 15  # time to look at the page before the job is restarted
FAULT_STEPS = 1_000_000  # more than the demo of a fault waits for


class PlanError(ValueError):
    """The options do not fit together; the message names them and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan(ClusterPlan):
    """One demo; ``nodes`` includes the spare, and tp * pp * dp ranks fill the other nodes."""

    tp: int
    pp: int
    dp: int
    steps: int
    sabotage: Sabotage = "none"

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
        return max(2, self.steps // SNAPSHOTS)

    @property
    def text(self) -> str:
        """Ranks, layout and steps, for people."""
        return (
            f"{counted(self.world_size, f'{self.device} rank')} "
            f"(TP{self.tp} x PP{self.pp} x DP{self.dp}), {counted(self.steps, 'step')}, "
            f"a checkpoint every {self.interval_steps}"
        )

    def kill_loses_steps(self, commits: int, last_step: int) -> bool:
        """Whether a kill now takes steps from a job with so many complete checkpoints.

        It does half an interval after a snapshot's step at the earliest: right after that step
        the snapshot may still become complete, and nothing would be lost.
        """
        return (
            commits >= MIN_COMMITS_BEFORE_KILL
            and last_step % self.interval_steps >= self.interval_steps // 2
        )

    def __post_init__(self) -> None:
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
        """The job as plain values: about 0.85 million parameters, trained on bytes of text."""
        on_gpu = self.device == "cuda"
        overlap = {"tp": True, "pp": True, "dp": True}
        spec = _job(name, corpus, layers=4, hidden_size=128, heads=4)
        spec["trainer"] |= {
            "parallelism": {"tp": self.tp, "pp": self.pp, "dp": self.dp, "overlap": overlap},
            "training": {
                "steps": self.steps,
                # More micro-batches on GPUs, so a step is long enough to be interrupted.
                "global_batch_size": 2 * self.dp * (32 if on_gpu else 4),
                "micro_batch_size": 2,
                "precision": "bf16" if on_gpu else "fp32",
            },
            "optimizer": {"learning_rate": 2e-3},
            "schedule": {"warmup_steps": 4, "decay": "cosine"},
        }
        return spec | {
            "checkpoint": {"uri": str(checkpoints), "interval_steps": self.interval_steps},
            "recovery": {"spare_nodes": self.nodes - self.active_nodes, "collective_timeout_s": 60},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan(ClusterPlan):
    """A demo of one fault: four CPU ranks on as many nodes; ``pipeline``: PP2 x DP2, else DP4.

    Where a rank hangs, the others wait through the pipeline and the data-parallel groups. To see
    who is slow, at least three ranks have to do the same work.
    """

    pipeline: bool
    device: Literal["cpu", "cuda"] = "cpu"
    nodes: int = 4
    devices_per_node: int = 1

    @property
    def text(self) -> str:
        """The layout, for people."""
        return "4 cpu ranks (" + ("PP2 x DP2" if self.pipeline else "DP4") + ")"

    def job(self, name: str, corpus: Path, checkpoints: Path) -> dict[str, Any]:
        """The job as plain values: 0.1 million parameters, and more steps than the demo waits."""
        pp, dp = (2, 2) if self.pipeline else (1, 4)
        spec = _job(name, corpus, layers=2, hidden_size=64, heads=2)
        spec["trainer"] |= {
            "parallelism": {"pp": pp, "dp": dp},
            "training": {
                "steps": FAULT_STEPS,
                "global_batch_size": 2 * dp * 2,
                "micro_batch_size": 2,
                "precision": "fp32",
            },
        }
        return spec | {
            "checkpoint": {"uri": str(checkpoints), "interval_steps": 20},
            "recovery": {"collective_timeout_s": 120},
        }


def _job(
    name: str, corpus: Path, *, layers: int, hidden_size: int, heads: int
) -> dict[str, dict[str, Any] | Any]:
    model = {
        "layers": layers,
        "hidden_size": hidden_size,
        "heads": heads,
        "vocab_size": BYTES_VOCABULARY,
        "sequence_length": hidden_size,
    }
    data = {"sources": [{"prefix": str(corpus)}], "tokenizer": {"kind": "bytes"}}
    return {"name": name, "owner": "demo", "trainer": {"model": model, "data": data}}


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

    def plan(kind: Literal["cpu", "cuda"], devices_per_node: int, dp: int) -> DemoPlan:
        sizes = {"devices_per_node": devices_per_node, "tp": 2, "pp": 2, "dp": dp} | fixed
        ranks = sizes["tp"] * sizes["pp"] * sizes["dp"]
        spares = 0 if sabotage == "no-spare" else 1
        sizes.setdefault("nodes", -(-ranks // sizes["devices_per_node"]) + spares)
        return DemoPlan(device=kind, steps=steps, sabotage=sabotage, **sizes)

    if device != "cpu":
        # TP2 x PP2 over two nodes of two GPUs, and a spare.
        on_gpu = plan("cuda", 2, 1)
        if gpus >= on_gpu.nodes * on_gpu.devices_per_node:
            return on_gpu
        if device == "cuda":
            raise PlanError(
                f"{counted(on_gpu.nodes, 'node')} of {on_gpu.devices_per_node} GPUs "
                f"are more than the {gpus} GPUs of this machine: "
                "use --devices-per-node 1 --tp 1 --pp 2, or --device cpu"
            )
    # TP2 x PP2 x DP2 over two nodes of four ranks, and a spare.
    return plan("cpu", 4, 2)
