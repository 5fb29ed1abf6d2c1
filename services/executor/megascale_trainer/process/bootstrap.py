"""Creation of a rank's communication groups: torch.distributed from a store, then every group.

:mod:`megascale_trainer.process.group_plan` lists a rank's groups. Only members create a group
(``use_local_synchronization``), so a start costs O(n) store operations in the whole job instead of
O(n^2) (MegaScale section 3.5), and all ranks meet once, when they have all their groups. Every
group gets its timeout explicitly, because torch does not pass on the world's. With interleaving the
pipeline edges form a ring; two stages then share two edges, one each way, and so four groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megascale_common.node.status_page import StatusPageWriter
from megascale_job.layout import GroupName, RankLayout
from megascale_job.visible import counted
from megascale_trainer.parallel.groups import Edges, Group, Groups, single_process_groups
from megascale_trainer.process.group_plan import (
    DENSE_GROUPS,
    EXPERT_GROUPS,
    PlannedGroup,
    edge_name,
    group_plan,
    group_with_ranks_of,
)
from megascale_trainer.telemetry.timer import Timeline

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

RANK_TABLE_KEY = "rank-table"
READY_RANKS_KEY, ALL_READY_KEY = "groups/ready-ranks", "groups/all-ready"
# Thread blocks of an edge's NCCL kernel. Each occupies a multiprocessor and spins there from its
# own post until the partner's, often for a whole computation, although the message itself takes a
# small part of that time. So few blocks cost computation less. NCCL_MAX_CTAS overrides it.
_EDGE_BLOCKS = 4


@dataclass(frozen=True)
class Rendezvous:
    """Store and limits for the meeting of an attempt's ranks.

    Args:
        store: the store of all ranks of the attempt.
        device: decides the backend: nccl on CUDA, gloo on a CPU.
        timeout_s: of every group and of its collectives.
        status: the page that counts the groups' operations; None: they are not counted.
    """

    store: Store
    device: torch.device
    timeout_s: float
    status: StatusPageWriter | None = None


def create_groups(
    layout: RankLayout,
    rank: int,
    rendezvous: Rendezvous,
    *,
    ring: bool = False,
    tied: bool = False,
    experts: bool = False,
    timeline: Timeline | None = None,
) -> Groups:
    """Initialise torch.distributed and create this rank's groups; every rank calls it.

    ``ring``, ``tied`` and ``experts``: see :func:`megascale_trainer.process.group_plan.group_plan`.
    :func:`destroy_groups` undoes it. ``timeline`` gets the times of the world, of the groups and
    of the wait for the other ranks.

    Raises:
        RuntimeError: a group, or all ranks with their groups, did not come within the timeout.
    """
    if layout.world_size == 1:
        return single_process_groups()
    timeline = Timeline() if timeline is None else timeline
    with timeline.part("world"):
        factory = _Factory(layout, rank, rendezvous)
        world = factory.world()
    with timeline.part("groups"):
        made = {
            planned.name: factory.make(planned)
            for planned in group_plan(layout, rank, ring=ring, tied=tied, experts=experts)
        }
    with timeline.part("all ranks"):
        await_all_ranks(rendezvous.store, layout.world_size, rendezvous.timeout_s)
    named: dict[GroupName, Group] = {"world": world}
    for name in (*DENSE_GROUPS, *EXPERT_GROUPS):
        group = made.get(group_with_ranks_of(layout, name))
        named[name] = group or Group(name, (rank,), rank, None, None)
    if layout.cp == 1:
        named["dp"] = named["gradient"]
    ends = f"pp0-{layout.pp - 1}.tied"
    return Groups(named, _edges(layout.coordinates(rank).pp, layout.pp - 1, made), made.get(ends))


def await_all_ranks(store: Store, world_size: int, timeout_s: float) -> None:
    """Wait until every rank has all its groups: two store operations per rank, and one of the last.

    A rank that is late or has failed is thus reported here, not by a collective of the first step.

    Raises:
        RuntimeError: ranks are missing after ``timeout_s``; the message has the number of the
        others.
    """
    if store.add(READY_RANKS_KEY, 1) == world_size:
        store.set(ALL_READY_KEY, "")
    try:
        store.wait([ALL_READY_KEY], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        ready = store.add(READY_RANKS_KEY, 0)
        raise RuntimeError(
            f"timed out: {ready} of {counted(world_size, 'rank')} have their groups after "
            f"{timeout_s:g} s; "
            "look at the logs of the others"
        ) from error


def compare_rank_tables(store: Store, rank: int, digest: str) -> None:
    """Refuse ranks that have another table of ranks; an empty digest is not compared.

    Every rank has only its own slice of the table. One look-up per rank, before any group is made.

    Raises:
        RuntimeError: rank 0 has another table.
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
    def __init__(self, layout: RankLayout, rank: int, rendezvous: Rendezvous) -> None:
        self._layout = layout
        self._rank = rank
        self._device = rendezvous.device
        self._status = rendezvous.status
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            torch.cuda.set_device(self._device)
            # torch warns that sends and receives of one communicator wait for each other. Here they
            # cannot: on each edge and payload a rank only sends or only receives.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            # After a collective has timed out, torch waits for records of other ranks, four times
            # this long, before the rank ends (15 s if unset, so a minute). Agents fetch records
            # themselves (flight_dump).
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
            # gloo only makes groups of one here, which need no look-up of the host name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # The world is not bound to a device: torch would make subgroups by splitting a bound world,
        # and every rank of the job would have to join each split.
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            store=rendezvous.store,
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
        if self._cuda:  # an unbound NCCL world connects in its first operation: make it connect now
            group.all_reduce(torch.zeros(1, device=self._device))
        return group

    def make(self, planned: PlannedGroup) -> Group | None:
        """Create one group; None for a group that only keeps the numbers of groups equal."""
        if planned.kind == "alone":
            self._group_of_one()
            return None
        if planned.kind != "edge":
            return self._group(planned.name, planned.ranks)
        edge = self._group(planned.name, planned.ranks, _EDGE_BLOCKS)
        self._exchange(edge, sends=planned.sends)
        return edge

    def _group_of_one(self) -> None:
        """Create a group that is never used: Note [Equal numbers of groups]."""
        dist.new_group(
            [self._rank], timeout=self._timeout, backend="gloo", use_local_synchronization=True
        )

    def _exchange(self, edge: Group, *, sends: bool) -> None:
        """Move one value: NCCL connects two ranks in a first exchange that blocks the host."""
        value = torch.zeros(1, device=self._device)
        if sends:
            edge.send(value).wait()
        else:
            edge.post_receive(value).wait()

    def _options(self, blocks: int) -> Any:
        """NCCL's options: a stream of high priority, because other ranks wait for its work.

        New for each group, because torch writes the group's name and ranks into them.
        """
        if not self._cuda:
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        if blocks:
            options.config.max_ctas = blocks
        return options

    def _group(self, name: str, ranks: tuple[int, ...], blocks: int = 0) -> Group:
        """Create a group; its NCCL kernels have at most ``blocks`` blocks (0: NCCL's choice)."""
        handle = dist.new_group(
            list(ranks),
            timeout=self._timeout,
            pg_options=self._options(blocks),
            use_local_synchronization=True,
            group_desc=name,  # in NCCL's records, which tell edges of the same two ranks by it
            # With a device NCCL connects now instead of in the first step.
            device_id=self._device if self._cuda else None,
        )
        return Group(name, ranks, self._rank, handle, self._status)


def _edges(stage: int, last: int, made: dict[str, Group | None]) -> Edges:
    """The edges of a stage, including the ring's if they were made."""
    before, after = last if stage == 0 else stage - 1, 0 if stage == last else stage + 1
    return Edges(
        made.get(edge_name(before, stage, "activation")),
        made.get(edge_name(stage, after, "activation")),
        made.get(edge_name(stage, after, "gradient")),
        made.get(edge_name(before, stage, "gradient")),
    )
