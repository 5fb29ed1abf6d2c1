"""Write the file in which Prometheus finds every service of a cluster that systemd runs.

``megascale up`` writes the same file by itself. Driver, agents and checkpoint daemons leave the
addresses of their /metrics in the run folder; this reads them all.

python deploy/prometheus/write_targets.py --cluster NAME --run-folder FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megascale_driver.platform.local.node import write_metrics_targets


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="Write RUN_FOLDER/prometheus.json.")
    made.add_argument("--cluster", required=True, help="value of the label `cluster`")
    made.add_argument("--run-folder", type=Path, required=True, help="the cluster's folder")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file if an address has changed."""
    options = parser().parse_args(arguments)
    nodes = sorted(path.name for path in (options.run_folder / "nodes").glob("*") if path.is_dir())
    write_metrics_targets(options.run_folder, options.cluster, nodes)


if __name__ == "__main__":
    main()
