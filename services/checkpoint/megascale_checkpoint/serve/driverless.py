"""Attempts of runs by hand, which have no driver: opened over the daemon's local socket.

The messages are those of a run by hand in :mod:`megascale_common.node.messages`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.jobs import Jobs
from megascale_checkpoint.serve.opening import Opening
from megascale_common.node.framing import PROTOCOL_VERSION
from megascale_common.node.messages import (
    AskSaves,
    AttemptOpened,
    ErrorKind,
    FailedSave,
    HandRequest,
    OpenAttempt,
    Refused,
    Saves,
)
from megascale_common.service.errors import (
    ForbiddenError,
    NotFoundError,
    RequestError,
    ServiceError,
    UnusableError,
)
from megascale_job.loading import from_json
from megascale_job.problems import JobError

# What lies in the job or its folder: the next start would find the same.
_FINAL = (RequestError, NotFoundError, ForbiddenError, UnusableError, PermissionError)


@dataclass(slots=True)
class HandOpenings:
    """``endpoint`` is this daemon's own, at which ranks of other nodes reach the committer."""

    committer: Committer
    jobs: Jobs
    endpoint: str = ""

    async def answer(self, request: HandRequest) -> AttemptOpened | Saves | Refused:
        """What the run asks for.

        Raises:
            RequestError: the message is not as the contract has it.
        """
        if isinstance(request, AskSaves):
            return await self._saves(request)
        return await self._open(request)

    async def _saves(self, request: AskSaves) -> Saves:
        newest = 0
        if request.look:
            # A storage that fails now is not what the run asks about: its saves fail.
            with contextlib.suppress(ServiceError, OSError):
                newest = await self.committer.newest_attempt(request.uri)
        job = self.jobs.job(request.job)
        committed = job.committed
        return Saves(
            committed_step=committed.step if committed.attempt == request.attempt else 0,
            failures=[
                FailedSave(step=failed.step, rank=failed.rank, error=failed.error)
                for failed in job.recent_failures
                if failed.attempt == request.attempt
            ],
            newest_attempt=newest,
        )

    async def _open(self, request: OpenAttempt) -> AttemptOpened | Refused:
        """Open the next attempt, or only say what it would restore.

        Raises:
            RequestError: the message is not as the contract has it.
        """
        wanted = _read(request)
        try:
            if request.read_only:
                number, decision = 0, await self.committer.next_restore(wanted)
            else:
                record, decision = await self.committer.open_next_attempt(wanted)
                number = record.attempt
                self.jobs.note_restore(wanted.job, decision.plan)
        except (ServiceError, OSError) as error:
            kind: ErrorKind = "BAD_JOB" if isinstance(error, _FINAL) else "OTHER"
            return Refused(error_kind=kind, error=str(error), file="")
        return AttemptOpened(
            attempt=number,
            restore=decision.plan.to_mapping(),
            committer_endpoint=self.endpoint,
            refused=list(decision.passed_over),
        )


def _read(request: OpenAttempt) -> Opening:
    if request.version != PROTOCOL_VERSION:
        raise RequestError(
            f"open_attempt.version is {request.version}; this daemon supports "
            f"{PROTOCOL_VERSION}: run trainer and daemon from one build"
        )
    try:
        config = from_json(request.config)
    except JobError as error:
        raise RequestError(f"open_attempt.config: {error}") from error
    if not config.checkpoint.uri:
        raise RequestError("open_attempt needs a checkpoint.uri")
    return Opening(config.name, config.checkpoint, config.layout.world_size)
