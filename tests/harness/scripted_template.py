"""A training side without torch that does what its job's labels name: the template's contract.

Run by an agent through ``--template-command``. Its workers speak
:mod:`megascale_common.node.messages`, keep a status page and write a log; instead of training they
sleep. Labels of the job: ``steps`` and ``interval_s``; ``go``, a file without which no step begins;
``fail_rank`` with ``fail`` = exit | vanish | watchdog (of NCCL) | a kind of error | finish_early
(status 0 without Finished) | peer_absent (OTHER, after the timeout in an operation) | linger
(OTHER, and does not end), and ``fail_step``.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from megascale_common.node import framing
from megascale_common.node.process import arm_parent_death
from megascale_common.node.status_page import Phase, StatusPageWriter


def serve(agent: socket.socket, verdict: str) -> None:
    """Fork on request, reap, until the agent closes its end."""
    children: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(agent, selectors.EVENT_READ)
    framing.send(agent, {"kind": "hello", "version": framing.PROTOCOL_VERSION, "torch": "none"})
    while True:
        for key, _ in selector.select():
            if key.fileobj is not agent:
                _, status = os.waitpid(key.data, 0)
                selector.unregister(children[key.data])
                os.close(children.pop(key.data))
                framing.send(
                    agent,
                    {
                        "kind": "exited",
                        "pid": key.data,
                        "status": os.waitstatus_to_exitcode(status),
                    },
                )
                continue
            request = framing.receive(agent)
            if request is None:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            message, (worker_end, log) = request
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                agent.close()
                _child(parent, worker_end, log, verdict)
            os.close(worker_end)
            os.close(log)
            children[pid] = os.pidfd_open(pid)
            selector.register(children[pid], selectors.EVENT_READ, data=pid)
            framing.send(agent, {"kind": "forked", "rank": message["rank"], "pid": pid})


def _child(parent: int, worker_end: int, log: int, verdict: str) -> NoReturn:
    arm_parent_death(expected_parent_pid=parent)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        agent = socket.socket(fileno=worker_end)
        first = framing.receive(agent)
        if first is not None:
            message, descriptors = first
            if message["kind"] == "self_check":
                _self_check(agent, message, verdict)
                status = 0
            else:
                status = _work(agent, message, descriptors)
    finally:
        os._exit(status)


def _self_check(agent: socket.socket, message: framing.Message, verdict: str) -> None:
    if verdict == "HANG":
        time.sleep(60)
    target = f"{message['device_kind']}:{message['device_index']}"
    result = {
        "name": "compute",
        "target": target,
        "verdict": verdict,
        "detail": "scripted",
        "elapsed_s": 0.0,
    }
    framing.send(agent, {"kind": "self_checked", "rank": message["rank"], "results": [result]})


def _work(agent: socket.socket, assignment: framing.Message, descriptors: list[int]) -> int:
    labels: dict[str, str] = json.loads(assignment["config"])["labels"]
    rank, done = assignment["rank"], assignment["restore"]["step"]
    page = StatusPageWriter(
        Path(assignment["status_page"]), rank=rank, attempt=assignment["attempt"]
    )
    _print(f"rank {rank} of attempt {assignment['attempt']} has {len(descriptors)} descriptors")
    framing.send(agent, {"kind": "running", "step": done})
    while "go" in labels and not Path(labels["go"]).exists():
        time.sleep(0.01)
    for step in range(done + 1, int(labels.get("steps", "1000000")) + 1):
        time.sleep(float(labels.get("interval_s", "0.05")))
        if labels.get("fail_rank") == str(rank) and step >= int(labels.get("fail_step", "1")):
            if labels["fail"] == "peer_absent":
                page.enter(page.row("tp"))
                time.sleep(json.loads(assignment["config"])["recovery"]["collective_timeout_s"])
            return _fail(agent, labels["fail"])
        page.update(step=step, phase=Phase.STEP)
        _print(f"step {step}")
        if assignment["reports"]:
            framing.send(agent, {"kind": "step", "record": _record(assignment["attempt"], step)})
    page.update(phase=Phase.DONE)
    framing.send(agent, {"kind": "finished", "step": int(labels["steps"]), "not_saved": ""})
    return 0


def _fail(agent: socket.socket, how: str) -> int:
    _print(f"RuntimeError: scripted failure {how!r} at 0x{os.getpid():x}")
    if how == "vanish":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "watchdog":
        _print(
            "[rank1]:[E] [PG ID 0] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7) ran for 600000 ms"
        )
        os.abort()
    if how == "exit":
        return 3
    lingers = how == "linger"
    if how == "finish_early":
        return 0
    detail = "/checkpoints/rank-00001.safetensors" if how == "CHECKPOINT_CORRUPT" else ""
    how = "OTHER" if how in ("peer_absent", "linger") else how
    framing.send(
        agent, {"kind": "failed", "error_kind": how, "error": f"scripted {how}", "detail": detail}
    )
    if lingers:
        _print("the failure is reported")
        time.sleep(60)
    return 1


def _record(attempt: int, step: int) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "step": step,
        "loss": 1.0 / step,
        "learning_rate": 1e-3,
        "votes": 0,
        "step_time_s": 0.05,
        "mfu_causal": None,
        "completed_at_s": time.time(),
    }


def _print(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Arm, then serve."""
    arm_parent_death()
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--verdict", default="PASS")
    options = parser.parse_args()
    serve(socket.socket(fileno=options.socket_fd), options.verdict)


if __name__ == "__main__":
    sys.exit(main())
