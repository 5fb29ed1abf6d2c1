"""Compare the protos with an earlier commit's by `buf breaking`, without a network.

    python proto/breaking.py [--against REVISION] [--skip-without-history]

Without --against: the newest tag; without tags the point where this branch left main; on main the
commit before. Exit status 0 nothing breaks, 1 something does (buf prints what), 2 nothing was
compared (0 with --skip-without-history where there is no git history at all).
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PROTO = Path(__file__).resolve().parent
BUF_FOUND_BREAKING = 100


def _git(*arguments: str) -> bytes | None:
    """The output of git; None if it fails or is not installed."""
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=PROTO.parent, capture_output=True, check=False
        )
    except OSError:
        return None
    return found.stdout if found.returncode == 0 else None


def _name(*arguments: str) -> str:
    return (_git(*arguments) or b"").decode().strip()


def base_revision() -> str:
    """The revision to compare with by default; "" without a history."""
    if tag := _name("describe", "--tags", "--abbrev=0"):
        return tag
    head = _name("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        left = _name("merge-base", "HEAD", main)
        if left and left != head:
            return left
    return _name("rev-parse", "HEAD^")


def compare(revision: str, protos: Path = PROTO) -> int:
    """Compare ``protos`` with those of ``revision``; returns the exit status."""
    archive = _git("archive", "--format=tar", f"{revision}:proto")
    if archive is None:
        print(f"git has no protos of {revision}: nothing was compared", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="megascale-proto-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            # Python 3.11.2 of Debian 12 has no filters; git's archive needs none.
            packed.extraction_filter = getattr(tarfile, "data_filter", lambda entry, _: entry)
            packed.extractall(folder)
        done = subprocess.run(["buf", "breaking", "--against", folder], cwd=protos, check=False)
    if done.returncode in (0, BUF_FOUND_BREAKING):
        found = "break what clients" if done.returncode else "break nothing that clients"
        print(f"the protos {found} of {revision} rely on", file=sys.stderr)
        return 1 if done.returncode else 0
    return 2


def main() -> int:
    """Compare; the exit status is that of the module's description."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", default="", metavar="REVISION", help="commit or tag")
    parser.add_argument(
        "--skip-without-history", action="store_true", help="status 0 where git has no history"
    )
    options = parser.parse_args()
    revision = options.against or base_revision()
    if not revision:
        print("git has no earlier protos here: nothing was compared", file=sys.stderr)
        return 0 if options.skip_without_history else 2
    return compare(revision)


if __name__ == "__main__":
    sys.exit(main())
