"""Fetch one artifact of code into a new folder: what a node's agent runs for `code.uri`.

    python -m megascale_checkpoint.artifacts --uri URI --sha256 DIGEST --to FOLDER

Exit status 0, or 1 with one line on stderr that says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megascale_checkpoint.artifacts import storing
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service.errors import ServiceError


def main() -> int:
    """See the module's text."""
    if PARENT_PID_VARIABLE in os.environ:
        arm_parent_death()
    parser = argparse.ArgumentParser(prog="python -m megascale_checkpoint.artifacts")
    parser.add_argument("--uri", required=True, help="the artifact")
    parser.add_argument("--sha256", required=True, help="its digest")
    parser.add_argument("--to", type=Path, required=True, help="a folder that is not there yet")
    options = parser.parse_args()
    try:
        storing.fetch(options.uri, options.sha256, options.to)
    except ServiceError as error:
        print(error.message.replace("\n", " "), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"code.uri {options.uri} cannot be fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
