"""`megascale` and `python -m megascale_cli`."""

from __future__ import annotations

import signal
import sys

from megascale_cli.app import build_app
from megascale_cli.usage import silence


def main() -> None:
    """Run the command line."""
    # A script that runs `megascale up &` starts it with SIGINT ignored, as some CI runners do; a
    # SIGINT that is sent to it must still end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        build_app()(prog_name="megascale")
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            silence()


if __name__ == "__main__":
    main()
