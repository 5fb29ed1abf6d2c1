"""Brings the node to the desired state: prepares an attempt, starts its workers, stops them.

One task reconciles: it compares the desired state with the present one
(:mod:`megascale_executor.agent.attempt`) and takes the next action. Preparing and starting run in a
second task, so that a newer desired state can cancel them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.v1 import link_pb2
from megascale_common.node.addresses import joined, listen
from megascale_common.node.files import AttemptFolder
from megascale_common.node.messages import NotLeft
from megascale_common.service import logs, tasks
from megascale_common.service.errors import AssignmentError, TemplateError
from megascale_executor.agent import asyncio_tasks, attempt
from megascale_executor.agent.attempt import AttemptAction, AttemptState
from megascale_executor.agent.checks.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.checks.diagnosis import Diagnosis, SelfChecks
from megascale_executor.agent.config import AgentConfig, addresses_from
from megascale_executor.agent.kernel_log import KernelLog
from megascale_executor.agent.processes import child_processes, folders
from megascale_executor.agent.processes.job_processes import DEFAULT, Preparation
from megascale_executor.agent.processes.template import TemplateKeeper
from megascale_executor.agent.reports.logs import LogScanner
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports
from megascale_executor.agent.run.assignment import (
    Sockets,
    check_assignment,
    hosts_of,
    job_of,
    job_text,
    wanted_network,
    worker_assignments,
)
from megascale_executor.agent.workers.orders import LeaveOrders, Profiles, part_of
from megascale_executor.agent.workers.worker_status import stopped_attempt
from megascale_executor.agent.workers.workers import Worker, WorkerEvents, WorkerSet, describe_exit
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.finding import failures
from megascale_executor.diagnostics.registry import load_registry
from megascale_job.config import JobConfig
from megascale_job.problems import JobError

_log = logs.get(__name__)

# All ranks of the job connect at about the same time. The kernel lowers this to net.core.somaxconn.
_STORE_BACKLOG = 1 << 15
_STOP_RETRY_S = 1.0
# Bounded, because a driver that takes heartbeats but no records must not keep the job from ending.
# A driver that cannot be reached does not receive the end either.
_LAST_RECORDS_TIMEOUT_S = 60.0
# Workers that are connected to the loader notice its end themselves, and their errors say more.
_WORKERS_REPORT_FIRST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """The parts of the agent that serve every attempt of its node."""

    config: AgentConfig
    devices: Sequence[DeviceFacts]
    templates: TemplateKeeper
    daemon: CheckpointDaemon
    reports: StepReports
    spans: SpanReports
    socket_folder: Path
    preparation: Preparation


class AttemptRunner:
    """This node's part in attempts. ``changed`` is called whenever the next heartbeat has news."""

    def __init__(self, parts: NodeParts, changed: Callable[[], None]) -> None:
        config = parts.config
        self.state = AttemptState()
        self.scanner = LogScanner(KernelLog(config.kernel_log), changed)
        self.profiles = Profiles(config.node_folder, changed)
        self.leave = LeaveOrders()
        self.stopped: link_pb2.StoppedAttempt | None = None  # what had failed when it was stopped
        self._config = config
        self._devices = {device.index for device in parts.devices}
        self._templates = parts.templates
        self._daemon = parts.daemon
        self._reports = parts.reports
        self._spans = parts.spans
        self._socket_folder = parts.socket_folder
        self._preparation = parts.preparation
        self._met: tuple[str, ...] = ()  # hosts of the last attempt
        registry = load_registry()
        self._checks = SelfChecks(
            registry, parts.devices, config.node_folder, parts.daemon, self._peers
        )
        self.diagnosis = Diagnosis(
            registry, parts.devices, config.node_folder, parts.templates, parts.daemon, self._peers
        )
        self._changed = changed
        self._wake = asyncio.Event()
        self._activity: asyncio.Task[None] | None = None
        self._store: socket.socket | None = None
        self._workers: WorkerSet | None = None
        self._loader: asyncio.subprocess.Process | None = None
        self._loader_watch: asyncio.Task[None] | None = None
        self._job: JobConfig | None = None
        self._processes = DEFAULT
        self._work_folder = config.node_folder

    @property
    def workers(self) -> list[Worker]:
        """Workers of the present attempt, ended ones included."""
        return self._workers.workers if self._workers is not None else []

    @property
    def loader_pid(self) -> int | None:
        """Process id of the data loader while it runs."""
        return (
            self._loader.pid
            if self._loader is not None and self._loader.returncode is None
            else None
        )

    @property
    def folder(self) -> AttemptFolder:
        """Files of the present attempt."""
        return folders.attempt_folder(
            self._config.node_folder, self.state.key.job, self.state.key.attempt
        )

    def set_desired(self, desired: link_pb2.DesiredState) -> None:
        """Accept a desired state; see :meth:`AttemptState.accept` for what is refused."""
        self.state.accept(desired)
        self._wake_and_report()

    async def run(self) -> None:
        """Reconcile until the task is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (action := self.state.next_action()) is not AttemptAction.NOTHING:
                await self._do(action)
            self._profile()
            self._leave()

    async def shut_down(self) -> None:
        """Stop everything, when the agent itself ends."""
        await self._stop()
        await self._preparation.close()
        self.scanner.kernel.close()

    def _wake_and_report(self) -> None:
        self._wake.set()
        self._changed()

    def _profile(self) -> None:
        """Pass the desired state's profile, or its end, to the workers once all of them run."""
        command = part_of(self.state.desired, self.state.key)
        if self.state.phase != attempt.RUNNING:
            return
        if command is not None:
            self.profiles.want(self.state.key, command, self.workers)
        else:
            self.profiles.unwant(self.workers)

    def _leave(self) -> None:
        """Pass the order to save and end, or its withdrawal, to the workers once all run."""
        if self.state.phase == attempt.RUNNING and self.state.wanted == self.state.key:
            self.leave.want(self.state.desired.leave, self.workers)

    async def _do(self, action: AttemptAction) -> None:
        key = self.state.key if action is AttemptAction.STOP else self.state.wanted
        _log.info("attempt", action=action.name, job=key.job, attempt=key.attempt)
        self.diagnosis.give_way()
        if action is AttemptAction.STOP:
            await self._stop()
        elif action is AttemptAction.PREPARE:
            self.state.begin(attempt.PREPARING)
            self._activity = asyncio.create_task(
                self._guard(self._prepare(self.state.desired.assignment))
            )
        elif action is AttemptAction.START:
            self.state.begin(attempt.STARTING)
            self._activity = asyncio.create_task(
                self._guard(self._start(self.state.desired.assignment))
            )
        elif action is AttemptAction.REFUSE_START:
            self.state.begin(attempt.PREPARING)
            self.state.fail(
                "this agent has not prepared the attempt that it is to start: it was restarted"
            )
        self._changed()

    async def _guard(self, activity: Coroutine[Any, Any, None]) -> None:
        """Run a preparation or a start; a failure fails the attempt and ends its processes."""
        try:
            await activity
        except Exception as error:
            # Defects of the agent are reported too, so that the driver need not wait for its
            # deadline.
            expected = isinstance(error, (AssignmentError, TemplateError, JobError, OSError))
            _log.error("attempt failed on this node", error=str(error), exc_info=not expected)
            self.state.fail(str(error) if expected else f"{type(error).__name__}: {error}")
            await self._kill_processes()
        self._wake_and_report()

    async def _prepare(self, assignment: link_pb2.AttemptAssignment) -> None:
        config = job_of(assignment)
        check_assignment(assignment, config, self._config.node, self._devices)
        self._job = config
        self._processes = await self._preparation.processes(config)
        account = self._processes.account
        self._work_folder = folders.prepare(self.folder, account, assignment.ranks)
        self._daemon.serve_account(account)
        template = await self._templates.ready_for(self._processes)
        findings = await self._checks.run(
            config,
            list(assignment.ranks),
            list(assignment.devices),
            template,
            wanted_network(assignment),
            self._processes.environment,
            assignment.checks,
        )
        self.diagnosis.remember(findings)
        # The workers of the earlier attempt have ended, so the set of sealed snapshots is final.
        # The report of PREPARED carries it, and the driver plans the restore from it.
        await self._daemon.refresh()
        kernel_log = self.scanner.kernel.finding()
        checks = tuple(finding.to_proto() for finding in (*findings, kernel_log))
        bad = failures(findings)
        if bad:
            self.state.fail(f"self-check {bad[0].name} of {bad[0].target}: {bad[0].detail}", checks)
            return
        self.state.prepared(self._bind_store() if 0 in assignment.ranks else "", checks)

    def _bind_store(self) -> str:
        """Bind the rendezvous store's listening socket; returns host:port.

        The agent binds it and passes it to rank 0 with its assignment, so that the endpoint is
        known before any worker runs, and ranks that connect early wait in the backlog.
        """
        self._store = listen(self._config.host, backlog=_STORE_BACKLOG)
        return joined(self._config.host, self._store.getsockname()[1])

    def _peers(self) -> list[str]:
        """Hosts that this node connects to."""
        config = self._config
        drivers = addresses_from(config.drivers, config.driver_file)
        return [*hosts_of(drivers), *self._met]

    async def _start(self, assignment: link_pb2.AttemptAssignment) -> None:
        assert self._job is not None
        self._met = hosts_of(
            [assignment.store_endpoint, assignment.committer_endpoint, assignment.replica_target]
        )
        folder = self.folder
        loader = folders.loader_socket(
            self._socket_folder, assignment.attempt, self._processes.account
        )
        sockets = Sockets(loader, self._daemon.socket_path)
        assignments = worker_assignments(
            assignment, self._job, self._config, folder, self._work_folder, sockets
        )
        if (network := wanted_network(assignment)) is not None:
            variables = network.for_workers(self._processes.environment)
            for message, _ in assignments:
                message.network = variables
        await self._start_loader(job_text(assignment, self._job), folder, sockets.loader)
        template = await self._templates.ready_for(self._processes)
        events = WorkerEvents(
            all_running=self._on_running,
            all_finished=self._on_finished,
            step=self._on_step,
            failed=self._on_failed,
            exited=self._changed,
            profiled=self.profiles.take,
            not_left=self._on_not_left,
        )
        self._workers = WorkerSet(template, events, redact=self._processes.redact)
        logs = {message.rank: log for message, log in assignments}
        self.scanner.watch(self.state.key, logs)
        self._spans.watch(self.state.key, {rank: folder.spans(rank) for rank in logs})
        await self._workers.start(
            assignments, self._store.fileno() if self._store is not None else None
        )
        # Rank 0 has its own descriptor now; ours would keep the port open after its end.
        self._close_store()

    async def _start_loader(self, job: str, folder: AttemptFolder, path: Path) -> None:
        folder.config.write_text(job)
        path.unlink(missing_ok=True)
        options = ("--socket", str(path), "--config", str(folder.config))
        command = self._processes.command("-m", "megascale_trainer.data.loader", *options)
        self._loader = await child_processes.spawn(
            command, folder.loader_log, environment=self._processes.environment
        )
        watch = self._watch_loader(self._loader, folder.loader_log)
        self._loader_watch = tasks.single(watch, "loader-exit")

    async def _watch_loader(self, loader: asyncio.subprocess.Process, log: Path) -> None:
        """Fail the attempt if the loader ends by itself.

        Workers that have not connected to it yet would otherwise wait until their timeout.
        """
        status = await loader.wait()
        await asyncio.sleep(_WORKERS_REPORT_FIRST_S)
        try:
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
        except OSError as error:
            last_line = f"its log cannot be read ({error.strerror})"
        reason = f"the data loader {describe_exit(status)}: {last_line or 'its log is empty'}"
        if self._workers is not None and self.state.phase in (attempt.STARTING, attempt.RUNNING):
            self._workers.abort(reason)

    def _on_step(self, record: dict[str, Any]) -> None:
        self._reports.add(self.state.key.job, record)

    def _on_running(self) -> None:
        self.state.running()
        self._wake_and_report()

    def _on_finished(self) -> None:
        self._activity = asyncio.create_task(self._guard(self._finish(self._activity)))

    async def _finish(self, start: asyncio.Task[None] | None) -> None:
        """Report the end, but only once the driver has all step records.

        Clients that watch the job stop reading when it ends, so records must not come later.
        """
        if start is not None:
            await start
        await self._reports.until_taken(_LAST_RECORDS_TIMEOUT_S)
        # The driver waits for the last commit, so the heartbeat that reports the end carries it.
        await self._daemon.refresh()
        step = max((worker.finished_step for worker in self.workers), default=0)
        self.state.finished(next((w.not_saved for w in self.workers if w.not_saved), ""), step)
        self._wake_and_report()

    def _on_not_left(self, message: NotLeft) -> None:
        self.leave.failed_by(message)
        self._changed()

    def _on_failed(self, reason: str) -> None:
        self.state.fail(reason)
        self._wake_and_report()

    async def _stop(self) -> None:
        """Bring the node to idle. Returns only once no process of the attempt is left."""
        await asyncio_tasks.cancelled(self._activity)
        self._activity = None
        # Idle means that the devices are free. A worker that hangs in the kernel keeps its device,
        # so this node must not report idle before that worker has ended.
        while not await self._kill_processes():
            _log.error(
                "workers do not end; trying again",
                job=self.state.key.job,
                attempt=self.state.key.attempt,
            )
            await asyncio.sleep(_STOP_RETRY_S)
        await self.scanner.scan(last=True)  # before the report that the node is idle
        await self._spans.end()
        self.stopped = stopped_attempt(self.state.key, self.state.failure, self.workers)
        self._workers = None
        self._job = None
        self.profiles.forget(self.folder.path)
        self.leave.forget()
        self._checks.attempt_ended(well=self.state.phase == attempt.FINISHED)
        self.state.stopped()
        self._changed()

    async def _kill_processes(self) -> bool:
        """Send SIGKILL to workers and loader; False if a worker is still there afterwards."""
        self._close_store()
        gone = await self._workers.stop() if self._workers is not None else True
        await asyncio_tasks.cancelled(self._loader_watch)
        self._loader_watch = None
        if self._loader is not None:
            await child_processes.stop(self._loader, grace_s=0)
            self._loader = None
        return gone

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
