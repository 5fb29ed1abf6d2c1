"""A worker's requests to its operating system: threads, file descriptors, an interface, a title.

- After a fork, torch's thread pool is replaced before the process has a second thread.
- The process that serves the rendezvous store has a connection to every rank of the job, and many
  systems limit a process to 1,024 file descriptors until it asks for more.
- Ranks connect over the interface on the route to the store. By default gloo takes the address of
  the host's name, which is a loopback address on many hosts, and NCCL the first interface that it
  finds.
- A forked process has its parent's command line. The kernel reads it from the memory in which it
  was passed (proc_pid_stat(5), arg_start and arg_end), so writing there changes what `ps -o args`
  shows, within the length of the original.
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
    """Replace the thread pool that torch had before the fork.

    torch replaces it at the next call that sets the number of threads, without a lock. The first
    backward on CUDA makes that call from one thread per visible device: a thread that sees the pool
    between its release and its replacement aborts the process ("Invalid thread pool!", SIGABRT in a
    rank's first step on two H200s; pytorch/pytorch issue 178535).
    """
    import torch  # already imported, but only after the template has armed its parent-death signal

    torch.set_num_threads(torch.get_num_threads())


OWN_DESCRIPTORS = 1024  # for the process itself: files, sockets of its groups, devices


def make_room(ranks: int) -> None:
    """Raise the limit of file descriptors as far as a store for ``ranks`` ranks needs.

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
    """Set gloo's or NCCL's variable for the interface, if it is unset; returns the interface or "".

    Ranks on one host need no look-up of its name, and NCCL finds its own way between them.
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
        # NCCL matches names by prefix; a leading '=' makes the match exact.
        os.environ[variable] = f"={found}" if cuda else found
    return found


_NAME_BYTES = 15  # TASK_COMM_LEN of the kernel, less the closing zero


def show_title(title: str, name: str) -> None:
    """Show ``title`` as this process's arguments, and ``name`` (15 bytes of it) as its name.

    Both are only for people: if the kernel does not offer them, nothing changes.
    """
    try:
        Path("/proc/self/comm").write_bytes(name.encode()[:_NAME_BYTES])
        fields = stat_fields(os.getpid())
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        # Zeros overwrite the rest of the old arguments. The last byte must stay zero: otherwise the
        # kernel would continue to read into the environment.
        room = end - start
        text = title.encode()[: room - 1]
        ctypes.memmove(start, text + bytes(room - len(text)), room)
