"""What can go wrong in the checkpoint daemon, as one tree:

CheckpointError
├── RequestError      a worker or caller asked for something that does not fit the state; the message says what to do
├── SupersededError   a later attempt of the job has been opened: whatever this one does no longer counts
├── DamagedError      a file or slot does not hold what was written; ``file`` names it
├── NotFoundError     the checkpoint to start from is not there
├── UnusableError     there are checkpoints of the job, and none of them can be restored
├── NotReadyError     it can be done, but not now: try again
└── StagingError      staging memory cannot be had
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors that the daemon answers with."""


class RequestError(CheckpointError):
    """The request does not fit the state."""


class SupersededError(CheckpointError):
    """A later attempt has been opened."""


class NotFoundError(CheckpointError):
    """There is no checkpoint where one was said to be."""


class UnusableError(CheckpointError):
    """No checkpoint of the job can be restored: it must not begin again from step 0 unasked."""


class NotReadyError(CheckpointError):
    """What is asked for may be known soon: the caller tries again."""


class DamagedError(CheckpointError):
    """``file`` is missing, cut short, or holds other bytes than were written."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        self.problem = problem


class StagingError(CheckpointError):
    """There is no room for the slots, or their folder cannot be used."""
