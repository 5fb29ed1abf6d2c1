"""What must hold in every crash case, kept apart from the code that is tried.

*Lost*: the newest checkpoint that was reported as committed, and is whole, is not restored, or the
log cannot be opened although no byte was damaged. *Silent*: what is restored is not what was saved,
a fenced attempt has committed, or something that was reported is not in the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megascale_checkpoint.commit.commit_log import CommitLog

Key = tuple[int, int]  # attempt and step


@dataclass(slots=True)
class Saved:
    """A checkpoint that was, or may have been, committed.

    Attributes:
        images: slot images by rank.
        reported: whether the committer has answered that it is complete.
        retired: whether the log says that it exists no more.
        damaged: whether a fault has changed one of its files, or its record for good.
    """

    images: list[bytes]
    small_states: list[dict[str, Any]]
    reported: bool = False
    damaged: bool = False
    retired: bool = False


@dataclass(slots=True)
class Oracle:
    """Everything that was saved, in the order of the commits.

    Attributes:
        opened: attempts whose OPEN was answered, in order.
        log_damaged: whether a fault has changed, removed or replaced a record, which must not go
            without an error.
        reported: whether that error was raised.
    """

    saved: dict[Key, Saved] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    log_damaged: bool = False
    reported: bool = False
    found: bool = False
    lost: str = ""
    silent: str = ""

    @property
    def failed(self) -> bool:
        """Whether the case is lost or silently wrong."""
        return bool(self.lost or self.silent)

    def newest(self) -> Key | None:
        """The newest checkpoint that was reported and is whole."""
        keys = [
            key
            for key, saved in self.saved.items()
            if saved.reported and not saved.damaged and not saved.retired
        ]
        return keys[-1] if keys else None

    def retires(self, key: Key, later: list[Key]) -> bool:
        """The log has retired a checkpoint; ``later`` are those committed after it.

        Returns:
            Whether that is new.
        """
        saved = self.saved.get(key)
        if saved is None or saved.retired:
            return False
        whole = [other for other in later if not self.saved[other].damaged]
        if not saved.damaged and not whole:
            self.lost = self.lost or f"{key} was retired, and it was the newest complete one"
        saved.retired = True
        return True

    def restored(self, key: Key | None, images: list[bytes], states: list[dict[str, Any]]) -> None:
        """An attempt has restored ``key``; None is a start from initial values."""
        newest, order = self.newest(), list(self.saved)
        if key is not None:
            saved = self.saved.get(key)
            if saved is None:
                self.silent = self.silent or f"{key} was restored and never saved"
                return
            if saved.images != images or saved.small_states != states:
                self.silent = self.silent or f"{key} was restored with other values than saved"
                return
        self.found = newest is None or (key is not None and order.index(key) >= order.index(newest))
        if not self.found:
            kind = "silent" if self.log_damaged and not self.reported else "lost"
            text = f"{key} was restored although {newest} was committed"
            setattr(self, kind, getattr(self, kind) or text)

    def refused(self, error: Exception) -> None:
        """An attempt could not be opened, or nothing be restored."""
        if self.newest() is not None:
            self.lost = self.lost or f"{self.newest()} cannot be restored: {error}"

    def check_log(self, log: CommitLog) -> None:
        """Check the whole log against what was reported."""
        if log.damaged:
            if not self.log_damaged:
                self.lost = self.lost or f"the log is damaged: {log.damaged[0]}"
            return
        committed, highest = set(), 0
        for record in log.records:
            if record.kind == "OPEN":
                highest = max(highest, record.attempt)
            if record.kind == "COMMIT":
                committed.add((record.attempt, record.step))
                if record.attempt < highest:
                    self.silent = self.silent or (
                        f"attempt {record.attempt} committed step {record.step} "
                        f"after attempt {highest} was opened"
                    )
        if self.reported:
            return
        for key, saved in self.saved.items():
            if saved.reported and key not in committed:
                self.silent = self.silent or f"{key} was reported and is not in the log"
        for attempt in self.opened:
            if log.find_open(attempt) is None:
                self.silent = self.silent or f"attempt {attempt} was opened and is not in the log"
