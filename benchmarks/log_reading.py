"""How fast an agent reads the logs of its ranks: files in, fingerprints out, as it does it itself.

    python benchmarks/log_reading.py [--million-lines 2] [--rounds 3]

The agent's own scanner (``agent/log_scanner.py``) reads files that have grown by half a second of
10^6 lines/s between two readings. Beside ordinary lines: with troubled ones among them, one line of
50 MB, and bytes that are no UTF-8. A last part has another process write on at that rate for two
seconds while the scanner looks twice a second. The last line of stdout is JSON; exit status 1: a
rate is below 10^6 lines/s of processor time, lines were skipped, or memory grew by more than 32
MiB. Rates are of processor time, because the machine may be shared; the wall clock is printed too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.kernel_log import KernelLog
from megascale_executor.agent.reports.logs import MIN_PAUSE_S, SCAN_S, LogScanner

LINES_PER_S = 1_000_000
MIB = 1 << 20
MOST_MEMORY_MIB = 32.0
ORDINARY = (
    b"[rank%d]: 2026-11-24 07:00:00,%03d INFO step %06d loss 2.%04d grad norm 0.%03d tokens/s "
    b"123456 lr 3.0e-4\n"
)
TROUBLE = b"host:1:2 [0] NCCL WARN socketProgress: Connection closed by remote peer h2<4>\n"
_WRITER = """
import sys, time
path, piece, rate, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
data = open(piece, "rb").read()
with open(path, "ab", buffering=0) as log:
    begin = time.monotonic()
    written = 0
    while written < rate * seconds:
        log.write(data)
        written += data.count(b"\\n")
        time.sleep(max(0.0, begin + written / rate - time.monotonic()))
"""


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million-lines", type=int, default=2, choices=range(1, 11))
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 11))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            ORDINARY % (i % 8, i % 1000, i, i % 9973, i % 991) for i in range(LINES_PER_S // 2)
        ]
        half_second = b"".join(lines)
        mixed = b"".join(
            TROUBLE if number % 1000 == 0 else line for number, line in enumerate(lines)
        )
        readings = 2 * options.million_lines
        figures = {
            "ordinary": [_rate(folder, half_second, readings) for _ in range(options.rounds)],
            "one_in_1000_troubled": [_rate(folder, mixed, readings) for _ in range(options.rounds)],
        }
        memory = {
            "one_line_of_50_mb": _memory(folder, b"fatal error " * (50_000_000 // 12), b"\n"),
            "no_utf8": _memory(folder, b"\xff\xfe\x80 step \xc3(\n" * 1_000_000, b""),
        }
        behind = _while_written(folder, half_second[: len(half_second) // 10])
    found = {
        "lines_per_cpu_s": {
            name: [round(one[0]) for one in each] for name, each in figures.items()
        },
        "lines_per_s": {name: [round(one[1]) for one in each] for name, each in figures.items()},
        "memory_mib": memory,
        "written_at_10e6_lines_per_s": behind,
    }
    print(json.dumps(found))
    slow = any(one[0] < LINES_PER_S for each in figures.values() for one in each)
    large = any(each > MOST_MEMORY_MIB for each in memory.values())
    return 1 if slow or large or behind["skipped_bytes"] else 0


def _scanner(folder: Path, rank: int = 0) -> tuple[LogScanner, Path]:
    kernel, log = folder / "kmsg", folder / f"rank-{rank}.log"
    kernel.write_bytes(b"")
    log.write_bytes(b"")
    scanner = LogScanner(KernelLog(kernel), lambda: None)
    scanner.watch(AttemptKey("demo", 1), {rank: log})
    return scanner, log


def _rate(folder: Path, piece: bytes, readings: int) -> tuple[float, float]:
    """Lines per second of processor time, and of the clock; only the reading is timed."""
    scanner, log = _scanner(folder)
    cpu_s = wall_s = 0.0
    for _ in range(readings):
        with log.open("ab") as file:
            file.write(piece)
        before_s, began_s = time.process_time(), time.perf_counter()
        scanner.scan_now()
        cpu_s += time.process_time() - before_s
        wall_s += time.perf_counter() - began_s
    if scanner.skipped_bytes:
        raise RuntimeError(f"{scanner.skipped_bytes} bytes were skipped")
    count = readings * piece.count(b"\n")
    return count / cpu_s, count / wall_s


def _memory(folder: Path, head: bytes, end: bytes) -> float:
    """By how many MiB the peak of this process grows while the scanner reads ``head + end``."""
    scanner, log = _scanner(folder)
    log.write_bytes(head + end)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scanner.scan_now(last=True)
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 2)


def _while_written(folder: Path, piece: bytes) -> dict[str, float]:
    """Another process writes 10^6 lines/s for 2 s; the scanner looks twice a second until then."""
    scanner, log = _scanner(folder)
    source = folder / "piece"
    source.write_bytes(piece)
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(log), str(source), str(LINES_PER_S), "2"]
    )
    longest_s, took_s, began_s = 0.0, 0.0, time.perf_counter()
    while writer.poll() is None:
        time.sleep(max(MIN_PAUSE_S, SCAN_S - took_s))  # as LogScanner.run
        before_s = time.perf_counter()
        scanner.scan_now()
        took_s = time.perf_counter() - before_s
        longest_s = max(longest_s, took_s)
    wrote_s = time.perf_counter() - began_s
    scanner.scan_now()
    return {
        "lines": 2 * LINES_PER_S, "seconds": round(wrote_s, 2),
        "longest_reading_s": round(longest_s, 3), "skipped_bytes": scanner.skipped_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
