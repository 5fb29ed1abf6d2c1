"""Where the seconds of a start go on one host, with our groups and with torch's plain ones.

    python benchmarks/start_timeline.py                              # four GPUs
    python benchmarks/start_timeline.py --device cpu --preset tiny

Each start is new processes: imports, the device, the store, communicators, the trainer, the first
two steps. *ours* creates groups as the trainer does: members alone, connected at once, all ranks
meet once (:mod:`megascale_trainer.process.bootstrap`). *plain* is what torch does by default, and
what a start was before: every rank calls ``new_group`` for every group of the job, a barrier
follows each, and a group connects in its first operation. The very first start is cold: it builds
what caches on disk then have. Times are those of the slowest rank.
The last line of stdout is one JSON object; exit status 0, or 1 if a start failed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RANKS = 4
LAYOUTS: Mapping[str, dict[str, int]] = {
    "DP4": {"dp": 4},
    "TP2 PP2 VPP2": {"tp": 2, "pp": 2, "vpp": 2},
}
# The first one is cold.
STARTS = (
    ("DP4", "ours"), ("DP4", "plain"), ("DP4", "ours"),
    ("TP2 PP2 VPP2", "plain"), ("TP2 PP2 VPP2", "ours"),
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[1]


def start(options: argparse.Namespace, layout: str, mode: str) -> dict[str, Any]:
    """One start of all ranks: seconds of each phase on the slowest one, or why it failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order = {
        "layout": LAYOUTS[layout], "mode": mode, "port": port, "device": options.device,
        "preset": options.preset, "layers": options.layers,
    }  # fmt: skip
    began_s = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(_ROOT / "benchmarks" / "start_rank.py"), json.dumps(order)],
            stdout=subprocess.PIPE, text=True, cwd=_ROOT,
            env={**os.environ, "RANK": str(rank), "BEGAN_S": repr(began_s)},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    answers = []
    try:
        for process in ranks:
            left_s = began_s + options.limit_s - time.monotonic()
            output, _ = process.communicate(timeout=max(left_s, 1.0))
            if process.returncode == 0:
                answers.append(json.loads(output.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    found = {"layout": layout, "mode": mode, "wall_s": round(time.monotonic() - began_s, 2)}
    if len(answers) < RANKS:
        return found | {"failed": f"{RANKS - len(answers)} ranks within {options.limit_s:g} s"}
    slowest = {
        phase: round(max(answer["phases"].get(phase, 0.0) for answer in answers), 3)
        for phase in dict.fromkeys(phase for answer in answers for phase in answer["phases"])
    }
    return found | {
        "phases_s": slowest,
        "groups_s": max((answer["groups"] for answer in answers), key=len),
        "groups": max(len(answer["groups"]) for answer in answers),
        "ready_s": round(max(answer["ready_s"] for answer in answers), 3),
        "first_step_done_s": round(max(answer["first_step_done_s"] for answer in answers), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each start")
    options = parser.parse_args(arguments)
    found = []
    for index, (layout, mode) in enumerate(STARTS):
        found.append({"cold": index == 0, **start(options, layout, mode)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"device": options.device, "ranks": RANKS, "starts": found}))
    return 1 if any("failed" in each for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
