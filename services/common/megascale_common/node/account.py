"""An account of this host: runs programs under it, and finds folders that it cannot enter."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_BECOME = Path(__file__).with_name("become.py")


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
        """Environment variables of its processes, which replace those of the starting process."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line by which root runs ``command`` under this account.

        Start it with :func:`megascale_common.node.process.child_environment`.
        """
        groups = ",".join(map(str, self.groups))
        become = [sys.executable, "-I", "-S", str(_BECOME)]
        return [*become, str(self.uid), str(self.gid), groups, "--", *command]

    def closed_folder(self, path: Path) -> Path | None:
        """The first folder on the way to ``path``, or ``path`` itself, that it cannot enter.

        Decided by owner, group and mode only; other rules of the system are not considered.
        """
        for folder in (*reversed(path.parents), path):
            found = folder.stat()
            if stat.S_ISDIR(found.st_mode) and not self._may(found, stat.S_IXOTH):
                return folder
        return None

    def _may(self, found: os.stat_result, right: int) -> bool:
        """Whether the account has ``right`` (one of the permission bits for others) on a file."""
        if found.st_uid == self.uid:
            return bool(found.st_mode & (right << 6))
        if found.st_gid in self.groups:
            return bool(found.st_mode & (right << 3))
        return bool(found.st_mode & right)
