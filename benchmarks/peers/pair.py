"""A row's bar and the trainer on the same devices in turn (A B A B), and the ratio of their speeds.

    python benchmarks/peers/pair.py --rows benchmarks/peers/rows-8.json --packages .peers \\
        --budget-s 540
    python benchmarks/peers/pair.py --rows benchmarks/peers/rows-moe-1.json --only "m1,m2 bf16" \\
        --rounds 3 --results pairs.jsonl
    python benchmarks/peers/pair.py --rows benchmarks/peers/rows-4.json --dry-run

A row is a JSON object: its name, ``bar`` (a script here), ``shape`` (options of all sides),
``bar_options``, and ``ours``: the options of each of our configurations by its name; options of a
side win over those of the shape. A round is a turn of the bar and one of each of ours. Each side
starts once for all rows and rounds and waits for its turns; it frees its memory after each. All
rows take a round before any takes the next. The ratio is that of tokens per second, ours over the
bar's of the same round: median and range.

Lines go to stderr as turns end, a failure with its cause; the last line of stdout is one JSON
object with all lines and the ratios. A row with a failure takes no further round. Exit status: 0,
1 if a turn failed, 2 without readable rows.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from megascale_common.node.process import armed_command, child_environment

REPOSITORY = Path(__file__).resolve().parents[2]
BAR, OURS = "bar", "ours"
_POLL_S = 0.1
_ACCOUNT_LINES = 15  # of a failed turn's output

Row = Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measure the rows; returns the exit status: 1 if a turn failed, 2 without readable rows."""
    options = parser(__doc__).parse_args(arguments)
    wanted, ours = options.only.split(","), options.ours.split(",")
    try:
        rows = [
            {**row, "ours": {k: v for k, v in row["ours"].items() if any(o in k for o in ours)}}
            for row in json.loads(options.rows.read_text())
            if any(part in row["name"] for part in wanted)
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        print(f"pair.py: {options.rows}: {problem}", file=sys.stderr)
        return 2
    if options.dry_run:
        for row in rows:
            for side in (BAR, OURS):
                print(" ".join(command(row, side, Path("FOLDER"))))
                print("  with FOLDER/sweep.json:", json.dumps(sweep(row, side, options.steps)))
        return 0
    found = _measure(rows, options)
    print(json.dumps({"turns": found, "ratios": ratios(found)}), flush=True)
    return int(any("failed" in line for line in found))


def command(row: Row, side: str, folder: Path) -> list[str]:
    """The command of a rank of the bar, or of the script that starts our ranks.

    It reads its measurements from sweep.json in ``folder``, begins each when its file is in turns,
    and writes to results.jsonl.
    """
    options = ["--sweep", str(folder / "sweep.json"), "--turns", str(folder / "turns")]
    options += ["--results", str(folder / "results.jsonl")]
    if side == BAR:
        return [sys.executable, f"benchmarks/peers/{row['bar']}.py", *options]
    script = [sys.executable, "benchmarks/throughput.py", "--ranks", str(row["devices"]), "--json"]
    return [*script, *options]


def sweep(row: Row, side: str, steps: int) -> list[dict[str, Any]]:
    """The measurements of one round of a row: the bar's, or those of our configurations."""
    if side == BAR:
        return [{**row["shape"], "steps": steps, **row["bar_options"]}]
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


@dataclass(frozen=True)
class Turn:
    """One measurement of a row in a round: by the bar, or by a configuration of ours."""

    row: Row
    number: int
    label: str
    values: Mapping[str, Any]


class Side:
    """The processes of one side: started once, they take ``turns`` in order.

    They are ended where one fails or takes too long, and started anew for the next turn.
    """

    def __init__(self, side: str, turns: Sequence[Turn], options: argparse.Namespace) -> None:
        self._side, self._options = side, options
        self._left = list(turns)
        self._taken = self._starts = 0  # turns since the start
        self._processes: list[subprocess.Popen[bytes]] = []
        self._place = tempfile.TemporaryDirectory(prefix="megascale-pair-")

    def start(self) -> None:
        """Start the processes for the turns that are left."""
        row = self._left[0].row
        self._taken, self._starts = 0, self._starts + 1
        (self._folder / "turns").mkdir(parents=True)
        (self._folder / "sweep.json").write_text(json.dumps([turn.values for turn in self._left]))
        bar = self._side == BAR
        count = row["devices"] if bar else 1
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        paths = filter(None, [str(self._options.packages), os.environ.get("PYTHONPATH")])
        meeting |= {"PYTHONPATH": os.pathsep.join(paths), "WORLD_SIZE": str(count)}
        with self._log.open("w") as out:
            for rank in range(count):
                own = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if bar else {}
                process = subprocess.Popen(
                    armed_command(command(row, self._side, self._folder)),
                    cwd=REPOSITORY,
                    env=child_environment(own),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._processes.append(process)

    def turn(self, deadline: float) -> dict[str, Any]:
        """The line of the next turn, with the cause of a failure; ``deadline``: as monotonic()."""
        if not self._processes:
            self.start()
        turn, place = self._left.pop(0), self._taken
        self._taken += 1
        (self._folder / "turns" / str(place)).touch()
        problem = self._wait(place, deadline)
        lines = self._lines()
        line = lines[place] if len(lines) > place else {}
        if "tokens_per_s_per_device" not in line:
            log = self._log.read_text(errors="replace").splitlines()
            account = "\n".join([problem or "no figure", *log[-_ACCOUNT_LINES:]])
            line["failed"] = line.get("failed") or line.get("skipped") or account
            self.end()
        where = {"row": turn.row["name"], "side": turn.label, "round": turn.number}
        return {**where, "devices": turn.row["devices"], **line}

    def drop(self, row: Row) -> None:
        """Take no further turn of ``row``."""
        left = [turn for turn in self._left if turn.row is not row]
        if len(left) < len(self._left):
            self.end()
        self._left = left

    def end(self) -> None:
        """End all processes that still run."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    @property
    def _folder(self) -> Path:
        return Path(self._place.name) / str(self._starts)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _lines(self) -> list[dict[str, Any]]:
        path = self._folder / "results.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def _wait(self, place: int, deadline: float) -> str:
        """Wait for the line of a turn; returns what went wrong, or ""."""
        while True:
            polled = [process.poll() for process in self._processes]
            ended = [status for status in polled if status is not None]
            if len(self._lines()) > place:
                return ""
            if any(ended) or len(ended) == len(polled):
                return f"a process ended with status {max(ended, key=abs)}"
            if time.monotonic() > deadline:
                return "the time is up"
            time.sleep(_POLL_S)


def _measure(rows: Sequence[Row], options: argparse.Namespace) -> list[dict[str, Any]]:
    end = time.monotonic() + options.budget_s if options.budget_s else float("inf")
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys((row["bar"], row["devices"]) for row in rows):
        own = [row for row in rows if (row["bar"], row["devices"]) == kind]
        rounds = [(row, number) for number in range(options.rounds) for row in own]
        sides = {side: Side(side, _turns(side, rounds, options), options) for side in (BAR, OURS)}
        try:
            found += _rounds(rounds, sides, options, end)
        finally:
            for side in sides.values():
                side.end()
    return found


def _turns(side: str, rounds: Sequence[tuple[Row, int]], options: argparse.Namespace) -> list[Turn]:
    return [
        Turn(row, number, values.get("name", BAR), values)
        for row, number in rounds
        for values in sweep(row, side, options.steps)
    ]


def _rounds(
    rounds: Sequence[tuple[Row, int]],
    sides: Mapping[str, Side],
    options: argparse.Namespace,
    end: float,
) -> list[dict[str, Any]]:
    """The lines of all turns; a round starts only if it ends in time, by the longest of its row."""
    lines: list[dict[str, Any]] = []
    longest_s: dict[str, float] = {}
    failed: set[str] = set()
    for side in sides.values():
        side.start()  # together: ours loads its modules while the bar has its first turn
    for row, _ in rounds:
        begin, name = time.monotonic(), row["name"]
        if name in failed:
            continue
        if begin + longest_s.get(name, 0.0) > end:
            break
        for side in (BAR, OURS):
            for _ in sweep(row, side, options.steps):  # one turn each
                lines.append(sides[side].turn(min(time.monotonic() + options.limit_s, end)))
                _report(lines[-1], options.results)
                if "failed" in lines[-1]:
                    failed.add(name)
        if name in failed:
            for each in sides.values():
                each.drop(row)
        longest_s[name] = max(longest_s.get(name, 0.0), time.monotonic() - begin)
    return lines


def _report(line: Mapping[str, Any], results: Path | None) -> None:
    print(json.dumps(line), file=sys.stderr, flush=True)
    if results:
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of this script."""
    found = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--rows", type=Path, required=True)
    add("--only", default="", help="the rows whose names contain one of these, by commas")
    add("--ours", default="", help="our configurations whose names contain one of these")
    add(
        "--packages", type=Path, default=REPOSITORY / ".peers", help="where the peers are installed"
    )
    add("--steps", type=int, default=10, help="of a turn; the first 3 warm up")
    add("--rounds", type=int, default=2, help="of a row")
    add("--results", type=Path, help="add the lines to this file")
    add("--budget-s", type=float, default=0.0, help="end after this time, whatever is left")
    add("--limit-s", type=float, default=240.0, help="end a turn that takes longer")
    add("--dry-run", action="store_true", help="print the commands")
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
