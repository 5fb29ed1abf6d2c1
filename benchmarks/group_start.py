"""Times a rendezvous store at the start of a large job, with emulated ranks.

    python benchmarks/group_start.py --ranks 2048 12288

The store is torch's TCPStore (libuv) in a process of its own, on a socket that is bound as the
agent binds it. The ranks are connections in helper processes (`store_clients.py`), which do what
the ranks of the paper's layout (tp 8, pp 8, interleaved) do, one request at a time each and all at
once, from the connection to the barrier at the end. Store time is the processor time of the store's
process, which serves in one thread. The wall-clock time is shown as well: it has the helpers' in
it, which stand for thousands of processors, and that of whatever else runs on this machine. A
restart does the same on the store of the attempt before, under its own prefix.
The last line of stdout is one JSON object. Exit status: 0, 1 if a median is above its limit, 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale_common.node.addresses import listen
from megascale_common.node.process import child_environment, stat_fields
from megascale_job.layout import RankLayout

TP, PP = 8, 8  # the paper's, section 6
LIMITS_S = {2_048: 2.0, 12_288: 10.0}
BACKLOG = 1 << 15  # as the agent's
RUN_LIMIT_S = 120.0
OWN_DESCRIPTORS = 256
PHASES = ("connected", "world", "groups", "all ranks")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).resolve().parents[1]
_SERVER = """
import sys
from torch._C._distributed_c10d import TCPStore
fd, port, ranks = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, world_size=ranks, is_master=True, wait_for_workers=False,
                 master_listen_fd=fd)
print(store.libuvBackend, flush=True)
sys.stdin.read()
"""


class Failed(Exception):
    """A measurement that could not be made; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store that serves."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Processor time of its process so far."""
        fields = stat_fields(self.pid)
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextlib.contextmanager
def serving(ranks: int) -> Iterator[Store]:
    """torch's store, in a process of its own."""
    with listen("127.0.0.1", backlog=BACKLOG) as bound:
        port = bound.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(bound.fileno()), str(port), str(ranks)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[bound.fileno()],
            env=child_environment(), text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "True":
            raise Failed("torch's TCPStore does not use libuv here")
        yield Store(process.pid, port)
    finally:
        process.kill()
        process.wait()


def start(store: Store, layout: RankLayout, attempt: int, helpers: int) -> dict[str, Any]:
    """One start of all ranks; seconds, and processor time of the store and of the helpers."""
    processes = []
    try:
        for index in range(helpers):
            ranks = list(range(index, layout.world_size, helpers))
            order = {
                "layout": {"tp": layout.tp, "dp": layout.dp, "pp": layout.pp}, "ranks": ranks,
                "address": ["127.0.0.1", store.port], "prefix": f"bench/{attempt}", "ring": True,
                "tied": False, "limit_s": RUN_LIMIT_S,
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.store_clients"], env=child_environment(),
                cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            processes.append(process)
            _write(process, json.dumps(order))
        for process in processes:
            _answer(process)
        before_s = store.cpu_s()
        for process in processes:
            _write(process, "")
        answers = [_answer(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    began_s = min(answer["began_s"] for answer in answers)
    return {
        **{
            phase: round(max(answer["ended_s"][phase] for answer in answers) - began_s, 3)
            for phase in PHASES
            if all(phase in answer["ended_s"] for answer in answers)
        },
        "store_cpu_s": round(store.cpu_s() - before_s, 2),
        "helpers_cpu_s": round(sum(answer["cpu_s"] for answer in answers), 2),
        "requests": sum(answer["requests"] for answer in answers),
    }


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Failed("a helper process has ended")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise Failed(answer["error"])
    return answer


def measure(ranks: int, rounds: int, helpers: int) -> dict[str, Any]:
    """Rounds of a first start and a restart on the same store."""
    layout = RankLayout(tp=TP, dp=ranks // (TP * PP), pp=PP)
    firsts, restarts = [], []
    for number in range(rounds):
        began_s = time.monotonic()
        with serving(ranks) as store:
            serving_s = time.monotonic() - began_s
            for attempt, found in ((1, firsts), (2, restarts)):
                found.append(start(store, layout, attempt, helpers))
                print(f"{ranks} ranks, round {number + 1}, attempt {attempt}: {found[-1]}; "
                      f"process of the store in {serving_s:.2f} s", file=sys.stderr)  # fmt: skip
    median_s = statistics.median(each["store_cpu_s"] for each in firsts)
    limit_s = LIMITS_S.get(ranks)
    return {
        "store_s": round(median_s, 3),
        "clock_s": round(statistics.median(each["all ranks"] for each in firsts), 3),
        "limit_s": limit_s,
        "holds": limit_s is None or median_s < limit_s,
        "first": firsts,
        "restart": restarts,
    }


def make_room(ranks: int, helpers: int) -> None:
    """Let this process and what it starts have a descriptor for each rank.

    Raises:
        Failed: the hard limit is lower.
    """
    needed = max(ranks, -(-ranks // helpers)) + OWN_DESCRIPTORS
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Failed(
            f"{ranks} ranks need {needed} file descriptors, and the hard limit is {hard}: raise it "
            "(ulimit -Hn), or give fewer --ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LIMITS_S), metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--helpers", type=int, default=2, metavar="N", help="processes of clients")
    options = parser.parse_args(arguments)
    if min(*options.ranks, options.rounds, options.helpers) < 1:
        parser.error("give positive numbers")
    if any(ranks % (TP * PP) or ranks < 2 * TP * PP for ranks in options.ranks):
        parser.error(f"--ranks: give multiples of {TP * PP} from {2 * TP * PP} on")
    try:
        make_room(max(options.ranks), options.helpers)
        found = {
            str(ranks): measure(ranks, options.rounds, options.helpers) for ranks in options.ranks
        }
    except (Failed, OSError) as error:
        print(f"group_start.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"torch": torch.__version__, "ranks": found}))
    return 0 if all(each["holds"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
