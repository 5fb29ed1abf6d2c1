"""The template process of a node: ``python -m megascale_trainer.process --socket-fd N``.

Only the executor agent starts it. It imports torch once, ahead of need, never touches CUDA, runs
one thread, and forks a process per rank when the agent asks for it. So a restart after a fault does
not pay for the import of torch again (1.5 s alone, 4 to 6 s for eight processes at once on two
cores): a fork takes milliseconds and shares the imported pages. The contract with the agent is in
:mod:`megascale_common.node.messages`. A forked process arms its own parent-death signal on this
process, so killing the template kills the node's workers.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from megascale_common.node import framing
from megascale_common.node.messages import (
    STACKS_SIGNAL,
    Accepted,
    Assignment,
    Exited,
    Fork,
    Forked,
    SelfCheck,
    TemplateHello,
    kind_of,
)
from megascale_common.node.output import redact_streams, steady_streams
from megascale_common.node.process import arm_parent_death
from megascale_trainer.process.system import renew_thread_pool

_FAILED_EXIT_CODE = 1
_USED_LATE = (
    "torch._higher_order_ops.triton_kernel_wrap",
    "torch.distributed.fsdp",
    "triton.experimental.gluon.language",
    "megascale_kernels.fused.adamw",
)

T = TypeVar("T")
Program = Callable[[socket.socket, framing.Message, list[int]], int]
_FROM_AGENT = Accepted("the template", Fork)


def main() -> int:
    """Arm the parent-death signal, import torch, serve until the agent closes the socket."""
    arm_parent_death()
    steady_streams()
    redact_streams()
    parser = argparse.ArgumentParser(
        prog="python -m megascale_trainer.process", description=__doc__
    )
    parser.add_argument(
        "--socket-fd", type=int, required=True, help="inherited unix socket to the agent"
    )
    arguments = parser.parse_args()
    # Only after arming: the import of torch takes seconds, during which the agent may die. Garbage
    # collections during the import find nothing, and are a sixth of its time.
    gc.disable()
    import torch

    from megascale_kernels import operators
    from megascale_trainer.optimizer import registry
    from megascale_trainer.process import self_check, worker

    dict(registry.built_in())  # imports the optimizers, among which every rank finds its own
    gc.enable()
    torch.set_num_threads(1)
    if torch.version.cuda is not None:
        _import_kernels(operators.triton_operators)
    agent = socket.socket(fileno=arguments.socket_fd)
    programs = {
        kind_of(Assignment): _reads(Assignment, worker.run),
        kind_of(SelfCheck): _reads(SelfCheck, self_check.run),
    }
    _Template(agent, programs).serve(torch.__version__)
    return 0


def _reads(kind: type[T], program: Callable[[socket.socket, T, list[int]], int]) -> Program:
    """``program`` for a worker whose first message is of this kind."""
    accepted = Accepted("a worker", kind)
    return lambda agent, message, descriptors: program(agent, accepted.read(message), descriptors)


def _import_kernels(fused: Callable[[], object]) -> None:
    """Import ahead of need the modules that a worker on a GPU imports at their first use.

    They took 3.3 s of each start: the first call of an operator that is written in Python imports
    torch._dynamo, and the first kernel hashes Triton's own files (1B model, H200). None of these
    imports touches CUDA. The worker that needs a missing module reports it.
    """
    for name in _USED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        fused()
        cache = importlib.import_module("triton.runtime.cache")
        cache.triton_key()  # keeps its result


@dataclass(slots=True)
class _Template:
    """The running template. ``programs``: the program of a fork, by the kind of first message."""

    agent: socket.socket
    programs: Mapping[str, Program]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    children: dict[int, int] = field(default_factory=dict)  # pid -> pidfd

    def serve(self, torch_version: str) -> None:
        """Serve fork requests until the agent closes its end; then kill the remaining workers."""
        # One thread only: a fork would copy the locks of other threads, but not the threads that
        # release them. Frozen objects stay untouched by collections, so their pages stay shared.
        gc.collect()
        gc.freeze()
        self.selector.register(self.agent, selectors.EVENT_READ)
        hello = TemplateHello(version=framing.PROTOCOL_VERSION, torch=torch_version)
        framing.send(self.agent, hello)
        try:
            while True:
                for key, _ in self.selector.select():
                    if key.fileobj is not self.agent:
                        self._reap(key.data)
                    elif not self._answer():
                        return
        finally:
            for pid in self.children:
                os.kill(pid, signal.SIGKILL)

    def _answer(self) -> bool:
        """Fork as asked; False when the agent has closed the socket."""
        request = framing.receive(self.agent)
        if request is None:
            return False
        message, (worker_socket, log) = request
        fork = _FROM_AGENT.read(message)
        # Taken before the fork: if the template dies at once, the child already has another parent.
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            self.agent.close()
            self._run_child(parent_pid, worker_socket, log)
        os.close(worker_socket)
        os.close(log)
        self.children[pid] = os.pidfd_open(pid)
        self.selector.register(self.children[pid], selectors.EVENT_READ, data=pid)
        framing.send(self.agent, Forked(rank=fork.rank, pid=pid))
        return True

    def _reap(self, pid: int) -> None:
        _, status, used = os.wait4(pid, 0)
        descriptor = self.children.pop(pid)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        exit_status = os.waitstatus_to_exitcode(status)
        peak_bytes = used.ru_maxrss * 1024
        framing.send(self.agent, Exited(pid=pid, status=exit_status, peak_bytes=peak_bytes))

    def _run_child(self, parent_pid: int, socket_descriptor: int, log: int) -> NoReturn:
        """Body of a forked process: arm, redirect output, run the program of its first message."""
        status = _FAILED_EXIT_CODE
        try:
            arm_parent_death(expected_parent_pid=parent_pid)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            steady_streams()
            redact_streams()
            renew_thread_pool()
            status = self._run_first_message(socket.socket(fileno=socket_descriptor))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # The interpreter's teardown after torch takes seconds, and can hang in a broken
            # collective.
            os._exit(status)

    def _run_first_message(self, agent: socket.socket) -> int:
        first = framing.receive(agent)
        if first is None:
            return 0  # the agent no longer needs this process
        message, descriptors = first
        program = self.programs.get(message["kind"])
        if program is None:
            known = " and ".join(map(repr, self.programs))
            raise framing.FramingError(f"a worker accepts {known}, not {message['kind']!r}")
        if message["kind"] == kind_of(Assignment):
            # The handler needs no interpreter lock, which a hung call may hold. In a run by hand
            # the same signal has the run save and end.
            faulthandler.register(STACKS_SIGNAL)
        return program(agent, message, descriptors)


if __name__ == "__main__":
    raise SystemExit(main())
