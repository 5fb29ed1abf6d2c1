"""A row's bar and the trainer on the same devices in turn (A B A B), and the ratio of their speeds.

    python benchmarks/peers/pair.py --rows benchmarks/peers/rows-8.json --packages .peers \\
        --budget-s 540
    python benchmarks/peers/pair.py --rows benchmarks/peers/rows-8.json --only "7b DP8" \\
        --rounds 3 --results pairs.jsonl
    python benchmarks/peers/pair.py --rows benchmarks/peers/rows-4.json --dry-run

A row is a JSON object: its name, ``bar`` (a script here), ``shape`` (options of all sides),
``bar_options``, and ``ours``: the options of each of our configurations by its name. A round is a
start of the bar and one of ours, which measures its configurations one after the other. The ratio
is that of tokens per second, ours over the bar's of the same round: median and range.

Lines go to stderr as turns end, a failure with its cause; the last line of stdout is one JSON
object with all lines and the ratios. Exit status: 0, 1 if a turn failed, 2 without readable rows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.options import to_arguments

from megascale_common.node.process import armed_command, child_environment

REPOSITORY = Path(__file__).resolve().parents[2]
BAR, OURS = "bar", "ours"
_POLL_S = 0.1
_ACCOUNT_LINES = 15  # of a failed turn's output

Row = Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measure the rows; returns the exit status: 1 if a turn failed, 2 without readable rows."""
    words = parser(__doc__, steps=10, limit_s=240.0)
    words.add_argument("--rounds", type=int, default=2, help="of a row")
    options = words.parse_args(arguments)
    try:
        rows = [row for row in json.loads(options.rows.read_text()) if options.only in row["name"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        print(f"pair.py: {options.rows}: {problem}", file=sys.stderr)
        return 2
    if options.dry_run:
        for row in rows:
            for side in (BAR, OURS):
                print(" ".join(command(row, side, options.steps, Path("RESULTS"))))
            print("  with RESULTS.sweep:", json.dumps(sweep(row, options.steps)))
        return 0
    end = time.monotonic() + options.budget_s if options.budget_s else float("inf")
    found = [line for row in rows for line in _measure(row, options, end)]
    print(json.dumps({"turns": found, "ratios": ratios(found)}), flush=True)
    return int(any("failed" in line for line in found))


def command(row: Row, side: str, steps: int, results: Path) -> list[str]:
    """The command of a rank of the bar, or of the script that starts our ranks.

    The latter reads :func:`sweep` from a file in the folder of its results.
    """
    if side == BAR:
        options = [
            *to_arguments({**row["shape"], "steps": steps}),
            *to_arguments(row["bar_options"]),
        ]
        return [
            sys.executable,
            f"benchmarks/peers/{row['bar']}.py",
            *options,
            "--results",
            str(results),
        ]
    ours = ["--sweep", str(results.with_suffix(".sweep")), "--results", str(results), "--json"]
    return [sys.executable, "benchmarks/throughput.py", "--ranks", str(row["devices"]), *ours]


def sweep(row: Row, steps: int) -> list[dict[str, Any]]:
    """Our configurations of a row, as a sweep whose entries have their names."""
    return [
        {"name": name, **row["shape"], "steps": steps, **options}
        for name, options in row["ours"].items()
    ]


def ratios(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The speed of each of our configurations over that of the bar in the same round."""
    speeds = {
        (line["row"], line["side"], line["round"]): line["tokens_per_s_per_device"]
        for line in lines
        if "tokens_per_s_per_device" in line
    }
    found: dict[tuple[str, str], list[float]] = {}
    for (row, side, number), speed in speeds.items():
        bar = speeds.get((row, BAR, number))
        if side != BAR and bar:
            found.setdefault((row, side), []).append(speed / bar)
    return [
        {
            "row": row,
            "ours": side,
            "median": statistics.median(each),
            "range": [min(each), max(each)],
        }
        for (row, side), each in found.items()
    ]


def _measure(row: Row, options: argparse.Namespace, end: float) -> list[dict[str, Any]]:
    """All turns of a row; a round starts only if it ends in time, by the longest one so far."""
    lines: list[dict[str, Any]] = []
    longest_s = 0.0
    for number in range(options.rounds):
        begin = time.monotonic()
        if begin + longest_s > end:
            break
        for side in (BAR, OURS):
            found = turn(row, side, options, min(time.monotonic() + options.limit_s, end))
            for name, figures in found.items():
                line = {
                    "row": row["name"],
                    "side": name,
                    "round": number,
                    "devices": row["devices"],
                    **figures,
                }
                print(json.dumps(line), file=sys.stderr, flush=True)
                if options.results:
                    with options.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                lines.append(line)
        if any("failed" in line for line in lines):
            break
        longest_s = max(longest_s, time.monotonic() - begin)
    return lines


def turn(
    row: Row, side: str, options: argparse.Namespace, deadline: float
) -> dict[str, dict[str, Any]]:
    """The figures of one start, or why there are none, by side or by our configurations' names.

    Args:
        options: ``steps`` of the start, and ``packages``, where the peers are installed.
        deadline: of ``time.monotonic``, by which the start has to have ended.
    """
    names = [BAR] if side == BAR else list(row["ours"])
    with tempfile.TemporaryDirectory(prefix="megascale-pair-") as folder:
        results, log = Path(folder) / "results.jsonl", Path(folder) / "log"
        results.with_suffix(".sweep").write_text(json.dumps(sweep(row, options.steps)))
        problem = _wait(
            _start(row, side, command(row, side, options.steps, results), options.packages, log),
            deadline,
        )
        lines = (
            [json.loads(line) for line in results.read_text().splitlines()]
            if results.exists()
            else []
        )
        found = {BAR if side == BAR else line["name"]: line for line in lines}
        account = "\n".join(
            [
                problem or "no figure",
                *log.read_text(errors="replace").splitlines()[-_ACCOUNT_LINES:],
            ]
        )
    for name in names:
        line = found.setdefault(name, {"failed": account})
        if "tokens_per_s_per_device" not in line:
            line["failed"] = line.get("failed") or line.get("skipped") or account
    return found


def _start(
    row: Row, side: str, words: list[str], packages: Path, log: Path
) -> list[subprocess.Popen[bytes]]:
    """One process per rank of the bar, or the one that starts our ranks; output goes to ``log``."""
    count = row["devices"] if side == BAR else 1
    environment: dict[str, str] = {}
    if side == BAR:
        path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            "PYTHONPATH": path,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        environment["WORLD_SIZE"] = str(count)
    with log.open("w") as out:
        return [
            subprocess.Popen(
                armed_command(words),
                cwd=REPOSITORY,
                env=child_environment({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                if side == BAR
                else child_environment(environment),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(count)
        ]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until all have ended, one has failed or the time is up; returns what went wrong, or "".

    No process is left then.
    """
    problem = ""
    try:
        while not problem and any(process.poll() is None for process in processes):
            failed = [process.returncode for process in processes if process.poll()]
            if failed:
                problem = f"a process ended with status {failed[0]}"
            elif time.monotonic() > deadline:
                problem = "the time is up"
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return problem


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def parser(description: str | None, *, steps: int, limit_s: float) -> argparse.ArgumentParser:
    """The options of all that starts the sides of rows; ``steps`` and ``limit_s`` are defaults."""
    found = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--rows", type=Path, required=True)
    found.add_argument("--only", default="", help="the rows whose names contain this")
    found.add_argument(
        "--packages", type=Path, default=REPOSITORY / ".peers", help="where the peers are installed"
    )
    found.add_argument("--steps", type=int, default=steps, help="of a start; the first 3 warm up")
    found.add_argument("--results", type=Path, help="add the lines to this file")
    found.add_argument(
        "--budget-s", type=float, default=0.0, help="end after this time, whatever is left"
    )
    found.add_argument(
        "--limit-s", type=float, default=limit_s, help="end a start that takes longer"
    )
    found.add_argument("--dry-run", action="store_true", help="print the commands")
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
