"""Takes the place of a checkpoint daemon that runs in another container of the pod.

``python -m megascale_executor.agent.checks.remote_daemon --socket PATH -- OPTIONS OF THE DAEMON``

The agent supervises this process as if it were the daemon: it ends when the daemon ends, with the
same status, and passes SIGTERM on. When it ends itself, for whatever reason, its connection to the
sidecar (:mod:`megascale_checkpoint.serve.sidecar`) closes, and the sidecar ends the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

from megascale_common.node import framing
from megascale_common.node.output import steady_streams
from megascale_common.node.process import arm_parent_death

CONNECT_TIMEOUT_S = 60.0  # containers of a pod start in any order
CONNECT_POLL_S = 0.2


def main() -> int:
    """Run until the daemon has ended.

    Returns its exit status, 128 plus the number of the signal that ended it, or 1 if the sidecar
    cannot be reached or is gone.
    """
    arm_parent_death()
    steady_streams()
    made = argparse.ArgumentParser(description="Stand-in for a daemon in another container.")
    made.add_argument("--socket", type=Path, required=True, help="socket of the sidecar")
    made.add_argument("options", nargs="+", help="options of the daemon, after --")
    options = made.parse_args()
    try:
        with _connected(options.socket) as link:
            framing.send(link, {"kind": "start", "options": options.options})
            signal.signal(signal.SIGTERM, lambda number, _: _send_signal(link, number))
            while (received := framing.receive(link)) is not None:
                message, _ = received
                if message.get("kind") == "ended":
                    status = int(message["status"])
                    return 128 - status if status < 0 else status
    except OSError as error:
        print(f"checkpoint sidecar at {options.socket}: {error}", file=sys.stderr)
        return 1
    print(f"checkpoint sidecar at {options.socket}: it is gone", file=sys.stderr)
    return 1


def _connected(path: Path) -> socket.socket:
    ends_at_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(str(path))
            return link
        except OSError:
            link.close()
            if time.monotonic() >= ends_at_s:
                raise
        time.sleep(CONNECT_POLL_S)


def _send_signal(link: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        framing.send(link, {"kind": "signal", "number": number})


if __name__ == "__main__":
    raise SystemExit(main())
