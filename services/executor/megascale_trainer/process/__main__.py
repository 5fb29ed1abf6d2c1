"""Start of the training side of a node: ``python -m megascale_trainer.process --socket-fd N``.

Started by the executor agent, never by hand. It is the template process: it imports torch once,
ahead of need, and forks one worker per rank when the agent asks (see
:mod:`megascale_trainer.process.template`).
"""

from __future__ import annotations

import argparse
import socket

from megascale_common.node.process import arm_parent_death


def main() -> int:
    """Arm the parent-death signal, import torch, serve fork requests until the agent closes the
    socket.
    """
    arm_parent_death()
    parser = argparse.ArgumentParser(
        prog="python -m megascale_trainer.process", description=__doc__
    )
    parser.add_argument(
        "--socket-fd", type=int, required=True, help="inherited unix socket to the agent"
    )
    arguments = parser.parse_args()
    from megascale_trainer.process import (
        template,  # after arming: the import of torch takes seconds
    )

    template.serve(socket.socket(fileno=arguments.socket_fd))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
