"""Saves and restores by the checkpoint daemon beside torch.distributed.checkpoint, on a CPU.

    python benchmarks/checkpoint_dcp.py --mib 192 --saves 4 --pairs 2
    python benchmarks/checkpoint_dcp.py --legs megascale,dcp-async --folder /mnt/disk

Legs run in turn (A B C A B C ...), each in new processes: `megascale` (snapshot into the daemon's
memory, persisted and committed), `dcp-async` (async_save with its default stager), `dcp-staged`
(async_save with one DefaultStager that copies in a thread), `dcp-process` (the same into shared
memory, from which another process writes) and, where there is CUDA, `dcp-pinned` (as `dcp-staged`,
into pinned memory). Same state, same work beside the saves, same disk; caches of the files are
dropped before the restore. Every leg fsyncs what it writes. The state is in the host's memory.

stdout has a table, and as its last line one JSON object of figures. Exit status: 0, 1 if a leg
failed, which the others do not wait for, or restored other values than were saved.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.checkpoint_rank import COLUMNS, ROWS, STATES, bytes_read

LEGS = ("megascale", "dcp-async", "dcp-staged", "dcp-process")
OF_CUDA = ("dcp-pinned",)
START_S, LEG_S = 60.0, 300.0
SHOWN = {
    "stall_s": "stall (s)",
    "stall_first_s": "of the first save",
    "durable_s": "until durable (s)",
    "work_slower": "work beside it, times",
    "restore_s": "restore (s)",
    "written_per_state": "bytes written / state",
    "read_per_state": "bytes read / state",
}


class LegError(Exception):
    """A leg has failed; the daemon's log and stderr have the reason."""


class Daemon:
    """A checkpoint daemon as the agent starts it; ends with the block."""

    def __init__(self, folder: Path, node: str = "n0", token: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.socket = folder, folder / "d.sock"
        self.token = token or secrets.token_hex(8)
        self._address = folder / "address"
        self._address.unlink(missing_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix="megascale-benchmark-", dir="/dev/shm"))
        (folder / "token").write_text(self.token)
        command = [sys.executable, "-m", "megascale_checkpoint", "--cluster", "benchmark"]
        command += ["--node", node, "--incarnation", "i1", "--run-folder", str(folder)]
        command += ["--socket", str(self.socket), "--token-file", str(folder / "token")]
        command += ["--address-file", str(self._address)]
        command += ["--staging-folder", str(self._staging)]
        self._log = folder / "daemon.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Daemon:
        deadline = time.monotonic() + START_S
        while not (self._address.exists() and self._address.read_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(START_S)
        shutil.rmtree(self._staging, ignore_errors=True)

    @property
    def address(self) -> str:
        """host:port."""
        return self._address.read_text().strip()

    @property
    def replica_endpoint(self) -> str:
        """host:port at which it takes the replicas of other nodes."""
        path, deadline = self._address.with_suffix(".replicas"), time.monotonic() + START_S
        while not (path.exists() and path.read_text()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the daemon has no replica server: {self._log.read_text()}")
            time.sleep(0.05)
        return path.read_text().strip()


def run_leg(leg: str, options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """One leg: saves, then a restore by new processes and a new daemon, as on another node."""
    place.mkdir()
    saved, _ = run_phase("save", leg, options, place)
    written = sum(path.stat().st_size for path in (place / "checkpoints").rglob("*"))
    restored, by_daemon = run_phase("restore", leg, options, place)
    shutil.rmtree(place)
    found = [first | second for first, second in zip(saved, restored, strict=True)]
    return summary(found, written, by_daemon, options.saves)


def run_phase(
    phase: str, leg: str, options: argparse.Namespace, place: Path
) -> tuple[list[dict[str, Any]], int]:
    """What each rank found, and the bytes that the daemon has read."""
    with Daemon(place) as daemon:
        shared = {
            "phase": phase,
            "leg": leg,
            "ranks": options.ranks,
            "parameters": parameters(options.mib),
            "saves": options.saves,
            "work_s": options.work_s,
            "folder": str(place / "checkpoints"),
            "socket": str(daemon.socket),
            "address": daemon.address,
            "token": daemon.token,
        }
        script = str(Path(__file__).with_name("checkpoint_rank.py"))
        before = bytes_read(daemon.process.pid)
        processes = [
            subprocess.Popen(
                [sys.executable, script, json.dumps({**shared, "rank": rank})],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        try:
            outputs = [process.communicate(timeout=LEG_S)[0] for process in processes]
        except subprocess.TimeoutExpired as error:
            raise LegError(f"{leg} has not ended its {phase} in {LEG_S:.0f} s") from error
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            print((place / "daemon.log").read_text()[-4000:], file=sys.stderr)
            raise LegError(f"{leg} failed to {phase}: see stderr above")
        found = [json.loads(output.splitlines()[-1]) for output in outputs]
        return found, bytes_read(daemon.process.pid) - before


def parameters(mib: int) -> int:
    """Number of parameters of a rank for about ``mib`` MiB of state."""
    return max(1, round(mib * 2**20 / (4 * ROWS * COLUMNS * len(STATES))))


def summary(
    found: list[dict[str, Any]], written: int, by_daemon: int, saves: int
) -> dict[str, Any]:
    """The ranks' figures as one: a step waits for its slowest rank."""
    state = sum(each["state_bytes"] for each in found)
    slowest = {
        key: [max(values) for values in zip(*(each[key] for each in found), strict=True)]
        for key in ("stall_s", "durable_s", "work_saving_s")
    }
    later = slice(1, None) if saves > 1 else slice(None)
    idle = max(each["work_idle_s"] for each in found)
    return {
        "stall_first_s": slowest["stall_s"][0],
        "stall_s": median(slowest["stall_s"][later]),
        "stall_max_s": max(slowest["stall_s"][later]),
        "durable_s": median(slowest["durable_s"][later]),
        "work_slower": median(slowest["work_saving_s"][later]) / idle if idle else 0.0,
        "restore_s": max(each["restore_s"] for each in found),
        "written_per_state": written / saves / state,
        "read_per_state": (sum(each["read_bytes"] for each in found) + by_daemon) / state,
        "wrong_values": sum(each["wrong_values"] for each in found),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=192, help="state of one rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4, help="of each leg; the first stands apart")
    parser.add_argument("--pairs", type=int, default=2, help="how often the legs run in turn")
    parser.add_argument("--work-s", type=float, default=1.0, help="work beside each save")
    usual = LEGS + (OF_CUDA if torch.cuda.is_available() else ())
    parser.add_argument("--legs", default=",".join(usual))
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: $TMPDIR")
    options = parser.parse_args(arguments)
    legs = options.legs.split(",")
    if not set(legs) <= {*LEGS, *OF_CUDA}:
        parser.error(f"--legs: choose of {', '.join((*LEGS, *OF_CUDA))}")
    if not torch.cuda.is_available() and set(legs) & set(OF_CUDA):
        parser.error(f"--legs: {', '.join(OF_CUDA)} needs CUDA, which is not here")
    runs: dict[str, list[dict[str, Any]]] = {leg: [] for leg in legs}
    failed: set[str] = set()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-dcp-") as folder:
        for pair in range(options.pairs):
            for leg in legs:
                try:
                    figures = run_leg(leg, options, Path(folder) / f"{leg}-{pair}")
                except LegError as error:
                    failed.add(leg)
                    print(error, file=sys.stderr, flush=True)
                    continue
                runs[leg].append(figures)
                print(f"{leg} {pair}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    result = {
        "state_mib": parameters(options.mib) * len(STATES) * ROWS * COLUMNS * 4 / 2**20,
        "ranks": options.ranks,
        "saves": options.saves,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "failed": sorted(failed),
        "legs": {leg: spread(found) for leg, found in runs.items() if found},
    }
    print("\n".join(table(result["legs"])))
    print(json.dumps(result))
    wrong = any(each["wrong_values"] for found in runs.values() for each in found)
    return int(wrong or bool(failed))


def table(legs: dict[str, dict[str, list[float]]]) -> list[str]:
    """The figures as lines of Markdown: least / middle / largest."""
    lines = [f"| | {' | '.join(legs)} |", "|---" * (len(legs) + 1) + "|"]
    for key, name in SHOWN.items():
        cells = (" / ".join(f"{value:.3g}" for value in found[key]) for found in legs.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def spread(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Least, middle and largest of each figure over the pairs."""
    return {
        key: [round(f(each[key] for each in found), 5) for f in (min, median, max)]
        for key in found[0]
    }


if __name__ == "__main__":
    raise SystemExit(main())
