"""Attempts of runs by hand, which have no driver: opened over the daemon's local socket.

The messages are those of :mod:`megascale_common.node.opening_messages`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint.memory.registration import field
from megascale_checkpoint.retention.policy import Retention
from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.jobs import Jobs
from megascale_checkpoint.serve.opening import Opening
from megascale_common.node.framing import PROTOCOL_VERSION, Message
from megascale_common.node.messages import ErrorKind, Refused
from megascale_common.node.opening_messages import AttemptOpened, FailedSave, Saves
from megascale_common.service.errors import (
    ForbiddenError,
    NotFoundError,
    RequestError,
    ServiceError,
    UnusableError,
)
from megascale_job.names import is_dns_label

# What lies in the job or its folder: the next start would find the same.
_FINAL = (RequestError, NotFoundError, ForbiddenError, UnusableError, PermissionError)


@dataclass(slots=True)
class HandOpenings:
    """``endpoint`` is this daemon's own, at which ranks of other nodes reach the committer."""

    committer: Committer
    jobs: Jobs
    endpoint: str = ""

    async def answer(self, message: Message) -> AttemptOpened | Saves | Refused:
        """What the run asks for.

        Raises:
            RequestError: the message is not as the contract has it.
        """
        if message.get("kind") == "ask_saves":
            return await self._saves(message)
        return await self._open(message)

    async def _saves(self, message: Message) -> Saves:
        name, attempt = field(message, "job", str), field(message, "attempt", int)
        uri, look = field(message, "uri", str), field(message, "look", bool)
        newest = 0
        if look:
            # A storage that fails now is not what the run asks about: its saves fail.
            with contextlib.suppress(ServiceError, OSError):
                newest = await self.committer.newest_attempt(uri)
        job = self.jobs.job(name)
        committed = job.committed
        return Saves(
            kind="saves",
            committed_step=committed.step if committed.attempt == attempt else 0,
            failures=[
                FailedSave(step=failed.step, rank=failed.rank, error=failed.error)
                for failed in job.recent_failures
                if failed.attempt == attempt
            ],
            newest_attempt=newest,
        )

    async def _open(self, message: Message) -> AttemptOpened | Refused:
        """Open the next attempt, or only say what it would restore.

        Raises:
            RequestError: the message is not as the contract has it.
        """
        wanted, read_only = _read(message), message.get("read_only", False)
        try:
            if read_only:
                number, decision = 0, await self.committer.next_restore(wanted)
            else:
                record, decision = await self.committer.open_next_attempt(wanted)
                number = record.attempt
                self.jobs.note_restore(wanted.job, decision.plan)
        except (ServiceError, OSError) as error:
            kind: ErrorKind = "BAD_JOB" if isinstance(error, _FINAL) else "OTHER"
            return Refused(kind="refused", error_kind=kind, error=str(error), file="")
        return AttemptOpened(
            kind="attempt_opened",
            attempt=number,
            restore=decision.plan.to_mapping(),
            committer_endpoint=self.endpoint,
            refused=list(decision.passed_over),
        )


def _read(message: Message) -> Opening:
    values: dict[str, Any] = {
        name: field(message, name, kind)
        for name, kind in (
            ("version", int),
            ("job", str),
            ("uri", str),
            ("world_size", int),
            ("load_uri", str),
            ("load_weights", bool),
            ("keep_latest", int),
            ("keep_every_steps", int),
            ("keep_every_hours", float),
        )
    }
    if values["version"] != PROTOCOL_VERSION:
        raise RequestError(
            f"open_attempt.version is {values['version']}; this daemon supports "
            f"{PROTOCOL_VERSION}: run trainer and daemon from one build"
        )
    if not is_dns_label(values["job"]):
        raise RequestError(f"open_attempt.job {values['job']!r} is not a DNS-1123 label")
    if values["world_size"] < 1 or not values["uri"]:
        raise RequestError("open_attempt needs a uri, and a world_size of at least 1")
    keeps = ("keep_latest", "keep_every_steps", "keep_every_hours")
    return Opening(
        values["job"],
        values["uri"],
        values["world_size"],
        values["load_uri"],
        Retention(*(values[name] for name in keeps)),
        values["load_weights"],
    )
