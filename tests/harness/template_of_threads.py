"""``python -m tests.harness.template_of_threads --socket-fd N``: the node's template.

Its forks answer whether they have set torch's number of threads while they had one thread.
"""

from __future__ import annotations

import os
import socket
import sys

import torch

from megascale_common.node import framing
from megascale_trainer.process.__main__ import _Template

_alone: list[int] = []
_set_threads = torch.set_num_threads


def _noted(count: int) -> None:
    if len(os.listdir("/proc/self/task")) == 1:
        _alone.append(os.getpid())
    _set_threads(count)


def _look(agent: socket.socket, message: framing.Message, descriptors: list[int]) -> int:
    framing.send(agent, {"kind": "seen", "renewed": os.getpid() in _alone})
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_num_threads = _noted
    _Template(socket.socket(fileno=int(sys.argv[2])), {"look": _look}).serve(torch.__version__)
