"""What a process that was forked with torch imported does before it has a second thread."""

from __future__ import annotations


def renew_thread_pool() -> None:
    """Replace torch's thread pool of before the fork.

    torch does that at the next call that sets a number of threads, without a lock. The first
    backward on CUDA makes that call from one thread for each visible device: a thread that sees the
    pool between its release and its replacement aborts the process ("Invalid thread pool!", SIGABRT
    in a rank's first step on two H200s; pytorch/pytorch issue 178535).
    """
    import torch  # by now imported: a template imports it after it has armed its parent's death

    torch.set_num_threads(torch.get_num_threads())
