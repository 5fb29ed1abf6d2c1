"""One process of a run by hand: meet, open the attempt, run the worker, end together."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import msgspec
import torch

from megascale_common.node import framing
from megascale_common.node.addresses import is_loopback, listen
from megascale_common.node.files import AttemptFolder, attempt_folder
from megascale_common.node.messages import NO_REPLICAS, Assignment
from megascale_common.node.process import network_view
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_job.layout import readers_of
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.visible import counted, visible
from megascale_trainer.launch.display import Display
from megascale_trainer.launch.host_services import CLUSTER, HostServices, ServiceFailed
from megascale_trainer.launch.local_agent import (
    LocalAgent,
    Outlets,
    SaveWatch,
    SpanKeeper,
    Watched,
)
from megascale_trainer.launch.meeting import Meeting, MeetingFailed, NameUnresolved
from megascale_trainer.launch.place import Place, own_address
from megascale_trainer.process import worker

FAILED, REFUSED = 1, 2
# Ranks end together: all have waited for the last commit before.
END_TOGETHER_S = 60.0
# torchrun passes on what the terminal has sent already: only a later signal ends at once.
REPEATED_AFTER_S = 2.0
NAMED_STEPS = 8  # of the saves that failed, at the end
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Signals of a terminal that closes, and of schedulers before a time limit.
WARNING_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STORE_BACKLOG = 1 << 15  # cut by the kernel to net.core.somaxconn


class Run:
    """One process of a run by hand; ``errors`` gets what people must read."""

    def __init__(
        self,
        config: JobConfig,
        place: Place,
        options: argparse.Namespace,
        folder: Path,
        services: HostServices | None,
        output: TextIO,
        errors: TextIO,
    ) -> None:
        self._config = config
        self._place = place
        self._options = options
        self._folder = folder
        self._services = services
        self._errors = errors
        shown = output if place.rank == 0 else None
        self._display = Display(shown, config.training.steps, as_json=options.json)
        limit_s = options.time_limit
        self._ends_at_s = None if limit_s is None else time.monotonic() + limit_s
        self._store_socket: socket.socket | None = None
        self._signalled_s = 0.0

    def carry_out(self) -> int:
        """The exit status: 0 done or saved, 1 failed, 2 refused."""
        # As under an agent: with more threads, sums on a CPU come in another order.
        torch.set_num_threads(1)
        try:
            meeting = Meeting(self._place)
            meeting.refuse_ended()
            opened = self._opened(meeting)
            sockets = self._sockets(meeting)
            device = self._device()
        except (ServiceFailed, MeetingFailed, OSError, RuntimeError) as error:
            return self._refuse(error)
        path = attempt_folder(self._config.name, opened["attempt"])
        folder = AttemptFolder(self._folder.parents[1] / path)
        folder.path.mkdir(parents=True, exist_ok=True)
        self._show_start(opened, folder)
        _log_to(folder.log(self._place.rank))
        assignment = self._assignment(opened, sockets, device, folder)
        return self._work(meeting, assignment, folder)

    def _work(self, meeting: Meeting, assignment: Assignment, folder: AttemptFolder) -> int:
        ours, theirs = socket.socketpair()
        rank, services = self._place.rank, self._services
        node, layout = assignment.node, self._config.layout
        spans = SpanKeeper(folder.spans(rank), folder.path, rank, node, layout)
        saves = None
        if services is not None and self._config.checkpoint.uri:
            saves = SaveWatch(services, assignment.attempt, looks=rank == 0)
        agent = LocalAgent(
            ours,
            rank,
            meeting,
            Outlets(display=self._display, report=self._report, give_up=self._give_up),
            Watched(services=services, saves=saves, spans=spans),
            self._ends_at_s,
        )
        if self._config.checkpoint.uri:
            self._save_on_signals(agent)
        agent.start()
        descriptors = [] if self._store_socket is None else [self._store_socket.detach()]
        status = worker.run(theirs, assignment, descriptors)
        theirs.close()
        agent.join()
        if status:
            return self._report_failure(agent, folder)
        meeting.mark(f"ended/{rank}")
        # The first rank of each host serves the others' daemon, and rank 0 the committer and store.
        if rank == 0 or services is not None:
            others = range(self._place.world_size) if rank == 0 else self._place.ranks_here
            meeting.await_marks([f"ended/{other}" for other in others], END_TOGETHER_S)
        return self._report_end(agent)

    def _opened(self, meeting: Meeting) -> dict[str, Any]:
        """What rank 0 has opened: attempt, restore, committer, and where its store listens."""
        if self._place.rank != 0:
            try:
                return self._taken(meeting)
            except (MeetingFailed, ServiceFailed) as error:
                if self._services is not None:  # rank 0 and the others of this host wait for it
                    meeting.fail(self._sockets_key, f"rank {self._place.rank}: {error}")
                raise
        meeting.publish("token", {"token": "" if self._services is None else self._services.token})
        try:
            opened = self._open()
        except (ServiceFailed, OSError) as error:
            meeting.fail("opened", f"rank 0 could not start: {error}")
            raise
        meeting.publish("opened", opened)
        return opened

    def _taken(self, meeting: Meeting) -> dict[str, Any]:
        """What rank 0 has opened, if this rank can take part."""
        if self._services is not None and self._config.checkpoint.uri:
            self._services.start_daemon(str(meeting.read("token")["token"]))
        opened = meeting.read("opened")
        if opened["job"] != loading.to_json(self._config):
            raise MeetingFailed(
                f"rank {self._place.rank} has read another job file than rank 0: "
                "give every host the same"
            )
        if opened["network"] != network_view():
            _refuse_unreachable(opened)
        self._device()
        if self._services is not None and self._config.checkpoint.uri:
            self._services.await_daemon()
        return opened

    def _open(self) -> dict[str, Any]:
        opened: dict[str, Any]
        if self._config.checkpoint.uri and self._services is not None:
            opened = msgspec.structs.asdict(self._services.open_attempt())
        else:
            opened = {
                "attempt": _new_attempt(self._folder),
                "restore": RestorePlan().to_mapping(),
                "committer_endpoint": "",
                "refused": [],
            }
        # Bound here and passed to rank 0's worker, as an agent does.
        host = own_address(self._place)
        self._store_socket = listen(host, backlog=_STORE_BACKLOG)
        store = [host, self._store_socket.getsockname()[1]]
        job = loading.to_json(self._config)
        return {**opened, "job": job, "store": store, "network": network_view()}

    def _sockets(self, meeting: Meeting) -> dict[str, str]:
        """Paths of the sockets of this host's children; on rank 0 all hosts have theirs then."""
        if self._services is None:
            return meeting.read(self._sockets_key)
        paths = {
            "loader": str(self._services.loader_socket),
            "checkpoint": str(self._services.checkpoint_socket),
        }
        meeting.publish(self._sockets_key, paths)
        for host in range(1, self._place.hosts) if self._place.rank == 0 else ():
            meeting.read(_sockets_key(host))
        return paths

    @property
    def _sockets_key(self) -> str:
        return _sockets_key(self._place.host)

    def _device(self) -> str:
        """cpu or cuda.

        Raises:
            ServiceFailed: there are fewer GPUs than ranks.
        """
        wanted: str = self._options.device
        count = 0 if wanted == "cpu" else torch.cuda.device_count()
        kind = "cuda" if wanted == "cuda" or (wanted == "auto" and count) else "cpu"
        if kind == "cuda" and self._place.local_world_size > count:
            raise ServiceFailed(
                f"--nproc-per-node: {counted(self._place.local_world_size, 'rank')}, and "
                f"{count} GPUs: "
                "start one rank per GPU, or give --device cpu",
                final=True,
            )
        return kind

    def _assignment(
        self, opened: dict[str, Any], sockets: dict[str, str], device: str, folder: AttemptFolder
    ) -> Assignment:
        place, config = self._place, self._config
        reader, readers = readers_of(place.ranks_here, config.layout)[place.rank]
        host, port = opened["store"]
        return Assignment(
            version=framing.PROTOCOL_VERSION,
            cluster=CLUSTER,
            node=f"host-{place.host}",
            job=config.name,
            attempt=opened["attempt"],
            rank=place.rank,
            local_rank=place.local_rank,
            device_kind="cuda" if device == "cuda" else "cpu",
            device_index=place.local_rank,
            config=loading.to_json(config),
            store_host=host,
            store_port=port,
            status_page=str(folder.status_page(place.rank)),
            spans=str(folder.spans(place.rank)),
            loader_socket=sockets["loader"],
            local_ranks=place.local_world_size,
            readers=readers,
            reader=reader,
            checkpoint_socket=sockets["checkpoint"],
            committer_endpoint=opened["committer_endpoint"],
            replicas=NO_REPLICAS,
            restore=opened["restore"],
            reports=place.rank == 0,
            run_folder=str(folder.path),
        )

    def _save_on_signals(self, agent: LocalAgent) -> None:
        """Signals of people, schedulers and terminals save and end.

        One that asks to end, again and later, ends at once; schedulers repeat the others.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number in ENDING_SIGNALS:
                now_s = time.monotonic()
                if self._signalled_s and now_s - self._signalled_s > REPEATED_AFTER_S:
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)
                self._signalled_s = self._signalled_s or now_s
            agent.leave(signal.Signals(number).name)

        for number in (*ENDING_SIGNALS, *WARNING_SIGNALS):
            signal.signal(number, on_signal)

    def _show_start(self, opened: dict[str, Any], folder: AttemptFolder) -> None:
        plan = RestorePlan.from_mapping(opened["restore"])
        for problem in opened["refused"]:
            self._display.note(f"a newer checkpoint is not used: {problem}")
        what = "starts from initial values"
        if plan.source is not RestoreSource.NONE:
            what = f"restores step {plan.step} from {plan.source}"
        self._display.event(
            "attempt",
            {"attempt": opened["attempt"], "restored_step": plan.step, "folder": str(folder.path)},
            f"job {self._config.name}, attempt {opened['attempt']}: {what}; logs in {folder.path}",
        )

    def _report_failure(self, agent: LocalAgent, folder: AttemptFolder) -> int:
        failed = agent.failed
        kind = failed.error_kind if failed is not None else "OTHER"
        detail = (failed.detail or _last_line(failed.error)) if failed is not None else ""
        rank = self._place.rank
        if detail == KeyboardInterrupt.__name__:
            if rank == 0:
                self._say("ended by Ctrl-C; the job has no checkpoint.uri, so nothing is saved")
            return FAILED
        self._say(f"rank {rank} failed ({kind}): {detail}; its log: {folder.log(rank)}")
        return FAILED

    def _report_end(self, agent: LocalAgent) -> int:
        finished, checkpoint = agent.finished, self._config.checkpoint
        assert finished is not None  # the worker's last message where its status is 0
        step, steps = finished.step, self._config.training.steps
        not_saved = finished.not_saved
        failed, skipped = agent.failed_saves, self._display.skipped
        text = f"all {steps} steps are done" if steps > 1 else "the one step is done"
        if step < steps:
            text = f"step {step} of {steps} is saved; the same command continues from there"
        if not_saved:
            text = f"{text}, and the last is not saved: {not_saved}"
        if failed:
            named = ", ".join(map(str, failed[-NAMED_STEPS:]))
            newest = "the newest of them " if len(failed) > NAMED_STEPS else ""
            text = f"{text}; {counted(len(failed), 'save')} failed: {newest}of step {named}"
        if skipped:
            text = f"{text}; {counted(skipped, 'update')} skipped"
        ended = {"step": step, "steps": steps, "not_saved": not_saved}
        self._display.event("end", {**ended, "failed_saves": len(failed), "skipped": skipped}, text)
        if not_saved and checkpoint.require_final:
            if self._place.rank == 0:
                self._say(f"the last step is not saved: {not_saved}")
            return FAILED
        return 0

    def _report(self, event: str, values: Mapping[str, Any], text: str) -> None:
        """What concerns this host: rank 0 shows it with its steps, another rank on stderr."""
        if self._place.rank == 0:
            self._display.event(event, values, text)
        elif text:
            self._say(f"host {self._place.host}: {text}")

    def _refuse(self, error: Exception) -> int:
        """A start that failed: rank 0, or the process that it is about, says why."""
        alone = isinstance(error, NameUnresolved)  # rank 0's host may know the name
        if self._place.rank == 0 or alone or not isinstance(error, MeetingFailed):
            self._say(f"rank {self._place.rank} cannot start: {error}")
        return REFUSED if isinstance(error, ServiceFailed) and error.final else FAILED

    def _give_up(self, problem: str) -> None:
        """End this process from the thread beside the worker, which waits in vain."""
        self._say(f"rank {self._place.rank}: {problem}")
        if self._services is not None:
            self._services.stop()
        os._exit(FAILED)

    def _say(self, text: str) -> None:
        self._errors.write(f"{visible(text)}\n")
        self._errors.flush()


def _sockets_key(host: int) -> str:
    return f"sockets/{host}"


def _refuse_unreachable(opened: dict[str, Any]) -> None:
    """On a host that does not share rank 0's loopback: refuse what listens only there.

    Raises:
        ServiceFailed: with the remedy.
    """
    if is_loopback(opened["store"][0]):
        raise ServiceFailed(
            f"MASTER_ADDR: it is {opened['store'][0]} on rank 0's own host, where other hosts "
            "cannot reach it: give torchrun --local-addr there, with an address that they reach",
            final=True,
        )
    committer = opened["committer_endpoint"].rpartition(":")[0].strip("[]")
    if committer and is_loopback(committer):
        raise ServiceFailed(
            "checkpoint.uri: rank 0's checkpoint daemon listens on loopback, so several hosts "
            "cannot commit together. It has no TLS yet: where nobody else reads or writes on the "
            "network between the hosts, give --insecure-network; else leave checkpoint.uri empty",
            final=True,
        )


def _new_attempt(folder: Path) -> int:
    """A number for an attempt without a commit log: that of the first folder that can be made."""
    number = 1
    while True:
        path = folder.parents[1] / attempt_folder(folder.name, number)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return number


def _log_to(path: Path) -> None:
    """From now on this process writes to its log, as a worker under an agent does."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
