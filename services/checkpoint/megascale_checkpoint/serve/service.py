"""CheckpointService over gRPC, for the driver, the node's agent and daemons of other nodes."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc, driver_pb2
from megascale_checkpoint.commit.restore_decision import SealedStep
from megascale_checkpoint.save.committer_client import HOLD_S
from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.jobs import Jobs
from megascale_checkpoint.serve.opening import Opening
from megascale_checkpoint.storage import SYMBOLIC_LINK, is_link_error
from megascale_common.service.errors import (
    ForbiddenError,
    RequestError,
    UnavailableError,
)
from megascale_common.service.identity.gate import caller
from megascale_common.service.identity.peers import Role
from megascale_common.service.status import answers, streams
from megascale_job.config import CheckpointConfig
from megascale_job.names import is_dns_label
from megascale_job.wire import restore

SERVICE = checkpoint_pb2.DESCRIPTOR.services_by_name["CheckpointService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
# Errors of a path at which no folder can be (ENOENT: /proc takes none).
_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS})


class CheckpointService(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """The calls of proto/megascale/v1/checkpoint.proto."""

    def __init__(
        self, jobs: Jobs, committer: Committer, node: str, replica_endpoint: str = ""
    ) -> None:
        self._jobs = jobs
        self._committer = committer
        self._node = node
        self._replica_endpoint = replica_endpoint

    @answers
    async def OpenAttempt(
        self, request: checkpoint_pb2.OpenAttemptRequest, context: Context
    ) -> checkpoint_pb2.OpenAttemptResponse:
        """See proto/megascale/v1/checkpoint.proto."""
        _check_open(request)
        with _storage_errors(), _place_errors(request.uri):
            record, decision = await self._committer.open_attempt(
                Opening(
                    request.job,
                    CheckpointConfig(
                        uri=request.uri,
                        load_uri=request.load_uri,
                        load="weights" if request.load_weights else "full",
                        keep_latest=request.keep_latest,
                        keep_every_steps=request.keep_every_steps,
                        keep_every_hours=request.keep_every_hours,
                    ),
                    request.world_size,
                    {rank: held.node for held in request.held for rank in held.ranks},
                ),
                request.attempt,
                SealedStep(request.sealed_step, request.sealed_by_attempt),
                frozenset(request.refused_steps),
                (request.epoch.cluster_generation, request.epoch.create_revision),
            )
        self._jobs.note_restore(request.job, decision.plan)
        return checkpoint_pb2.OpenAttemptResponse(
            restore=restore.to_proto(decision.plan),
            log_seq=record.seq,
            refused=decision.passed_over,
        )

    @answers
    async def ReportPrepared(
        self, request: checkpoint_pb2.ReportPreparedRequest, context: Context
    ) -> checkpoint_pb2.ReportPreparedResponse:
        """See proto/megascale/v1/checkpoint.proto. Answers once complete, or after HOLD_S."""
        with _storage_errors():
            peer = caller()
            manifest_uri = await self._committer.report(request, peer.name if peer else "")
        if not manifest_uri:
            manifest_uri = await self._await_commit(request)
        else:
            self._jobs.job(request.job).note_commit(request.step, request.attempt, manifest_uri)
        return checkpoint_pb2.ReportPreparedResponse(
            committed=bool(manifest_uri), manifest_uri=manifest_uri
        )

    @streams
    async def WatchProgress(
        self, request: checkpoint_pb2.WatchProgressRequest, context: Context
    ) -> AsyncIterator[checkpoint_pb2.WatchProgressResponse]:
        """See proto/megascale/v1/checkpoint.proto. Changes during a send go into the next one."""
        peer = caller()
        if peer is not None and peer.role is Role.EXECUTOR and peer.name != self._node:
            text = f"the certificate is that of node {peer.name}, and this is {self._node}'s daemon"
            raise ForbiddenError(text, reason="NOT_ITS_NODE")
        sent = None
        while True:
            # Taken before the state is read: the send awaits, and a change during it must wake us.
            changed = self._jobs.changed.next()
            response = checkpoint_pb2.WatchProgressResponse(
                jobs=self._jobs.progress(), replica_endpoint=self._replica_endpoint
            )
            if response != sent:
                yield response
                sent = response
            await changed.wait()

    @answers
    async def ListCommits(
        self, request: checkpoint_pb2.ListCommitsRequest, context: Context
    ) -> checkpoint_pb2.ListCommitsResponse:
        """See proto/megascale/v1/checkpoint.proto."""
        with _storage_errors():
            found = await self._committer.commits(request.uri)
        response = checkpoint_pb2.ListCommitsResponse()
        for record, manifest_uri, pin in found:
            if request.job and record.values.get("job", "") != request.job:
                continue
            checkpoint = driver_pb2.Checkpoint(
                job=record.values.get("job", ""),
                step=record.step,
                attempt=record.attempt,
                manifest_uri=manifest_uri,
                size_bytes=record.values.get("size_bytes", 0),
                world_size=record.values.get("world_size", 0),
                pin=pin,
            )
            checkpoint.committed_at.FromDatetime(datetime.fromisoformat(record.values["time"]))
            response.checkpoints.append(checkpoint)
        return response

    @answers
    async def CheckStorage(
        self, request: checkpoint_pb2.CheckStorageRequest, context: Context
    ) -> checkpoint_pb2.CheckStorageResponse:
        """See proto/megascale/v1/checkpoint.proto."""
        with _storage_errors(), _place_errors(request.uri):
            await self._committer.check(request.uri)
        return checkpoint_pb2.CheckStorageResponse()

    async def _await_commit(self, request: checkpoint_pb2.ReportPreparedRequest) -> str:
        try:
            async with asyncio.timeout(HOLD_S):
                while not (
                    found := self._committer.committed_uri(
                        request.job, request.attempt, request.step
                    )
                ):
                    await self._committer.changed.wait()
                return found
        except TimeoutError:
            return ""


@contextmanager
def _storage_errors() -> Iterator[None]:
    """What a storage raises, as an error for the caller: it may be tried again, or not at all."""
    try:
        yield
    except PermissionError as error:
        raise ForbiddenError(str(error)) from error
    except OSError as error:
        if is_link_error(error):  # it stays until somebody takes it away
            raise RequestError(str(error), reason=SYMBOLIC_LINK) from error
        raise UnavailableError(str(error), reason="STORAGE_UNAVAILABLE") from error


@contextmanager
def _place_errors(uri: str) -> Iterator[None]:
    """A path at which no folder can be is the request's fault, and not the storage's."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        text = f"{uri}: {error}: give a folder that every node can create"
        raise RequestError(text, reason="NO_FOLDER") from error


def _check_open(request: checkpoint_pb2.OpenAttemptRequest) -> None:
    if not is_dns_label(request.job):
        raise RequestError(f"job {request.job!r} is not a DNS-1123 label")
    if request.attempt < 1:
        raise RequestError("attempt is 0; attempts count from 1")
    if request.world_size < 1:
        raise RequestError(f"world_size is {request.world_size}; it must be at least 1")
    if request.sealed_step and not request.sealed_by_attempt:
        raise RequestError("sealed_step is given without sealed_by_attempt; give both or neither")
