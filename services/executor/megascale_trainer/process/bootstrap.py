"""Creation of a rank's communication groups: torch.distributed from a store, then every group.

Groups come from the rank layout. Only members create a group (``use_local_synchronization``), so
start-up costs O(n) store operations in the whole job and not O(n^2) (MegaScale section 3.5). Every
group gets its timeout explicitly: torch does not pass the world's on. With interleaving the
pipeline edges form a ring; two stages then share two edges, one each way, and so four groups.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from megascale_common.job.rank_layout import RankLayout
from megascale_common.node.status_page import StatusPageWriter
from megascale_trainer.parallel.groups import Edges, Group, Groups, single_process_groups

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_EdgeKind = Literal["activation", "gradient"]

RANK_TABLE_KEY = "rank-table"
# Thread blocks of an edge's NCCL kernel. Each occupies a multiprocessor and spins there from its
# post until the partner's comes: often for a whole computation. Its message takes a small part of
# that. NCCL_MAX_CTAS overrides it.
_EDGE_BLOCKS = 4


def create_groups(
    layout: RankLayout,
    rank: int,
    store: Store,
    device: torch.device,
    *,
    timeout_s: float,
    ring: bool = False,
    tied: bool = False,
    status: StatusPageWriter | None = None,
) -> Groups:
    """Initialise torch.distributed and create this rank's groups; every rank calls it.

    ``ring`` adds the pipeline edge from the last stage to the first (interleaving), ``tied`` the
    group of both in which they sum the gradients of tied embeddings. The backend is nccl on CUDA
    and gloo on a CPU. :func:`destroy_groups` undoes it.
    """
    if layout.world_size == 1:
        return single_process_groups()
    factory = _Factory(layout, rank, store, device, timeout_s, status)
    groups = factory.world(), factory.axis("tp"), factory.axis("dp"), factory.edges(ring)
    return Groups(*groups, factory.ends() if tied else None)


def compare_rank_tables(store: Store, rank: int, digest: str) -> None:
    """Refuse to meet ranks that were given another table of ranks; an empty digest is not compared.

    Every rank has its own slice of the table only. One look-up per rank, before any group is made.

    Raises:
        RuntimeError: rank 0 was given another table.
    """
    if not digest:
        return
    if rank == 0:
        store.set(RANK_TABLE_KEY, digest)
    elif (found := store.get(RANK_TABLE_KEY).decode()) != digest:
        raise RuntimeError(
            f"rank {rank} was given rank table {digest}, rank 0 {found}: they belong to different "
            "placements of the attempt"
        )


def destroy_groups() -> None:
    """Tear torch.distributed down if it was initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()


class _Factory:
    def __init__(
        self,
        layout: RankLayout,
        rank: int,
        store: Store,
        device: torch.device,
        timeout_s: float,
        status: StatusPageWriter | None,
    ) -> None:
        self._layout, self._rank, self._device, self._status = layout, rank, device, status
        self._timeout = timedelta(seconds=timeout_s)
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.set_device(device)
            # torch warns that sends and receives of one communicator wait for each other. Ours do
            # not: on each edge and kind a rank only sends or only receives.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            # gloo only makes groups of one here (see edges): they need no look-up of the host name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # The world is not bound to a device: of a bound one torch makes subgroups by splitting it,
        # which all ranks must join.
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            store=store,
            rank=rank,
            world_size=layout.world_size,
            timeout=self._timeout,
        )

    def world(self) -> Group:
        group = Group(
            "world",
            tuple(range(self._layout.world_size)),
            self._rank,
            dist.group.WORLD,
            self._status,
        )
        if self._cuda:  # an unbound NCCL world connects in its first operation: that is now
            group.all_reduce(torch.zeros(1, device=self._device))
        return group

    def axis(self, axis: Literal["tp", "dp"]) -> Group:
        ranks = self._layout.group_of(self._rank, (axis,))
        return (
            self._group(axis, ranks)
            if len(ranks) > 1
            else Group(axis, ranks, self._rank, None, None)
        )

    def edges(self, ring: bool) -> Edges:
        """The pipeline edges, in rounds: from even stages, from odd ones, the ring's closing one.

        So no chain of ranks waits for each other.

        torch names a group after its ranks and *the number of groups that the rank has*, and
        members meet under that name. A rank without a partner in a round therefore creates a group
        of its own, to keep the numbers equal.
        """
        line = self._layout.group_of(self._rank, ("pp",))
        stage, last = line.index(self._rank), len(line) - 1
        if not last:
            return Edges(None, None, None, None)
        inner = range(last)
        rounds = [{low: low + 1 for low in inner if low % 2 == parity} for parity in (0, 1)]
        rounds = [edges for edges in [*rounds, {last: 0} if ring else {}] if edges]
        found: dict[tuple[int, _EdgeKind], Group] = {}
        kinds: tuple[_EdgeKind, ...] = ("activation", "gradient")
        for edges in rounds:
            mine = next((edge for edge in edges.items() if stage in edge), None)
            for kind in kinds:
                if mine is None:
                    self._group_of_one()
                    continue
                low, high = mine
                edge = self._group(
                    f"pp{low}-{high}.{kind}", tuple(sorted((line[low], line[high]))), _EDGE_BLOCKS
                )
                self._exchange(edge, sends=(stage == low) == (kind == "activation"))
                found[low, kind] = edge
        before = last if stage == 0 else stage - 1
        return Edges(
            found.get((before, "activation")),
            found.get((stage, "activation")),
            found.get((stage, "gradient")),
            found.get((before, "gradient")),
        )

    def ends(self) -> Group | None:
        """The first and the last stage of this rank's pipeline; None between them, and alone."""
        line = self._layout.group_of(self._rank, ("pp",))
        if len(line) == 1:
            return None
        if self._rank not in (line[0], line[-1]):
            self._group_of_one()
            return None
        return self._group(f"pp0-{len(line) - 1}.tied", tuple(sorted((line[0], line[-1]))))

    def _group_of_one(self) -> None:
        """Keep the number of groups that this rank has equal to the others'."""
        dist.new_group(
            [self._rank], timeout=self._timeout, backend="gloo", use_local_synchronization=True
        )

    def _exchange(self, edge: Group, *, sends: bool) -> None:
        """Move one value: NCCL connects two ranks, and blocks the host, in their first exchange."""
        value = torch.zeros(1, device=self._device)
        if sends:
            edge.send(value).wait()
        else:
            edge.post_receive(value).wait()

    def _options(self, blocks: int) -> Any:
        """Of NCCL: a stream of high priority, because other ranks wait for what runs on it.

        Made anew for each group: torch writes the group's name and ranks into it.
        """
        if not self._cuda:
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        if blocks:
            options.config.max_ctas = blocks
        return options

    def _group(self, name: str, ranks: tuple[int, ...], blocks: int = 0) -> Group:
        """Create the group; its NCCL kernels have at most ``blocks`` blocks (0: NCCL's choice)."""
        handle = dist.new_group(
            list(ranks),
            timeout=self._timeout,
            pg_options=self._options(blocks),
            use_local_synchronization=True,
            # With a device NCCL connects now and not in the first step.
            device_id=self._device if self._cuda else None,
        )
        return Group(name, ranks, self._rank, handle, self._status)
