"""The synchronous client for scripts and notebooks, with the methods of :class:`AsyncClient`.

    with Client.from_run_folder("runs/current") as client:
        client.submit(load_job("job.yaml"))
        for update in client.watch("example"):
            ...

Its methods are generated from those of the asynchronous client and have no logic of their own: each
call runs on an :class:`AsyncClient` in a private event-loop thread. So it works where the caller's
own thread runs a loop (a notebook) and from several threads at once, and Ctrl-C stops the call in
progress. An iterator that is left early (``break``, ``close()``, Ctrl-C) ends its stream at the
driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client.client import DEFAULT_RETRY_FOR_S, DEFAULT_TIMEOUT_S, AsyncClient
from megascale_client.fetch import FetchedCheckpoint, OpenSource, Progress
from megascale_client.loop_thread import LoopThread
from megascale_client.messages import (
    CheckResult,
    CordonNodeResponse,
    DrainNodeResponse,
    EvictNodeResponse,
    Job,
    JobPhase,
    Node,
    PolicyMode,
    Profile,
    RestartJobResponse,
    ResumeJobResponse,
    SetPolicyResponse,
    SuspendJobResponse,
    UncordonNodeResponse,
    UpdateJobResponse,
    WatchJobResponse,
)


class Client:
    """A connection to one cluster; arguments and errors are those of :class:`AsyncClient`."""

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
        self._drive(
            AsyncClient(
                address,
                token,
                root_certificate=root_certificate,
                certificate=certificate,
                key=key,
                timeout_s=timeout_s,
                retry_for_s=retry_for_s,
            )
        )

    @classmethod
    def from_run_folder(
        cls, folder: str | Path | None = None, *, retry_for_s: float = DEFAULT_RETRY_FOR_S
    ) -> Client:
        """See :meth:`AsyncClient.from_run_folder`."""
        client = cls.__new__(cls)
        client._drive(AsyncClient.from_run_folder(folder, retry_for_s=retry_for_s))
        return client

    def _drive(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = LoopThread(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread.

        Calls in progress in other threads raise RuntimeError.
        """
        self._loop.stop()

    # Begin of the generated part: change AsyncClient, then run `make docs`.

    def submit(
        self,
        spec: job_pb2.JobSpec,
        *,
        validate_only: bool = False,
        warn: Callable[[str], object] | None = None,
    ) -> Job:
        """Submit a job; ``validate_only`` only checks it. Raises InvalidJob, AlreadyExists.

        ``warn`` is called with each warning, such as nodes that the job will wait for.
        """
        return self._loop.run(self._client.submit(spec, validate_only=validate_only, warn=warn))

    def get(self, name: str) -> Job:
        """One job. Raises NotFound."""
        return self._loop.run(self._client.get(name))

    def jobs(self, *, phase: JobPhase | str | Collection[JobPhase | str] = ()) -> Iterator[Job]:
        """All jobs by name, or those in a ``phase`` or in one of several. Raises InvalidRequest."""
        return self._loop.iterate(self._client.jobs(phase=phase))

    def watch(self, name: str, *, resume_token: str = "") -> Iterator[WatchJobResponse]:
        """The job's state, step records and events as they happen, until the job has ended.

        An update with a ``note`` is what the driver says about itself: that it has been without a
        term for some seconds and why, and that it leads again.
        Continues after the last update when a driver restarts or another takes over. A new driver
        sends its updates from the start, and those seen before are skipped. Raises NotFound.
        """
        return self._loop.iterate(self._client.watch(name, resume_token=resume_token))

    def wait(
        self, name: str, phase: JobPhase | str | None = None, *, timeout_s: float | None = None
    ) -> Job:
        """Wait until a job has ended, or until it is in ``phase``; returns the job.

        Raises NotFound; TimedOut after ``timeout_s`` seconds; NotPossible when the job has ended
        in another phase than the one awaited.
        """
        return self._loop.run(self._client.wait(name, phase, timeout_s=timeout_s))

    def profile(
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
        return self._loop.run(
            self._client.profile(name, steps, first_step=first_step, ranks=ranks, reason=reason)
        )

    def profiled(self, name: str, profile_id: str) -> Profile:
        """Wait until no trace of a profile is pending: each is written, or has the reason why not.

        Raises NotFound; NotPossible when another profile was requested since.
        """
        return self._loop.run(self._client.profiled(name, profile_id))

    def cancel_profile(self, name: str, *, reason: str = "") -> Profile:
        """Give up a job's profile in progress. Raises NotFound, NotPossible (there is none)."""
        return self._loop.run(self._client.cancel_profile(name, reason=reason))

    def explain(self, name: str) -> driver_pb2.ExplainJobResponse:
        """Why a job is where it is: the cause, what was done, what may be done. Raises NotFound."""
        return self._loop.run(self._client.explain(name))

    def heat_map(
        self, name: str, operations: Sequence[str] = (), *, steps: int = 0
    ) -> driver_pb2.GetHeatMapResponse:
        """What each rank takes for each operation in the newest ``steps`` steps (default 50).

        Raises NotFound, NotPossible (the driver keeps no spans).
        """
        return self._loop.run(self._client.heat_map(name, operations, steps=steps))

    def topology(self, name: str, *, rank: int | None = None) -> driver_pb2.GetTopologyResponse:
        """Where each rank is, what it is inside of, for whom it waits, and who holds all up.

        ``rank``: only it and the members of its groups. Raises NotFound, InvalidRequest (the job
        has no such rank).
        """
        return self._loop.run(self._client.topology(name, rank=rank))

    def mfu_decline(
        self, name: str, *, steps: int = 0, split_step: int = 0
    ) -> driver_pb2.GetMfuDeclineResponse:
        """Why the newest ``steps`` steps (default 200) take longer than before, in one sentence.

        ``split_step``: from which on; 0: where they began to. Raises NotFound, NotPossible (the
        driver keeps no spans).
        """
        return self._loop.run(self._client.mfu_decline(name, steps=steps, split_step=split_step))

    def timeline(
        self, name: str, *, steps: int = 0, first_step: int = 0, ranks: Sequence[int] = ()
    ) -> Iterator[bytes]:
        """A trace of all ranks over ``steps`` steps (default 3): parts of a .json.gz for Perfetto.

        ``first_step`` 0: the newest. ``ranks``: of these alone. Raises NotFound, NotPossible (there
        are no spans of them), InvalidRequest (too many spans).
        """
        return self._loop.iterate(
            self._client.timeline(name, steps=steps, first_step=first_step, ranks=ranks)
        )

    def nodes(self) -> Iterator[Node]:
        """All nodes."""
        return self._loop.iterate(self._client.nodes())

    def diagnose(
        self, node: str, checks: Sequence[str] = (), *, full: bool = False
    ) -> list[CheckResult]:
        """Run self-checks of an idle or spare node now; without ``checks`` the quick set.

        ``full``: also what measures devices, links and the disk, within two minutes.

        Checks change nothing, so a lost call is repeated. Raises NotFound, NotPossible (ranks run
        on the node).
        """
        return self._loop.run(self._client.diagnose(node, checks, full=full))

    def events(self, subject: str = "", *, older: bool = False) -> Iterator[types_pb2.Event]:
        """The audit log of ``jobs/NAME``, ``nodes/NAME``, ``cluster`` (what is no job's) or all.

        ``older``: also the lines that only etcd and the driver's export have; of several logs they
        come in the order of time. Raises NotFound; InvalidRequest for older lines that cannot be
        read.
        """
        return self._loop.iterate(self._client.events(subject, older=older))

    def watch_events(
        self, subject: str = "", *, resume_token: str = ""
    ) -> Iterator[driver_pb2.WatchEventsResponse]:
        """The audit log as it grows, without end; ``subject`` as for :meth:`events`.

        Starts after ``resume_token``, or without one at the moment the first event is requested.
        An update with a ``note`` has no event: it is what the driver says about itself, that it has
        been without a term for some seconds and why, and that it leads again.
        Continues after the last event when a driver restarts or another takes over.

        Raises NotFound; InvalidRequest for a token that is too old.
        """
        return self._loop.iterate(self._client.watch_events(subject, resume_token=resume_token))

    def logs(
        self, name: str, rank: int = 0, *, attempt: int = 0, lines: int = 100, follow: bool = False
    ) -> Iterator[str]:
        """The last ``lines`` lines of one rank's log; ``attempt`` 0 is the newest.

        With ``follow`` it continues until the attempt ends. A lost connection is retried only until
        the first line has arrived, because log lines have no number to resume from; later the error
        is raised. Raises NotFound; Unavailable at once when the rank's node does not answer.
        """
        return self._loop.iterate(
            self._client.logs(name, rank, attempt=attempt, lines=lines, follow=follow)
        )

    def checkpoints(self, name: str) -> Iterator[driver_pb2.Checkpoint]:
        """Complete checkpoints of a job, newest first. Raises NotFound."""
        return self._loop.iterate(self._client.checkpoints(name))

    def fetch_checkpoint(
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
        return self._loop.run(
            self._client.fetch_checkpoint(
                name, to, step=step, progress=progress, open_source=open_source
            )
        )

    def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        """The leading driver, since when it leads, and counts of nodes and jobs."""
        return self._loop.run(self._client.cluster_info())

    def cancel(self, name: str, reason: str) -> Job:
        """Stop a job's workers; its committed checkpoints stay. Raises NotFound, NotPossible."""
        return self._loop.run(self._client.cancel(name, reason))

    def suspend(self, name: str, reason: str, *, validate_only: bool = False) -> SuspendJobResponse:
        """Save a job's state, then stop it and free its nodes until :meth:`resume`.

        Returns at once: a running job is SUSPENDED when it has saved (:meth:`wait`). With
        ``validate_only`` nothing changes. Raises NotFound, NotPossible (it has no checkpoints, or
        has ended).
        """
        return self._loop.run(self._client.suspend(name, reason, validate_only=validate_only))

    def resume(self, name: str, reason: str, *, validate_only: bool = False) -> ResumeJobResponse:
        """Let a suspended job have nodes again. Raises NotFound, NotPossible (it has ended)."""
        return self._loop.run(self._client.resume(name, reason, validate_only=validate_only))

    def delete(
        self, name: str, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.DeleteJobResponse:
        """Forget an ended job; its checkpoints stay. Raises NotFound, NotPossible (it runs)."""
        return self._loop.run(self._client.delete(name, reason, validate_only=validate_only))

    def restart(
        self,
        name: str,
        reason: str,
        *,
        from_step: int | None = None,
        now: bool = False,
        validate_only: bool = False,
    ) -> RestartJobResponse:
        """Begin a new attempt of a job, also of one that has failed.

        A running job saves first, unless ``now``. With ``from_step`` it goes back to that
        checkpoint, and what came after it is not restored any more. Raises NotFound (the job or the
        checkpoint), NotPossible (it has succeeded), InvalidRequest.
        """
        return self._loop.run(
            self._client.restart(
                name, reason, from_step=from_step, now=now, validate_only=validate_only
            )
        )

    def update(
        self,
        spec: job_pb2.JobSpec,
        reason: str,
        *,
        restart: bool = False,
        validate_only: bool = False,
    ) -> UpdateJobResponse:
        """Give the job of the spec's name a new configuration for its next attempt.

        With ``restart`` that attempt begins as soon as the present one has saved. Raises
        InvalidJob, NotFound, NotPossible (it has succeeded).
        """
        return self._loop.run(
            self._client.update(spec, reason, restart=restart, validate_only=validate_only)
        )

    def evict(
        self, node: str, reason: str, *, now: bool = False, validate_only: bool = False
    ) -> EvictNodeResponse:
        """Quarantine a node: its work moves to a spare.

        Its job saves first if it can, unless ``now``. With ``validate_only`` nothing changes, and
        the answer has the consequence. Raises NotFound, NotPossible.
        """
        return self._loop.run(
            self._client.evict(node, reason, now=now, validate_only=validate_only)
        )

    def cordon(self, node: str, reason: str, *, validate_only: bool = False) -> CordonNodeResponse:
        """Keep new work off a node; what runs there continues. Raises NotFound, NotPossible."""
        return self._loop.run(self._client.cordon(node, reason, validate_only=validate_only))

    def uncordon(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> UncordonNodeResponse:
        """Make a cordoned or quarantined node schedulable again. Raises NotFound, NotPossible."""
        return self._loop.run(self._client.uncordon(node, reason, validate_only=validate_only))

    def report_unreachable(
        self, nodes: Mapping[str, str]
    ) -> driver_pb2.ReportUnreachableNodesResponse:
        """Report all nodes that their platform does not reach, each with its condition there.

        A node that is silent as well then counts as dead sooner. Repeat it within ``valid_for``.
        Raises InvalidRequest.
        """
        return self._loop.run(self._client.report_unreachable(nodes))

    def drain(self, node: str, reason: str, *, validate_only: bool = False) -> DrainNodeResponse:
        """Empty a node: its job saves, leaves it and goes on elsewhere. Raises NotFound."""
        return self._loop.run(self._client.drain(node, reason, validate_only=validate_only))

    def set_policy(
        self, rule: str, mode: PolicyMode | str, reason: str, *, validate_only: bool = False
    ) -> SetPolicyResponse:
        """Have a rule of the driver observed or enforced. Raises InvalidRequest."""
        return self._loop.run(
            self._client.set_policy(rule, mode, reason, validate_only=validate_only)
        )

    def set_quota(
        self, tenant: str, devices: int | None, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.SetQuotaResponse:
        """Bound the devices that a tenant's jobs hold at once; None: the driver's default.

        Jobs that run go on. Raises InvalidRequest.
        """
        return self._loop.run(
            self._client.set_quota(tenant, devices, reason, validate_only=validate_only)
        )

    def reset_breaker(
        self, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.ResetBreakerResponse:
        """Have the driver enforce inferred verdicts again, after its breaker has tripped."""
        return self._loop.run(self._client.reset_breaker(reason, validate_only=validate_only))

    # End of the generated part.
