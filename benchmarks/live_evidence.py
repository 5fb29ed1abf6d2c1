"""What live_faults.py reads behind a run: counters in the driver's store, NCCL's records, logs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascale_driver.analysis import flight_recorder

TAIL_LINES = 12
MAX_LOGS = 24
# Of each counter, and of throttling by its reason: what stands behind the colon of the target.
_QUERY = """
SELECT name, CASE WHEN name = 'gpu_throttled' THEN split_part(target, ':', 2) ELSE '' END AS reason,
  count(*) AS samples, count(DISTINCT node) AS nodes, count(DISTINCT target) AS targets,
  min(value) AS least, avg(value) AS mean, max(value) AS most
FROM read_parquet($files) WHERE starts_with(name, 'gpu_') GROUP BY ALL ORDER BY ALL
"""


def counters_of(telemetry: Path) -> dict[str, Any]:
    """Counters of GPUs by name, with the number of samples, nodes and targets, and their range."""
    files = [str(path) for path in sorted(telemetry.glob("*/*/counters-*.parquet"))]
    if not files:
        return {"files": 0}
    try:
        import duckdb  # the extra `observability`
    except ImportError:
        return {"files": len(files), "failed": "duckdb is not installed"}
    with duckdb.connect() as connection:
        rows = connection.execute(_QUERY, {"files": files}).fetchall()
    found: dict[str, Any] = {"files": len(files)}
    for name, reason, samples, nodes, targets, least, mean, most in rows:
        found[f"{name}:{reason}" if reason else name] = {
            "samples": samples, "nodes": nodes, "targets": targets,
            "least": least, "mean": round(mean, 4), "most": most,
        }  # fmt: skip
    return found


def flight_verdict(folder: Path, job: str, to: Path) -> dict[str, Any]:
    """Copy the records of NCCL's operations of a job's nodes to ``to``; what they say of a hang."""
    to.mkdir(exist_ok=True)
    for path in folder.glob(f"nodes/*/jobs/{job}/attempt-*/nccl_trace_rank_*.json"):
        shutil.copyfile(path, to / path.name)
    sizes = {path.name: path.stat().st_size for path in sorted(to.iterdir())}
    if not sizes:
        return {"dumps": {}}
    try:
        found = flight_recorder.verdict(flight_recorder.read_folder(to))
    except ValueError as error:
        return {"dumps": sizes, "failed": str(error)}
    values = asdict(found)
    return {"dumps": sizes, **{key: _plain(value) for key, value in values.items()}}


def log_tails(folder: Path) -> Iterator[str]:
    """The last lines of the cluster's logs, those of ranks last."""
    logs = [*sorted(folder.glob("*.log")), *sorted(folder.glob("nodes/*/*.log"))]
    logs += sorted(folder.glob("nodes/*/jobs/*/attempt-*/*.log"))
    for path in logs[-MAX_LOGS:]:
        lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        yield f"--- {path.relative_to(folder)}"
        yield from (line[:300] for line in lines)


def _plain(value: Any) -> Any:
    """Tuples as JSON has them."""
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value
