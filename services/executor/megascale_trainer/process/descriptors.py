"""Room for the connections of all ranks in the process that serves the rendezvous store.

Every rank of the job keeps a connection to rank 0's process, and many systems let a process have
1,024 file descriptors until it asks for more.
"""

from __future__ import annotations

import resource

from megascale_job.visible import counted

OWN_DESCRIPTORS = 1024  # of the process itself: files, sockets of its groups, devices


def make_room(ranks: int) -> None:
    """Raise this process's limit of file descriptors to what a store for ``ranks`` ranks needs.

    Raises:
        OSError: the hard limit is lower; the message names the remedy.
    """
    needed = ranks + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            f"the store of {counted(ranks, 'rank')} needs {needed} file descriptors, and "
            "this node allows "
            f"{hard}: raise LimitNOFILE of the agent's service, or the hard limit of ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
