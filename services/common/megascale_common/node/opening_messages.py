"""Messages of a run by hand, which has no driver, with the checkpoint daemon that it has started.

They are part of :mod:`megascale_common.node.messages`, over the daemon's unix socket, on a
connection of their own:
    OpenAttempt -> AttemptOpened | Refused; AskSaves -> Saves | Refused.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class OpenAttempt(TypedDict):
    """Run by hand to daemon: open the attempt after the newest one in the commit log of ``uri``.

    What a driver asks for through OpenAttempt of megascale.v1.CheckpointService, but for the number
    of the attempt, which no driver issues here. The daemon is the attempt's committer from then on.
    ``read_only``: open nothing, only say what would be restored.
    """

    kind: Literal["open_attempt"]
    version: int
    job: str
    uri: str
    world_size: int
    load_uri: str
    load_weights: bool
    keep_latest: int
    keep_every_steps: int
    keep_every_hours: float
    read_only: NotRequired[bool]


class AttemptOpened(TypedDict):
    """Daemon to a run by hand: the attempt's number, and what all its ranks restore.

    ``restore`` is that of :meth:`megascale_job.restore.RestorePlan.to_mapping`, ``refused``
    says why newer checkpoints were passed over. ``attempt`` is 0 where none was opened.
    """

    kind: Literal["attempt_opened"]
    attempt: int
    restore: dict[str, Any]
    committer_endpoint: str
    refused: list[str]


class AskSaves(TypedDict):
    """Run by hand to daemon: what became of the saves of ``attempt``, which nobody else reports.

    ``look``: find out from the commit log of ``uri`` whether a later attempt is open as well.
    """

    kind: Literal["ask_saves"]
    job: str
    attempt: int
    uri: str
    look: bool


class FailedSave(TypedDict):
    """A rank's part of the checkpoint of ``step`` could not be kept."""

    step: int
    rank: int
    error: str


class Saves(TypedDict):
    """Daemon to a run by hand: the newest failures of its attempt, and its newest commit.

    ``newest_attempt``: that of the commit log; 0: it was not asked for, or is not known now.
    """

    kind: Literal["saves"]
    committed_step: int
    failures: list[FailedSave]
    newest_attempt: int
