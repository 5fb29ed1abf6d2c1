"""Over which interface the ranks of a job connect: the one on the route to where they meet.

Without a word gloo takes the address that the host's name stands for, which is a loopback one on
many hosts, and NCCL the first interface that it finds.

What a process that was forked with torch imported does before it has a second thread.

Room for the connections of all ranks in the process that serves the rendezvous store.

Every rank of the job keeps a connection to rank 0's process, and many systems let a process have
1,024 file descriptors until it asks for more.

What `ps` and `top` show of a worker: its rank and its job instead of the template's command.

A forked process has the command line of the process that forked it. The kernel reads it from the
memory in which it was passed (proc_pid_stat(5), arg_start and arg_end), so writing there changes
what `ps -o args` shows, within the length of the original.
"""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from megascale_common.node.addresses import (
    LOOPBACK_INTERFACE,
    interface_of,
    is_loopback,
    on_route_to,
)
from megascale_common.node.process import stat_fields
from megascale_job.visible import counted


def renew_thread_pool() -> None:
    """Replace torch's thread pool of before the fork.

    torch does that at the next call that sets a number of threads, without a lock. The first
    backward on CUDA makes that call from one thread for each visible device: a thread that sees the
    pool between its release and its replacement aborts the process ("Invalid thread pool!", SIGABRT
    in a rank's first step on two H200s; pytorch/pytorch issue 178535).
    """
    import torch  # by now imported: a template imports it after it has armed its parent's death

    torch.set_num_threads(torch.get_num_threads())


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


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def pin_interface(store_host: str, cuda: bool) -> str:
    """Set the variable that gloo or NCCL reads, unless somebody has; returns the interface or "".

    Ranks that share a host need no look-up of its name. NCCL finds its own way between them.
    """
    variable = NCCL if cuda else GLOO
    if variable in os.environ:
        return os.environ[variable]
    if is_loopback(store_host):
        found = "" if cuda else LOOPBACK_INTERFACE
    else:
        try:
            found = interface_of(on_route_to(store_host))
        except OSError:  # the store's connection reports it
            found = ""
    if found:
        # NCCL takes a name as the beginning of one, but for a '=' before it.
        os.environ[variable] = f"={found}" if cuda else found
    return found


_NAME_BYTES = 15  # TASK_COMM_LEN of the kernel, less the closing zero


def show_title(title: str, name: str) -> None:
    """Show ``title`` as this process's arguments, and ``name`` (15 bytes of it) as its name.

    Both are for people only: where the kernel does not offer them, nothing changes.
    """
    try:
        Path("/proc/self/comm").write_bytes(name.encode()[:_NAME_BYTES])
        fields = stat_fields(os.getpid())
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        # The zeros behind the title overwrite what is left of the old arguments; the last byte
        # stays zero, or the kernel would read on into the environment.
        room = end - start
        text = title.encode()[: room - 1]
        ctypes.memmove(start, text + bytes(room - len(text)), room)
