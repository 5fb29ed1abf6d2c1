"""Pipeline edges inside a host: messages go through peer memory, by copy engines.

NCCL's sends and receives are kernels of several blocks, which take multiprocessors from GEMMs and
spin from their post until the partner's post. :mod:`megascale_kernels.overlap.peer_messages`
explains how messages pass instead, and why nothing waits for ever. The values are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale_job.config import JobConfig
from megascale_kernels.overlap.peer_memory import open_peer_memory, why_unreachable
from megascale_kernels.overlap.peer_messages import PeerMessages, region_bytes
from megascale_trainer.parallel.groups import Edges, Group


@dataclass(frozen=True)
class _Neighbours:
    """Two stages, ``low`` before ``high``, and the edges between them as this rank has them."""

    low: int
    high: int
    activation: Group
    gradient: Group


def connect_edges(
    config: JobConfig, edges: Edges, stage: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Choose the way of the messages of ``edges``: peer memory or the communicator.

    Peer memory is used if ``overlap.peer_edges`` asks for it and the two ranks can reach each
    other's memory. If it was requested but is not available, the log says why. All ranks call this
    together.

    Args:
        stage: this rank's stage.
        dtype: dtype of the messages, hidden states [S / tp, B, H].

    Raises:
        RuntimeError, OSError: there is not enough memory to share.
    """
    model, tp = config.model, config.parallelism.tp
    tokens = model.sequence_length // tp * config.training.micro_batch_size
    message_bytes = tokens * model.hidden_size * dtype.itemsize
    for pair in _neighbours(edges, stage, config.parallelism.pp):
        pair.activation.messages = pair.gradient.messages = None
        handle = pair.activation.handle
        if not config.parallelism.overlap.peer_edges or handle is None:
            continue
        if reason := why_unreachable(handle, device):
            print(
                f"messages between pipeline stages {pair.low} and {pair.high} do not go through "
                f"peer memory (trainer.parallelism.overlap.peer_edges): {reason}",
                flush=True,
            )
            continue
        memory = open_peer_memory(
            handle,
            region_bytes(message_bytes),
            device,
            timeout_s=config.recovery.collective_timeout_s,
        )
        # One object for both edges: each rank only sends one payload and only receives the other.
        pair.activation.messages = pair.gradient.messages = PeerMessages(memory)


def _neighbours(edges: Edges, stage: int, stages: int) -> list[_Neighbours]:
    """The pairs of stages that this stage is in, in an order in which ranks never wait in a circle.

    It is the order in which groups are made: pairs from even stages, from odd ones, the ring's
    closing pair (:mod:`megascale_trainer.process.group_plan`).
    """
    before, after = (stage - 1) % stages, (stage + 1) % stages
    found = []
    if edges.activation_in is not None and edges.gradient_out is not None:
        found.append(_Neighbours(before, stage, edges.activation_in, edges.gradient_out))
    if edges.activation_out is not None and edges.gradient_in is not None:
        found.append(_Neighbours(stage, after, edges.activation_out, edges.gradient_in))
    return sorted(found, key=lambda pair: (pair.high == 0, pair.low % 2))
