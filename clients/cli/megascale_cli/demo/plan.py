"""What the demo runs: its devices and layout, and the job that it submits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascale_cli.visible import counted

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
class DemoPlan:
    """One demo; ``nodes`` includes the spare, and tp * pp * dp ranks fill the other nodes."""

    device: Literal["cpu", "cuda"]
    nodes: int
    devices_per_node: int
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
        if self.devices_per_node % self.tp:
            raise PlanError(
                "tensor parallelism stays inside a node: "
                f"--devices-per-node {self.devices_per_node} is not a multiple of --tp {self.tp}"
            )
        if self.world_size % self.devices_per_node:
            raise PlanError(
                f"tp {self.tp} * pp {self.pp} * dp {self.dp} = "
                f"{counted(self.world_size, 'rank')} "
                f"{'does' if self.world_size == 1 else 'do'} not fill "
                f"nodes of {counted(self.devices_per_node, 'device')}: "
                "change --devices-per-node or the layout"
            )
        if self.nodes <= self.active_nodes and self.sabotage != "no-spare":
            raise PlanError(
                f"{counted(self.world_size, 'rank')} "
                f"{'fills' if self.world_size == 1 else 'fill'} "
                f"{counted(self.active_nodes, 'node')} and "
                f"one node must be spare: use --nodes {self.active_nodes + 1} or more"
            )
        if not SNAPSHOTS * 2 <= self.steps <= MAX_STEPS:
            raise PlanError(f"--steps {self.steps}: use {SNAPSHOTS * 2} to {MAX_STEPS}")

    def job(self, name: str, corpus: Path, checkpoints: Path) -> dict[str, Any]:
        """The job as plain values: about 0.85 million parameters, trained on bytes of text."""
        on_gpu = self.device == "cuda"
        micro_batch_size = 2
        return {
            "name": name,
            "owner": "demo",
            "trainer": {
                "model": {
                    "layers": 4,
                    "hidden_size": 128,
                    "heads": 4,
                    "vocab_size": BYTES_VOCABULARY,
                    "sequence_length": 128,
                },
                "parallelism": {
                    "tp": self.tp,
                    "pp": self.pp,
                    "dp": self.dp,
                    "overlap": {"tp": True, "pp": True, "dp": True},
                },
                "training": {
                    "steps": self.steps,
                    # More micro-batches on GPUs, so a step is long enough to be interrupted.
                    "global_batch_size": micro_batch_size * self.dp * (32 if on_gpu else 4),
                    "micro_batch_size": micro_batch_size,
                    "precision": "bf16" if on_gpu else "fp32",
                },
                "optimizer": {"learning_rate": 2e-3},
                "schedule": {"warmup_steps": 4, "decay": "cosine"},
                "data": {"sources": [{"prefix": str(corpus)}], "tokenizer": {"kind": "bytes"}},
            },
            "checkpoint": {"uri": str(checkpoints), "interval_steps": self.interval_steps},
            "recovery": {"spare_nodes": self.nodes - self.active_nodes, "collective_timeout_s": 60},
        }


def choose_plan(
    *,
    device: Literal["auto", "cpu", "cuda"],
    gpus: int,
    nodes: int | None,
    devices_per_node: int | None,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    steps: int,
    sabotage: Sabotage,
) -> DemoPlan:
    """Choose what the options leave open: GPUs if there are enough (six by default), else CPU.

    Raises:
        PlanError: the options do not fit together or the machine has too few GPUs.
    """

    def plan(kind: Literal["cpu", "cuda"], default_per_node: int, default_dp: int) -> DemoPlan:
        per_node = devices_per_node or default_per_node
        sizes = {"tp": tp or 2, "pp": pp or 2, "dp": dp or default_dp}
        active = -(-sizes["tp"] * sizes["pp"] * sizes["dp"] // per_node)
        count = nodes or active + (0 if sabotage == "no-spare" else 1)
        return DemoPlan(
            device=kind,
            nodes=count,
            devices_per_node=per_node,
            steps=steps,
            sabotage=sabotage,
            **sizes,
        )

    if device != "cpu":
        # TP2 x PP2 over two nodes of two GPUs, and a spare.
        on_gpu = plan("cuda", 2, 1)
        needed = on_gpu.nodes * on_gpu.devices_per_node
        if gpus >= needed:
            return on_gpu
        if device == "cuda":
            raise PlanError(
                f"{counted(on_gpu.nodes, 'node')} of {on_gpu.devices_per_node} GPUs "
                f"are more than the {gpus} GPUs of this machine: "
                "use --devices-per-node 1 --tp 1 --pp 2, or --device cpu"
            )
    # TP2 x PP2 x DP2 over two nodes of four ranks, and a spare.
    return plan("cpu", 4, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """A demo of one fault: four CPU ranks on as many nodes; ``pipeline``: PP2 x DP2, else DP4.

    Where a rank hangs, the others wait through the pipeline and the data-parallel groups. To see
    who is slow, at least three ranks have to do the same work.
    """

    pipeline: bool
    nodes: int = 4
    devices_per_node: int = 1
    device: Literal["cpu"] = "cpu"

    @property
    def text(self) -> str:
        """The layout, for people."""
        return "4 cpu ranks (" + ("PP2 x DP2" if self.pipeline else "DP4") + ")"

    @property
    def options(self) -> tuple[str, ...]:
        """Of `megascale up`: a shorter limit for a step than the minute of a large job."""
        return ("--heartbeat-interval-s", "1", "--hang-floor-s", str(FAULT_HANG_FLOOR_S))

    def job(self, name: str, corpus: Path, checkpoints: Path) -> dict[str, Any]:
        """The job as plain values: 0.1 million parameters, and more steps than the demo waits."""
        pp, dp = (2, 2) if self.pipeline else (1, 4)
        return {
            "name": name,
            "owner": "demo",
            "trainer": {
                "model": {
                    "layers": 2,
                    "hidden_size": 64,
                    "heads": 2,
                    "vocab_size": BYTES_VOCABULARY,
                    "sequence_length": 64,
                },
                "parallelism": {"pp": pp, "dp": dp},
                "training": {
                    "steps": FAULT_STEPS,
                    "global_batch_size": 2 * dp * 2,
                    "micro_batch_size": 2,
                    "precision": "fp32",
                },
                "data": {"sources": [{"prefix": str(corpus)}], "tokenizer": {"kind": "bytes"}},
            },
            "checkpoint": {"uri": str(checkpoints), "interval_steps": 20},
            "recovery": {"collective_timeout_s": 120},
        }
