"""Becomes another account and then a program; run by root as a script, never imported.

    python -I -S become.py UID GID GROUP[,GROUP...] -- program [argument...]

It runs isolated (-I) and by its path, because its environment is that of the program: modules that
a job puts first on the search path must not be loaded while this process is still root.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def main(arguments: Sequence[str]) -> NoReturn:
    """Change user and groups, then arm the parent-death signal, which that change clears."""
    if len(arguments) < 5 or arguments[3] != "--":
        sys.exit("usage: python -I -S become.py UID GID GROUP[,GROUP...] -- program [argument...]")
    process = runpy.run_path(str(Path(__file__).with_name("process.py")))
    try:
        uid, gid = int(arguments[0]), int(arguments[1])
        os.setgroups([int(group) for group in arguments[2].split(",") if group])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        process["exec_with_parent_death"](arguments[4:])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot run {arguments[4]} as user {arguments[0]}: {error}")
    raise AssertionError("a program that runs does not return")


if __name__ == "__main__":
    main(sys.argv[1:])
