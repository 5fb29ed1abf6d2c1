"""What messages between two pipeline stages cost beside their GEMMs: communicator, peer memory.

Two processes, a device each:

    torchrun --nproc-per-node 2 benchmarks/pipeline_edges.py
    torchrun --nproc-per-node 2 benchmarks/pipeline_edges.py --device cpu --shrink 64 --rounds 2

In a turn each rank posts the receive of the other's next message, runs GEMMs, sends its own and
waits: what a stage does in its steady state with ``overlap.pp``. "none" is the same without
messages. "late" starts rank 1 with each turn's GEMMs twice, so that the receive of rank 0 waits
through as many again. "alone" is one message each way without GEMMs. The ways take turns; figures
are the slower rank's, the median of rounds, in milliseconds for one turn. The last line is one JSON
object. The values of the last messages are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from megascale_job.layout import RankLayout
from megascale_kernels.overlap.peer_memory import open_peer_memory, why_unreachable
from megascale_kernels.overlap.peer_messages import PeerMessages, region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups

TIMEOUT_S = 120.0
# tokens, width of the message, inner and outer width of the GEMMs
SHAPES = {"7b, tp 2": (4096, 4096, 4096, 14336), "13b, tp 1": (8192, 5120, 5120, 17920)}


class Stage:
    """One of the two ranks: where it sends to, where it receives from, and its GEMMs."""

    def __init__(self, rank: int, shape: tuple[int, int, int, int], device: torch.device) -> None:
        tokens, width, inner, outer = shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rank = rank
        self.message = torch.full((tokens, width), 1.0 + rank, device=device, dtype=dtype)
        self._received = torch.empty_like(self.message)
        self._left = torch.randn(tokens, inner, device=device, dtype=dtype)
        self._right = torch.randn(inner, outer, device=device, dtype=dtype)
        self._out = torch.empty(tokens, outer, device=device, dtype=dtype)

    def turns(self, edges: tuple[Group, Group] | None, number: int, gemms: int) -> None:
        """``number`` turns of ``gemms`` GEMMs, with messages over (outgoing, incoming) edges."""
        sends = []
        for _ in range(number):
            receive = None if edges is None else edges[1].post_receive(self._received)
            for _ in range(gemms):
                torch.mm(self._left, self._right, out=self._out)
            if edges is not None and receive is not None:
                sends.append(edges[0].send(self.message))
                receive.wait()
        for send in sends:
            send.wait()

    def check(self) -> None:
        """Refuse what another message than the partner's has left."""
        if not bool((self._received == 2.0 - self.rank).all()):
            raise SystemExit("a message has other values than were sent")


def main() -> None:
    """Measure all shapes and print one object."""
    arguments = _parser().parse_args()
    store, rank, _ = next(iter(dist.rendezvous("env://")))
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    groups = create_groups(
        RankLayout(tp=1, cp=1, dp=1, pp=2), rank, Rendezvous(store, device, TIMEOUT_S)
    )
    edges = groups.edges
    pair = (
        (edges.activation_out, edges.gradient_in)
        if rank == 0
        else (edges.gradient_out, edges.activation_in)
    )
    outgoing, incoming = pair
    assert outgoing is not None and incoming is not None
    handle = outgoing.handle if rank == 0 else incoming.handle  # of the activations
    assert handle is not None
    if reason := why_unreachable(handle, device):
        raise SystemExit(f"nothing to compare: {reason}")
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        small = tuple(max(1, size // arguments.shrink) for size in shape)
        stage = Stage(rank, (small[0], small[1], small[2], small[3]), device)
        memory = open_peer_memory(
            handle, region_bytes(stage.message.nbytes), device, timeout_s=TIMEOUT_S
        )
        over = PeerMessages(memory)
        found[name] = _measure(stage, (outgoing, incoming), over, groups.world, device, arguments)
        stage.check()
    if rank == 0:
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        print(json.dumps({"device": card, "torch": torch.__version__, "ms": found}), flush=True)
    destroy_groups()


def _measure(
    stage: Stage,
    edges: tuple[Group, Group],
    over: PeerMessages,
    world: Group,
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Milliseconds of a turn by kind of turn and way: median, least and most."""
    late = arguments.gemms * (2 if stage.rank == 1 else 1)
    kinds = {"alone": 0, "even": arguments.gemms, "late": late}
    ways = {"none": None, "communicator": None, "peer memory": over}
    times: dict[str, list[float]] = {}
    for number in range(arguments.rounds + 1):  # the first warms up
        for kind, gemms in kinds.items():
            for way, messages in ways.items():
                if (kind, way) == ("alone", "none"):
                    continue
                edges[0].messages = edges[1].messages = messages
                world.all_reduce(torch.zeros(1, device=device))
                _wait(device)
                begin = time.perf_counter()
                stage.turns(None if way == "none" else edges, arguments.turns, gemms)
                _wait(device)
                took = torch.tensor([time.perf_counter() - begin], device=device)
                world.all_reduce_max(took)
                if number:
                    times.setdefault(f"{kind}, {way}", []).append(
                        took.item() * 1000 / arguments.turns
                    )
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in times.items()
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--gemms", type=int, default=8, help="of each turn")
    parser.add_argument("--turns", type=int, default=10, help="turns of a round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, after one that warms up")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes by this (dry runs)")
    return parser


if __name__ == "__main__":
    main()
