"""The driver's options for the queue: quotas, preemption, switches, retention of ended jobs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megascale_driver.placement.topology import BadTopology, parse
from megascale_job.names import is_dns_label

MAX_TOPOLOGY_BYTES = 32 << 20  # 100,000 nodes on three levels take some 10 MB


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; all drivers of a cluster must have the same values."""
    parser.add_argument(
        "--quota",
        type=quota,
        action="append",
        default=[],
        metavar="TENANT=DEVICES",
        help="most devices that the jobs of this tenant hold at once; may be repeated; a tenant "
        "without a quota is not limited",
    )
    parser.add_argument(
        "--topology",
        type=topology,
        default={},
        metavar="FILE",
        help="switches of the nodes: the output of `scontrol show topology`, or JSON with the "
        "labels switch, block and core of each node; overrides the labels that nodes report",
    )
    parser.add_argument(
        "--preemption",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a job of higher priority displaces running jobs of lower priority that can save "
        "their state first; default yes",
    )
    parser.add_argument(
        "--keep-ended-jobs",
        type=_count,
        default=1000,
        metavar="N",
        help="delete the oldest ended jobs beyond this number; their checkpoints stay; "
        "default 1000",
    )
    parser.add_argument(
        "--keep-ended-days",
        type=partial(_positive, "days"),
        default=30.0,
        metavar="DAYS",
        help="delete jobs that ended longer ago; their checkpoints stay; default 30",
    )
    parser.add_argument(
        "--forget-dead-hours",
        type=partial(_positive, "hours"),
        default=24.0,
        metavar="HOURS",
        help="forget nodes that have been dead for longer and that no job needs; nodes that were "
        "cordoned, drained or quarantined stay; default 24",
    )


def topology(path: str) -> Mapping[str, Mapping[str, str]]:
    """The topology labels of nodes, from a file.

    Raises:
        argparse.ArgumentTypeError: the file cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_TOPOLOGY_BYTES + 1)
        if len(text) > MAX_TOPOLOGY_BYTES:
            raise BadTopology(f"it is larger than {MAX_TOPOLOGY_BYTES >> 20} MiB")
        return parse(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{path}: {reason}") from None


def quota(text: str) -> tuple[str, int]:
    """A tenant and its devices, from TENANT=DEVICES.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    tenant, equals, devices = text.partition("=")
    if not equals or not is_dns_label(tenant):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give TENANT=DEVICES, with a tenant of a-z, 0-9 and '-'"
        )
    return tenant, _count(devices)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 0 or more")
    return int(text)


def _positive(unit: str, text: str) -> float:
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive number of {unit}")
    return count
