"""An account of this host: how a program is run as it, and what it may enter."""

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
        """What its processes find in place of the variables of whoever starts them."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, run as this account by root; start it with ``child_environment``."""
        groups = ",".join(map(str, self.groups))
        become = [sys.executable, "-I", "-S", str(_BECOME)]
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
