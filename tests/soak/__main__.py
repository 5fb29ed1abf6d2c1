"""``make soak``: jobs under random overlapping faults on a real cluster, compared with a twin.

The promises: every job succeeds, each loss equals the twin's bit for bit, no committed step goes
back without an order, and nothing is left behind. Progress is on stderr; the last line of stdout is
one JSON object, with the growth of each service over the last ten minutes.

Exit status: 0 when all promises held, 1 when one did not, 2 for wrong arguments or a machine that
cannot run it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from tests.soak.run import Options, soak

DRIVERS = (1, 3)


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    options = _parse(arguments)
    result = asyncio.run(soak(options))
    for broken in result.broken:
        print(f"broken: {broken}", file=sys.stderr)
    print(json.dumps(result.as_json()))
    return 1 if result.broken else 0


def _parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=_positive, default=20.0, help="how long faults begin")
    parser.add_argument("--seed", type=int, default=1, help="any number: which faults, and when")
    parser.add_argument(
        "--drivers", type=int, choices=DRIVERS, default=1, help="1: `megascale up`; 3: by hand"
    )
    parser.add_argument("--tls", action="store_true", help="mutual TLS between all parts")
    parser.add_argument(
        "--no-disks", action="store_true", help="without full disks, which take root to mount"
    )
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary one")
    given = parser.parse_args(arguments)
    if not given.no_disks and (os.geteuid() != 0 or shutil.which("mount") is None):
        parser.error("small disks are mounted as root: run this as root, or give --no-disks")
    return Options(
        minutes=given.minutes,
        seed=given.seed,
        drivers=given.drivers,
        tls=given.tls,
        disks=not given.no_disks,
        folder=given.folder,
    )


def _positive(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
