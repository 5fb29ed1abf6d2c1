"""The agent of one node: starts its parts in order, stops them in order, and leaves no trace."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from megascale.v1 import executor_pb2, executor_pb2_grpc, link_pb2
from megascale_common.node import host
from megascale_common.node.addresses import joined
from megascale_common.node.files import replace_file
from megascale_common.node.process import boot_id, new_incarnation
from megascale_common.node.unix_sockets import create_socket_folder
from megascale_common.service import logs, tasks
from megascale_common.service.channel import present
from megascale_common.service.errors import OptionError
from megascale_common.service.metrics import MetricsServer, registry_of
from megascale_common.service.server import RpcServer
from megascale_common.service.start import read_token, write_address
from megascale_executor.agent import attempt
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.checks.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.checks.diagnosis import GroupChecks
from megascale_executor.agent.config import AgentConfig, addresses_from
from megascale_executor.agent.link.driver_link import DriverLink, NodeSide
from megascale_executor.agent.link.heartbeat import build_heartbeat, build_hello
from megascale_executor.agent.link.metrics import AgentMetrics
from megascale_executor.agent.link.service import SERVICE_NAME, ExecutorService
from megascale_executor.agent.processes import folders, job_inputs
from megascale_executor.agent.processes.job_processes import (
    NodeSetup,
    Preparation,
    offered_accounts,
)
from megascale_executor.agent.processes.template import TemplateKeeper
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports
from megascale_executor.agent.run.attempt_runner import AttemptRunner, NodeParts
from megascale_executor.counters.sampler import of_host, traffic_ring
from megascale_executor.diagnostics.devices import DeviceFacts, cpu_slots, list_gpus

_log = logs.get(__name__)

# The hello has the daemon's endpoint. If the daemon needs longer, the node links without it, and
# sends another hello later.
_DAEMON_BEFORE_LINK_S = 5.0


async def run_agent(config: AgentConfig) -> None:
    """Run the node until SIGTERM or SIGINT.

    Raises:
        OptionError: a device that the host does not have, or a token file that cannot be read.
        DeviceQueryError: the GPUs cannot be listed.
        OSError: a folder cannot be made, or a port cannot be bound.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    present(config.tls)
    node = NodeAgent(config, read_token(config.token_file), await find_devices(config))
    try:
        await node.start()
        await stopping.wait()
    finally:
        await node.stop()


class NodeAgent:
    """Owns the parts of one node and connects them."""

    def __init__(self, config: AgentConfig, token: str, devices: list[DeviceFacts]) -> None:
        self._config = config
        self._token = token
        self._devices = devices
        self._incarnation = new_incarnation()
        try:
            config.node_folder.mkdir(parents=True, exist_ok=True)
            self._lock = folders.lock_node(config.node_folder, config.node)
        except OSError as error:
            raise OptionError(
                f"--run-folder: {config.node_folder} cannot be used ({error.strerror or error}): "
                "give a folder that you may write to"
            ) from None
        setup = _setup_of(config)
        self._sockets = create_socket_folder(
            config.cluster, config.node, self._incarnation, passable=bool(setup.accounts)
        )
        self._reports = StepReports()
        self._counters = of_host(gpus=config.device_kind == "cuda")
        self._spans = SpanReports(config.node, counters=lambda: self._counters.newest)
        self._daemon = CheckpointDaemon(
            config,
            self._incarnation,
            token,
            self._sockets / "checkpoint.sock",
            self._on_daemon_change,
        )
        preparation = Preparation(setup, config.node_folder)
        self._templates = TemplateKeeper(
            config.template_command, config.node_folder / "template.log", preparation.idle
        )
        parts = NodeParts(
            config=config,
            devices=devices,
            templates=self._templates,
            daemon=self._daemon,
            reports=self._reports,
            spans=self._spans,
            socket_folder=self._sockets,
            preparation=preparation,
        )
        self.runner = AttemptRunner(parts, self._changed)
        side = NodeSide(
            hello=self._hello,
            heartbeat=self._heartbeat,
            see_epoch=self.runner.state.see_epoch,
            desired=self.runner.set_desired,
        )
        self._link = DriverLink(
            config.cluster, token, self._driver_addresses, side, self._reports, self._spans
        )
        self._server = RpcServer(token, tls=config.tls)
        fast_s = config.fast_counters_ms / 1e3
        self._ring = traffic_ring(fast_s) if fast_s else None
        figures = AgentMetrics(
            self._heartbeat,
            self._link,
            self._reports,
            self._spans,
            lambda: self._counters.newest,
            lambda: self._ring.peaks() if self._ring is not None else {},
        )
        self._metrics = MetricsServer(registry_of("executor", figures))
        self._metrics_file = config.node_folder / "metrics.address"
        self._endpoint = ""
        self._reported_checkpoint_endpoint = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._pids_written = ""

    async def start(self) -> None:
        """Start server, template and daemon, then the link, whose hello has their endpoints."""
        config = self._config
        service = ExecutorService(
            config.node_folder,
            self._status,
            self._is_active,
            self._holder,
            self.runner.diagnosis.run,
            GroupChecks(
                self._incarnation,
                config.host,
                [device.index for device in self._devices],
                self.runner.diagnosis.run_with_nodes,
            ),
        )
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, self._server.server)
        self._endpoint = await self._server.start(joined(config.host, 0), [SERVICE_NAME])
        if config.metrics_bind:
            await self._metrics.start(config.metrics_bind, self._metrics_file)
        self._templates.begin()
        self._daemon.begin()
        self._counters.start()
        if self._ring is not None:
            self._ring.start()
        write_address("--address-file", config.address_file, self._endpoint)
        _log.info(
            "node serves", node=config.node, incarnation=self._incarnation, endpoint=self._endpoint
        )
        await self._daemon.wait_ready(_DAEMON_BEFORE_LINK_S)
        self._tasks = [
            tasks.essential(self.runner.run(), "runner"),
            tasks.essential(self._link.run(), "link"),
            tasks.repeated(self.runner.scanner.run, "logs"),
            tasks.repeated(self._spans.run, "spans"),
        ]
        self._write_pids()

    async def stop(self) -> None:
        """Kill the workers, end the children, close the server, remove addresses and sockets."""
        _log.info("node stops", node=self._config.node)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.runner.shut_down()
        await asyncio.gather(self._templates.stop(), self._daemon.stop())
        await asyncio.to_thread(self._counters.stop)
        if self._ring is not None:
            await asyncio.to_thread(self._ring.stop)
        await self._server.stop()
        await self._metrics.stop()
        self._metrics_file.unlink(missing_ok=True)
        self._config.address_file.unlink(missing_ok=True)
        (self._config.node_folder / "pids.json").unlink(missing_ok=True)
        shutil.rmtree(self._sockets, ignore_errors=True)
        os.close(self._lock)

    def _driver_addresses(self) -> list[str]:
        return addresses_from(self._config.drivers, self._config.driver_file)

    def _hello(self) -> link_pb2.ExecutorHello:
        self._reported_checkpoint_endpoint = self._daemon.endpoint
        return build_hello(
            self._config,
            self._incarnation,
            self._devices,
            self._endpoint,
            self._daemon.endpoint,
            self.runner.diagnosis.measured,
        )

    def _changed(self) -> None:
        self._link.changed()
        self._write_pids()

    def _on_daemon_change(self) -> None:
        # A restarted daemon has a new endpoint, which only a hello can report.
        if self._daemon.endpoint and self._daemon.endpoint != self._reported_checkpoint_endpoint:
            self._link.hello_changed()
        self._changed()

    def _status(self) -> executor_pb2.GetNodeStatusResponse:
        beat = self._heartbeat()
        beat.seq = self._link.seq
        hello = build_hello(
            self._config, self._incarnation, self._devices, self._endpoint, self._daemon.endpoint
        )
        return executor_pb2.GetNodeStatusResponse(
            hello=hello,
            heartbeat=beat,
            pids=list(self._pids().values()),
            epoch_seen=beat.epoch_seen,
        )

    def _heartbeat(self) -> link_pb2.Heartbeat:
        return build_heartbeat(self.runner, self._daemon, self._counters.newest)

    def _holder(self) -> AttemptKey | None:
        state = self.runner.state
        held = [key for key in (state.key, state.wanted) if key != attempt.NO_ATTEMPT]
        return held[0] if held else None

    def _is_active(self, key: AttemptKey) -> bool:
        state = self.runner.state
        return state.key == key and state.phase in (attempt.STARTING, attempt.RUNNING)

    def _pids(self) -> dict[str, int]:
        """Process ids by role: the agent first, then what runs."""
        found: dict[str, int | None] = {
            "agent": os.getpid(),
            "template": self._templates.pid,
            "checkpoint": self._daemon.pid,
            "loader": self.runner.loader_pid,
        }
        for worker in self.runner.workers:
            if worker.process is not None and worker.process.alive:
                found[f"rank-{worker.rank}"] = worker.process.pid
        return {role: pid for role, pid in found.items() if pid is not None}

    def _write_pids(self) -> None:
        """Write pids.json, for operators and tools."""
        text = json.dumps(self._pids(), indent=1) + "\n"
        if text == self._pids_written:
            return
        try:
            replace_file(self._config.node_folder / "pids.json", text)
        except OSError as error:  # a full disk must not end the node
            _log.warning("pids.json cannot be written", error=str(error))
        else:
            self._pids_written = text


def _setup_of(config: AgentConfig) -> NodeSetup:
    """The surroundings of jobs on this node.

    Raises:
        OptionError: an account of ``--run-as`` cannot be used, or a folder cannot be made.
    """
    cache = config.cache_folder or config.run_folder / "cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if config.run_as:
            config.node_folder.chmod(0o711)
    except OSError as error:
        raise OptionError(f"--cache-folder: {error}: give a folder that can be written") from None
    interpreter = Path(sys.executable)
    entered = (config.node_folder, cache, interpreter, interpreter.resolve(), Path(__file__))
    accounts = offered_accounts(config.run_as, entered)
    variables = job_inputs.take_variables()
    return NodeSetup(cache, config.secrets_folder, variables, accounts)


async def find_devices(config: AgentConfig) -> list[DeviceFacts]:
    """Facts about the devices that the node owns, in the order given.

    Raises:
        OptionError: a GPU that the host does not have.
        DeviceQueryError: the GPUs cannot be listed.
    """
    if config.device_kind == "cpu":
        return cpu_slots(config.devices, host.cpu_model(), host.memory_bytes("MemTotal"), boot_id())
    present = {device.index: device for device in await list_gpus()}
    missing = [index for index in config.devices if index not in present]
    if missing:
        raise OptionError(
            f"--devices: GPUs {missing} are not on this host, which has {sorted(present)}"
        )
    return [present[index] for index in config.devices]
