"""Where a process stands in a run by hand: what torchrun gives it in environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megascale_common.node.addresses import on_route_to
from megascale_job.config import JobConfig
from megascale_job.problems import JobError, JobProblem
from megascale_job.visible import counted

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """``host`` counts the hosts, as torchrun's GROUP_RANK; ``start`` names this start of all ranks.

    ``hosted_store``: torchrun serves the store at ``master``; otherwise rank 0 does.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: int = 0
    master: tuple[str, int] = ("127.0.0.1", 0)
    hosted_store: bool = False
    start: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """From the variables of torchrun; a process that was started alone has none.

        Raises:
            JobError: some are there and others are not, or are no numbers.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls()
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_world_size = int(environment.get("LOCAL_WORLD_SIZE", str(world_size)))
            return cls(
                rank,
                world_size,
                int(environment["LOCAL_RANK"]),
                local_world_size,
                int(environment.get("GROUP_RANK", str(rank // local_world_size))),
                (environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                f"{environment.get('TORCHELASTIC_RUN_ID', '')}"
                f"/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            )
        except (KeyError, ValueError) as error:
            problem = JobProblem(
                "environment",
                f"RANK or WORLD_SIZE is set, but not as torchrun does: {error}",
                "start it with torchrun, or alone, without these variables",
            )
            raise JobError([problem]) from error

    @property
    def hosts(self) -> int:
        """How many hosts there are; each has the same number of ranks."""
        return self.world_size // self.local_world_size

    @property
    def ranks_here(self) -> list[int]:
        """The ranks of this host."""
        first = self.rank - self.local_rank
        return list(range(first, first + self.local_world_size))

    def check(self, config: JobConfig) -> None:
        """Refuse a job that needs another number of ranks, or a tensor group on two hosts.

        Raises:
            JobError: with field and remedy.
        """
        sizes, wanted = config.parallelism, config.layout.world_size
        if wanted != self.world_size:
            product = f"tp {sizes.tp} * dp {sizes.dp} * pp {sizes.pp}"
            problem = JobProblem(
                "trainer.parallelism",
                f"{product} makes {counted(wanted, 'rank')}, but {self.world_size} were started",
                f"start {wanted} (torchrun --nproc-per-node {wanted} on one host), or change the "
                "sizes",
            )
            raise JobError([problem])
        if self.local_world_size % sizes.tp:
            problem = JobProblem(
                "trainer.parallelism.tp",
                f"{counted(self.local_world_size, 'rank')} of a host hold no whole tensor-parallel "
                f"groups of {sizes.tp}",
                "give --nproc-per-node a multiple of tp",
            )
            raise JobError([problem])


def own_address(place: Place) -> str:
    """The address at which rank 0's host is reached by the others: on the route to MASTER_ADDR.

    Called on rank 0, whose host MASTER_ADDR names. It is a loopback address where the name is one
    on its own host, as Debian has it: other hosts cannot reach that.

    Raises:
        JobError: MASTER_ADDR is no address.
    """
    host, port = place.master
    if place.hosts == 1:
        return LOOPBACK
    try:
        return on_route_to(host, port)
    except OSError as error:
        remedy = "give torchrun --local-addr, with the address at which other hosts reach this one"
        raise JobError(
            [JobProblem("MASTER_ADDR", f"{host} is no address here: {error}", remedy)]
        ) from error
