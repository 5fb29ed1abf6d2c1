"""Processes under another account: what an account may enter, and a program that becomes it.

    python -m megascale_common.node.account UID GID GROUP[,GROUP...] -- program [argument...]

changes user and groups, arms the parent-death signal (a change of user clears it) and becomes the
program. Only root may do so.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megascale_common.node.process import exec_with_parent_death


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this host."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @classmethod
    def of(cls, name: str) -> Account:
        """The account called ``name``.

        Raises:
            KeyError: there is none.
        """
        found = pwd.getpwnam(name)
        groups = tuple(os.getgrouplist(name, found.pw_gid))
        return cls(name, found.pw_uid, found.pw_gid, groups, found.pw_dir)

    @property
    def variables(self) -> Mapping[str, str]:
        """What its processes find in place of the variables of whoever starts them."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, run as this account; start it with ``child_environment``."""
        groups = ",".join(map(str, self.groups))
        become = [sys.executable, "-m", "megascale_common.node.account"]
        return [*become, str(self.uid), str(self.gid), groups, "--", *command]

    def closed_folder(self, path: Path) -> Path | None:
        """The first folder on the way to ``path`` that this account may not enter, itself included.

        By owner, group and mode; other rules of the system are not known here.
        """
        for folder in (*reversed(path.parents), path):
            found = folder.stat()
            if stat.S_ISDIR(found.st_mode) and not self._may(found, stat.S_IXOTH):
                return folder
        return None

    def _may(self, found: os.stat_result, right: int) -> bool:
        """Whether the account has ``right`` (a bit of the others') on what was found."""
        if found.st_uid == self.uid:
            return bool(found.st_mode & (right << 6))
        if found.st_gid in self.groups:
            return bool(found.st_mode & (right << 3))
        return bool(found.st_mode & right)


def become(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Change this process to an account for good.

    Raises:
        OSError: only root may do so.
    """
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _main(arguments: Sequence[str]) -> NoReturn:
    if len(arguments) < 5 or arguments[3] != "--":
        sys.exit("usage: python -m megascale_common.node.account UID GID GROUPS -- program ...")
    try:
        groups = [int(group) for group in arguments[2].split(",") if group]
        become(int(arguments[0]), int(arguments[1]), groups)
        exec_with_parent_death(arguments[4:])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot run {arguments[4]} as user {arguments[0]}: {error}")


if __name__ == "__main__":
    _main(sys.argv[1:])
