"""The asyncio client: one method per call of DriverService.

    async with AsyncClient.from_run_folder("runs/current") as client:
        job = await client.submit(load_job("job.yaml"))
        async for update in client.watch(job.spec.name):
            ...

Answers are the messages of ``megascale.v1``; those with enums are the views of them in
:mod:`megascale_client.messages`. Lists are asynchronous iterators that fetch one page at a time.
Every method retries while no driver answers, and raises
:class:`megascale_client.errors.MegascaleError` or a subclass.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client import connection
from megascale_client.connection import Connection, RetryTimer
from megascale_client.errors import (
    CallFailed,
    ClusterNotFound,
    InvalidJob,
    InvalidRequest,
    NotPossible,
    TimedOut,
    Unavailable,
)
from megascale_client.fetch import FetchedCheckpoint, OpenSource, Progress, chosen, fetch
from megascale_client.messages import (
    TERMINAL_PHASES,
    CheckResult,
    Job,
    JobPhase,
    Node,
    Profile,
    TraceState,
    WatchJobResponse,
)
from megascale_client.orders import OrderCalls, Seen, request_id
from megascale_client.run_folder import (
    address_reader,
    ended,
    fate,
    find_run_folder,
    read_token,
)

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_RETRY_FOR_S = 30.0
PAGE_SIZE = 200
# Self-checks of a node multiply matrices and test disks; the driver's own limit is far below this.
DIAGNOSE_TIMEOUT_S = 130.0
PROFILE_POLL_INTERVAL_S = 0.5


class AsyncClient(OrderCalls):
    """A connection to one cluster.

    Args:
        address: host:port of any driver of the cluster, or a function that returns it.
        token: the cluster token.
        root_certificate: PEM file of the cluster's authority; given, the connection uses TLS.
        certificate: PEM file that says who calls, and so what it may do, with its ``key``; where
            the cluster has an authority.
        timeout_s: limit of one call.
        retry_for_s: how long a call is repeated while no driver answers.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        token: str,
        *,
        root_certificate: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_for_s: float = DEFAULT_RETRY_FOR_S,
    ) -> None:
        find = address if callable(address) else lambda: address
        self._retry_for_s = retry_for_s
        self._connection = Connection(
            find,
            token,
            tls=connection.given(root_certificate, certificate, key),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )
        # What the driver said about its newest answer: that it does not lead, say; or nothing.
        self.notes = self._connection.notes

    @classmethod
    def from_run_folder(
        cls, folder: str | Path | None = None, *, retry_for_s: float = DEFAULT_RETRY_FOR_S
    ) -> AsyncClient:
        """A client of the cluster in a run folder (default: $MEGASCALE_RUN_FOLDER, then
        ./runs/current).

        Raises:
            ClusterNotFound: no cluster there.
            NotAllowed: this user may not read the token.
        """
        found = find_run_folder(Path(folder) if folder is not None else None)
        files = connection.of_run_folder(found)
        client = cls(
            address_reader(found),
            read_token(found),
            root_certificate=files.root_certificate if files is not None else None,
            certificate=files.certificate if files is not None else None,
            key=files.key if files is not None else None,
            retry_for_s=retry_for_s,
        )
        client._connection.fate = functools.partial(fate, found)
        client._connection.ended = functools.partial(ended, found)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def submit(
        self,
        spec: job_pb2.JobSpec,
        *,
        validate_only: bool = False,
        warn: Callable[[str], object] | None = None,
    ) -> Job:
        """Submit a job; ``validate_only`` only checks it. Raises InvalidJob, AlreadyExists.

        ``warn`` is called with each warning, such as nodes that the job will wait for.
        """
        request = driver_pb2.SubmitJobRequest(
            spec=spec, request_id=request_id(), validate_only=validate_only
        )
        try:
            response = await self._connection.unary(
                "SubmitJob", request, driver_pb2.SubmitJobResponse
            )
        except InvalidRequest as error:
            if not error.problems:
                raise
            raise InvalidJob(error.problems, reason=error.reason) from None
        if warn is not None:
            for warning in response.warnings:
                warn(warning)
        return Job(response.job)

    async def get(self, name: str) -> Job:
        """One job. Raises NotFound."""
        request = driver_pb2.GetJobRequest(name=name)
        answer = await self._connection.unary("GetJob", request, driver_pb2.GetJobResponse)
        return Job(answer.job)

    async def jobs(
        self, *, phase: JobPhase | str | Collection[JobPhase | str] = ()
    ) -> AsyncIterator[Job]:
        """All jobs by name, or those in a ``phase`` or in one of several. Raises InvalidRequest."""
        phases = {
            JobPhase.of(each) for each in ([phase] if isinstance(phase, str | int) else phase)
        }
        request = driver_pb2.ListJobsRequest(page_size=PAGE_SIZE)
        async for page in self._connection.pages("ListJobs", request, driver_pb2.ListJobsResponse):
            for job in map(Job, page.jobs):
                if not phases or job.phase in phases:
                    yield job

    async def watch(self, name: str, *, resume_token: str = "") -> AsyncIterator[WatchJobResponse]:
        """The job's state, step records and events as they happen, until the job has ended.

        An update with a ``note`` is what the driver says about itself: that it has been without a
        term for some seconds and why, and that it leads again.
        Continues after the last update when a driver restarts or another takes over. A new driver
        sends its updates from the start, and those seen before are skipped. Raises NotFound.
        """
        token = resume_token
        seen = Seen()
        retry = RetryTimer(self._retry_for_s)
        while True:
            request = driver_pb2.WatchJobRequest(name=name, resume_token=token)
            try:
                async for update in self._connection.stream(
                    "WatchJob", request, driver_pb2.WatchJobResponse
                ):
                    token = update.resume_token or token
                    retry.reset()
                    if seen.is_new(update):
                        yield WatchJobResponse(update)
            except (CallFailed, ClusterNotFound) as error:
                await self._connection.recover(error, retry)
            else:
                # A driver that stops in order also closes its streams without an error, so only a
                # job in a terminal phase ends the watch.
                if (await self.get(name)).phase in TERMINAL_PHASES or not await retry.wait():
                    return

    async def wait(
        self, name: str, phase: JobPhase | str | None = None, *, timeout_s: float | None = None
    ) -> Job:
        """Wait until a job has ended, or until it is in ``phase``; returns the job.

        Raises NotFound; TimedOut after ``timeout_s`` seconds; NotPossible when the job has ended
        in another phase than the one awaited.
        """
        wanted = TERMINAL_PHASES if phase is None else {JobPhase.of(phase)}
        try:
            async with asyncio.timeout(timeout_s):
                async for update in self.watch(name):
                    if update.HasField("job") and update.job.phase in wanted:
                        return update.job
                job = await self.get(name)
        except TimeoutError:
            awaited = "has not ended" if phase is None else f"is not {JobPhase.of(phase)}"
            raise TimedOut(f"job {name} {awaited} after {timeout_s:g} s") from None
        if job.phase in wanted:
            return job
        raise NotPossible(
            f"job {name} has ended as {job.phase} and was not seen "
            f"{JobPhase.of(phase or job.phase)}: {job.phase_reason}",
            reason="JOB_ENDED",
        )

    async def profile(
        self,
        name: str,
        steps: int = 2,
        *,
        first_step: int = 0,
        ranks: Sequence[int] = (),
        reason: str = "",
    ) -> Profile:
        """Have ranks of a running job write a trace of coming steps, the same steps on all ranks.

        Returns at once, with the steps and the paths of the traces; :meth:`profiled` waits for
        them. Raises NotFound, NotPossible, InvalidRequest.

        Args:
            steps: how many steps.
            first_step: 0 means the nearest step that the request can reach on all ranks in time.
            ranks: global ranks; none means rank 0.
            reason: for the audit log.
        """
        request = driver_pb2.ProfileJobRequest(
            job=name,
            first_step=first_step,
            steps=steps,
            ranks=ranks,
            request_id=request_id(),
            reason=reason,
        )
        answer = await self._connection.unary("ProfileJob", request, driver_pb2.ProfileJobResponse)
        return Profile(answer.profile)

    async def profiled(self, name: str, profile_id: str) -> Profile:
        """Wait until no trace of a profile is pending: each is written, or has the reason why not.

        Raises NotFound; NotPossible when another profile was requested since.
        """
        while True:
            profile = (await self.get(name)).profile
            if profile.id != profile_id:
                raise NotPossible(
                    f"job {name}: another profile was requested since; the events show this one",
                    reason="PROFILE_SUPERSEDED",
                )
            if all(trace.state != TraceState.PENDING for trace in profile.traces):
                return profile
            await asyncio.sleep(PROFILE_POLL_INTERVAL_S)

    async def cancel_profile(self, name: str, *, reason: str = "") -> Profile:
        """Give up a job's profile in progress. Raises NotFound, NotPossible (there is none)."""
        request = driver_pb2.CancelProfileRequest(job=name, request_id=request_id(), reason=reason)
        answer = await self._connection.unary(
            "CancelProfile", request, driver_pb2.CancelProfileResponse
        )
        return Profile(answer.profile)

    async def explain(self, name: str) -> driver_pb2.ExplainJobResponse:
        """Why a job is where it is: the cause, what was done, what may be done. Raises NotFound."""
        request = driver_pb2.ExplainJobRequest(name=name)
        return await self._connection.unary("ExplainJob", request, driver_pb2.ExplainJobResponse)

    async def heat_map(
        self, name: str, operations: Sequence[str] = (), *, steps: int = 0
    ) -> driver_pb2.GetHeatMapResponse:
        """What each rank takes for each operation in the newest ``steps`` steps (default 50).

        Raises NotFound, NotPossible (the driver keeps no spans).
        """
        request = driver_pb2.GetHeatMapRequest(job=name, operations=operations, steps=steps)
        return await self._connection.unary("GetHeatMap", request, driver_pb2.GetHeatMapResponse)

    async def topology(
        self, name: str, *, rank: int | None = None
    ) -> driver_pb2.GetTopologyResponse:
        """Where each rank is, what it is inside of, for whom it waits, and who holds all up.

        ``rank``: only it and the members of its groups. Raises NotFound, InvalidRequest (the job
        has no such rank).
        """
        request = driver_pb2.GetTopologyRequest(job=name, rank=rank)
        return await self._connection.unary("GetTopology", request, driver_pb2.GetTopologyResponse)

    async def mfu_decline(
        self, name: str, *, steps: int = 0, split_step: int = 0
    ) -> driver_pb2.GetMfuDeclineResponse:
        """Why the newest ``steps`` steps (default 200) take longer than before, in one sentence.

        ``split_step``: from which on; 0: where they began to. Raises NotFound, NotPossible (the
        driver keeps no spans).
        """
        request = driver_pb2.GetMfuDeclineRequest(job=name, steps=steps, split_step=split_step)
        answer = driver_pb2.GetMfuDeclineResponse
        return await self._connection.unary("GetMfuDecline", request, answer)

    async def timeline(
        self, name: str, *, steps: int = 0, first_step: int = 0, ranks: Sequence[int] = ()
    ) -> AsyncIterator[bytes]:
        """A trace of all ranks over ``steps`` steps (default 3): parts of a .json.gz for Perfetto.

        ``first_step`` 0: the newest. ``ranks``: of these alone. Raises NotFound, NotPossible (there
        are no spans of them), InvalidRequest (too many spans).
        """
        request = driver_pb2.GetTimelineRequest(
            job=name, steps=steps, first_step=first_step, ranks=ranks
        )
        async for answer in self._connection.stream_once(
            "GetTimeline", request, driver_pb2.GetTimelineResponse, RetryTimer(self._retry_for_s)
        ):
            yield answer.data

    async def nodes(self) -> AsyncIterator[Node]:
        """All nodes."""
        request = driver_pb2.ListNodesRequest(page_size=PAGE_SIZE)
        async for page in self._connection.pages(
            "ListNodes", request, driver_pb2.ListNodesResponse
        ):
            for node in page.nodes:
                yield Node(node)

    async def diagnose(
        self, node: str, checks: Sequence[str] = (), *, full: bool = False
    ) -> list[CheckResult]:
        """Run self-checks of an idle or spare node now; without ``checks`` the quick set.

        ``full``: also what measures devices, links and the disk, within two minutes.

        Checks change nothing, so a lost call is repeated. Raises NotFound, NotPossible (ranks run
        on the node).
        """
        request = driver_pb2.RunDiagnosticsRequest(
            node=node,
            checks=checks,
            set=types_pb2.DIAGNOSTIC_SET_FULL if full else types_pb2.DIAGNOSTIC_SET_QUICK,
        )
        answer = await self._connection.unary(
            "RunDiagnostics",
            request,
            driver_pb2.RunDiagnosticsResponse,
            timeout_s=DIAGNOSE_TIMEOUT_S,
        )
        return [CheckResult(check) for check in answer.checks]

    async def events(
        self, subject: str = "", *, older: bool = False
    ) -> AsyncIterator[types_pb2.Event]:
        """The audit log of ``jobs/NAME``, ``nodes/NAME``, ``cluster`` (what is no job's) or all.

        ``older``: also the lines that only etcd and the driver's export have; of several logs they
        come in the order of time. Raises NotFound; InvalidRequest for older lines that cannot be
        read.
        """
        request = driver_pb2.ListEventsRequest(subject=subject, page_size=PAGE_SIZE)
        one_log = subject == "cluster" or subject.startswith("jobs/")
        if older:
            request.page_token = f"0.{subject.partition('/')[2]}" if one_log else "t0"
        async for page in self._connection.pages(
            "ListEvents", request, driver_pb2.ListEventsResponse
        ):
            for event in page.events:
                yield event

    async def watch_events(
        self, subject: str = "", *, resume_token: str = ""
    ) -> AsyncIterator[driver_pb2.WatchEventsResponse]:
        """The audit log as it grows, without end; ``subject`` as for :meth:`events`.

        Starts after ``resume_token``, or without one at the moment the first event is requested.
        An update with a ``note`` has no event: it is what the driver says about itself, that it has
        been without a term for some seconds and why, and that it leads again.
        Continues after the last event when a driver restarts or another takes over.

        Raises NotFound; InvalidRequest for a token that is too old.
        """
        token = resume_token
        retry = RetryTimer(self._retry_for_s)
        while True:
            request = driver_pb2.WatchEventsRequest(subject=subject, resume_token=token)
            try:
                async for update in self._connection.stream(
                    "WatchEvents", request, driver_pb2.WatchEventsResponse
                ):
                    token = update.resume_token or token
                    retry.reset()
                    if update.HasField("event") or update.note:
                        yield update
            except (CallFailed, ClusterNotFound) as error:
                await self._connection.recover(error, retry)
            else:
                if not await retry.wait():
                    raise Unavailable(
                        "the driver ended the stream of events repeatedly "
                        f"for {self._retry_for_s:g} s"
                    )

    async def logs(
        self,
        name: str,
        rank: int = 0,
        *,
        attempt: int = 0,
        lines: int = 100,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """The last ``lines`` lines of one rank's log; ``attempt`` 0 is the newest.

        With ``follow`` it continues until the attempt ends. A lost connection is retried only until
        the first line has arrived, because log lines have no number to resume from; later the error
        is raised. Raises NotFound; Unavailable at once when the rank's node does not answer.
        """
        request = driver_pb2.TailLogsRequest(
            job=name, rank=rank, attempt=attempt, lines=lines, follow=follow
        )
        async for answer in self._connection.stream_once(
            "TailLogs", request, driver_pb2.TailLogsResponse, RetryTimer(self._retry_for_s)
        ):
            yield answer.line

    async def checkpoints(self, name: str) -> AsyncIterator[driver_pb2.Checkpoint]:
        """Complete checkpoints of a job, newest first. Raises NotFound."""
        request = driver_pb2.ListCheckpointsRequest(job=name, page_size=PAGE_SIZE)
        answer = driver_pb2.ListCheckpointsResponse
        async for page in self._connection.pages("ListCheckpoints", request, answer):
            for checkpoint in page.checkpoints:
                yield checkpoint

    async def fetch_checkpoint(
        self,
        name: str,
        to: str | Path,
        *,
        step: int | None = None,
        progress: Progress | None = None,
        open_source: OpenSource | None = None,
    ) -> FetchedCheckpoint:
        """Copy a complete checkpoint from its storage into the new folder ``to``, verified.

        A fetch that fails or is cancelled leaves no folder.

        Args:
            step: step of the checkpoint; None means the newest.
            progress: called as ``progress(done_bytes, total_bytes)`` from another thread.
            open_source: opens what is no folder (:mod:`megascale_client.fetch`).

        Raises:
            NotFound: no such job, or it has no complete checkpoint (of that step).
            NotPossible: the storage cannot be read from here, or ``to`` cannot be written.
            DamagedCheckpoint: a file is not what was committed.
        """
        checkpoint = await chosen(self.checkpoints(name), name, step)
        return await fetch(checkpoint, Path(to), progress, open_source)

    async def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        """The leading driver, since when it leads, and counts of nodes and jobs."""
        request = driver_pb2.GetClusterInfoRequest()
        return await self._connection.unary(
            "GetClusterInfo", request, driver_pb2.GetClusterInfoResponse
        )
