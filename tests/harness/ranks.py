"""Ranks of a job as processes, cheaply: forks of a template that imported torch once.

``RankPool.run`` starts one process per rank, calls a function of an importable module in each, and
returns what they return. Importing torch in eight fresh processes on two cores takes seconds;
forking the template takes milliseconds.

On GPUs the start of a CUDA context and its libraries takes seconds again. A *resident* pool
therefore keeps the ranks of each world size between runs. What they share is the context, never a
process group: that is torn down after each run. A rank that fails takes its world with it, and the
next run starts a new one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import program_start
from tests.harness.processes import cpu_ticks
from tests.harness.waiting import STANDSTILL_S, ProgressWatch, Standstill

from megascale_common.node.process import arm_parent_death, child_environment
from megascale_trainer.process.system import renew_thread_pool

REPOSITORY = Path(__file__).resolve().parents[2]
# After one rank failed, how long its peers may take to detect it before they are killed.
_GRACE_S = 3.0


class RankFailed(AssertionError):
    """A rank raised, died or stood still; the message holds every rank's own account."""


class RankPool:
    """A template process, to be used as a context manager.

    Leaving it ends the template and whatever still runs.

    ``resident``: ranks stay between runs of one world size, for devices whose start is slow.
    """

    def __init__(self, *, resident: bool = False) -> None:
        self._resident = resident
        self._process = self._start()

    def run(
        self,
        program: str,
        world_size: int,
        folder: Path,
        limit_s: float = STANDSTILL_S,
        **arguments: Any,
    ) -> list[Any]:
        """Call ``module:function`` in ``world_size`` processes and return what each returns.

        The call is ``function(rank, world_size, folder, **arguments)``.

        Arguments and results travel as JSON. ``folder`` must be fresh: rendezvous files and results
        go there. Ranks that use no CPU time for ``limit_s`` stand still and are killed.

        Raises:
            RankFailed: a rank did not return.
        """
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "program": program,
            "world_size": world_size,
            "folder": str(folder),
            "limit_s": limit_s,
            "arguments": arguments,
            "resident": self._resident,
        }
        try:
            failed = self._ask(request)
        except (
            BaseException
        ):  # dead, or interrupted by a test's own timeout: its answer must not meet the next run
            self.close()
            self._process = self._start()
            raise
        if failed:
            accounts = [
                f"rank {rank}: {_read(folder / f'{rank}.error') or how}"
                for rank, how in failed.items()
            ]
            raise RankFailed("\n".join(accounts))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]

    def _start(self) -> subprocess.Popen[str]:
        # A resident pool is started once, and forks a process that knows the devices' torch alone.
        starts = subprocess.Popen if self._resident else program_start.start
        return starts(
            [sys.executable, "-m", "tests.harness.ranks"],
            cwd=REPOSITORY,
            env=child_environment(
                {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RankFailed("the template process died")
        failed: dict[str, str] = json.loads(answer)["failed"]
        return failed

    def close(self) -> None:
        """End the template; its children die with it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def rank_pool(*, resident: bool = False) -> Iterator[RankPool]:
    """A pool for the body of a ``with`` statement."""
    pool = RankPool(resident=resident)
    try:
        yield pool
    finally:
        pool.close()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class World:
    """The processes of one run's ranks, or of all runs of one world size."""

    def __init__(self, size: int) -> None:
        self._requests: list[int] = []
        self._ranks: dict[int, int] = {}  # by process
        self._answers, answers = os.pipe()
        template = os.getpid()
        for rank in range(size):
            requests, ours = os.pipe()
            child = os.fork()
            if child == 0:
                _live(rank, template, requests, answers)
            os.close(requests)
            self._requests.append(ours)
            self._ranks[child] = rank
        os.close(answers)

    def run(self, request: dict[str, Any]) -> dict[str, str]:
        """Have all ranks carry out ``request``; returns those that failed and how.

        After a failure the world must be ended.
        """
        line = (json.dumps(request) + "\n").encode()
        for pipe in self._requests:
            with contextlib.suppress(BrokenPipeError):  # it died since: seen below
                os.write(pipe, line)
        waiting, failed = set(self._ranks.values()), {}
        watch = ProgressWatch("the ranks", lambda: cpu_ticks(self._ranks), request["limit_s"])
        deadline = math.inf
        while waiting:
            if select.select([self._answers], [], [], 0.005)[0]:
                for answer in os.read(
                    self._answers, 4096
                ).split():  # a rank writes its answer at once
                    rank, good = int(answer[1:]), answer[:1] == b"+"
                    waiting.discard(rank)
                    if not good:
                        failed[str(rank)] = "raised"
            for rank, how in self._dead().items():
                if rank in waiting:
                    waiting.discard(rank)
                    failed[str(rank)] = how
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            try:
                watch.check()
            except Standstill:
                deadline = 0.0
            if time.monotonic() > deadline:
                failed |= {str(rank): "killed: it stood still" for rank in waiting}
                break
        return failed

    def end(self) -> None:
        """Kill the ranks and wait for them."""
        for child in self._ranks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for pipe in (*self._requests, self._answers):
            os.close(pipe)

    def _dead(self) -> dict[int, str]:
        found = {}
        for child in list(self._ranks):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                found[self._ranks.pop(child)] = f"exit status {os.waitstatus_to_exitcode(status)}"
        return found


def _live(rank: int, template: int, requests: int, answers: int) -> None:
    """The life of a rank; never returns.

    ``os._exit`` avoids the interpreter's teardown: seconds after torch.
    """
    arm_parent_death(expected_parent_pid=template)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the template answers on its own
    renew_thread_pool()
    with os.fdopen(requests) as lines:
        for line in lines:
            good = _do(json.loads(line), rank)
            os.write(answers, f"{'+' if good else '-'}{rank} ".encode())
    os._exit(0)


def _do(request: dict[str, Any], rank: int) -> bool:
    """Call the program; whether it returned. Its result, or its traceback, is in the folder."""
    folder = Path(request["folder"])
    try:
        module, function = request["program"].split(":")
        result = getattr(importlib.import_module(module), function)(
            rank, request["world_size"], folder, **request["arguments"]
        )
        if request["resident"]:
            _leave_groups()
        (folder / f"{rank}.json").write_text(json.dumps(result))
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        return False
    finally:
        sys.stderr.flush()
    return True


def _leave_groups() -> None:
    """Leave nothing of a run to the next but the device's context and the allocator's cache."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(request: dict[str, Any], worlds: dict[int, World]) -> dict[str, str]:
    """Carry out ``request`` with existing or new ranks; returns those that failed and how."""
    importlib.import_module(request["program"].split(":")[0])
    size = request["world_size"]
    world = worlds.pop(size, None) or World(size)
    failed = world.run(request)
    if request["resident"] and not failed:
        worlds[size] = world
    else:
        world.end()
    return failed


def _template() -> None:
    arm_parent_death()
    import torch

    # torch.utils.checkpoint imports it when it first computes a layer again: 0.9 s of each rank.
    import torch._dynamo

    torch.set_num_threads(1)
    # A collection in a fork would walk through all of torch, and copy its pages.
    gc.collect()
    gc.freeze()
    worlds: dict[int, World] = {}
    for line in sys.stdin:
        print(json.dumps({"failed": _serve(json.loads(line), worlds)}), flush=True)


if __name__ == "__main__":
    _template()
