"""The template process: it has imported torch, never touched CUDA, runs one thread, and forks
workers on request.

A restart after a fault must not pay the import of torch again (1.5 s alone, 4 to 6 s for eight
processes at once on two cores); a fork takes milliseconds and shares the imported pages. The
contract with the agent stands in :mod:`megascale_common.node.messages`. A worker arms its own
parent-death signal on this process, so that killing the template kills the node's workers.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import NoReturn

import torch

from megascale_common.node import framing
from megascale_common.node.messages import Exited, Forked, TemplateHello
from megascale_common.node.process import arm_parent_death
from megascale_trainer.process import self_check, worker

_KILLED_EXIT_CODE = 1


def serve(agent: socket.socket) -> None:
    """Serve fork requests until the agent closes its end; then kill what still runs and return."""
    torch.set_num_threads(1)
    # One thread only, or a fork would copy locks that nobody holds; frozen objects keep shared
    # pages shared.
    gc.collect()
    gc.freeze()
    children: dict[int, int] = {}  # pid -> pidfd
    selector = selectors.DefaultSelector()
    selector.register(agent, selectors.EVENT_READ)
    framing.send(
        agent,
        TemplateHello(kind="hello", version=framing.PROTOCOL_VERSION, torch=str(torch.__version__)),
    )
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj is agent:
                    if not _answer(agent, selector, children):
                        return
                else:
                    _reap(agent, selector, children, pid=key.data)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _answer(
    agent: socket.socket, selector: selectors.BaseSelector, children: dict[int, int]
) -> bool:
    """Fork as asked; False when the agent has closed the socket."""
    request = framing.receive(agent)
    if request is None:
        return False
    message, (worker_socket, log) = request
    if message["kind"] != "fork":
        raise framing.FramingError(f"the template knows 'fork', not {message['kind']!r}")
    parent_pid = os.getpid()  # the child must not ask for it: its parent may be another by then
    pid = os.fork()
    if pid == 0:
        selector.close()
        agent.close()
        _run_child(parent_pid, worker_socket, log)
    os.close(worker_socket)
    os.close(log)
    children[pid] = os.pidfd_open(pid)
    selector.register(children[pid], selectors.EVENT_READ, data=pid)
    framing.send(agent, Forked(kind="forked", rank=message["rank"], pid=pid))
    return True


def _reap(
    agent: socket.socket, selector: selectors.BaseSelector, children: dict[int, int], pid: int
) -> None:
    _, status = os.waitpid(pid, 0)
    descriptor = children.pop(pid)
    selector.unregister(descriptor)
    os.close(descriptor)
    exit_status = os.waitstatus_to_exitcode(status)
    framing.send(agent, Exited(kind="exited", pid=pid, status=exit_status))


def _run_child(parent_pid: int, socket_descriptor: int, log: int) -> NoReturn:
    """Body of a forked process: arm, redirect output, do the one thing its first message asks for,
    exit.
    """
    status = _KILLED_EXIT_CODE
    try:
        arm_parent_death(expected_parent_pid=parent_pid)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        status = _serve_first_message(socket.socket(fileno=socket_descriptor))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter teardown after torch takes seconds and can hang in a broken collective.
        os._exit(status)


def _serve_first_message(agent: socket.socket) -> int:
    first = framing.receive(agent)
    if first is None:
        return 0  # the agent changed its mind
    message, descriptors = first
    if message["kind"] == "assignment":
        return worker.run(agent, message, descriptors)
    if message["kind"] == "self_check":
        parameters = {key: value for key, value in message.items() if key != "kind"}
        listen = descriptors[0] if descriptors else None
        framing.send(agent, self_check.all_reduce_check(store_listen_fd=listen, **parameters))
        return 0
    raise framing.FramingError(
        f"a worker knows 'assignment' and 'self_check', not {message['kind']!r}"
    )
