"""NCCL's settings for the jobs of a site: rendered for each job, and checked when it is submitted.

The watchdog of a job is ``recovery.collective_timeout_s``, and the driver's limit
``--hang-floor-s``. NCCL has to give up before both, or a job is ended before the error of the card
is known; see :mod:`megascale_planner.network.profile`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megascale.v1 import link_pb2
from megascale_job.config import JobConfig
from megascale_job.problems import JobError, JobProblem
from megascale_planner.network.profile import BadProfile, Site, parse, render

MAX_FILE_BYTES = 64 << 10  # a profile has some hundred bytes


def add_network_option(parser: argparse.ArgumentParser) -> None:
    """Add the option; every driver of a cluster must be given the same file."""
    parser.add_argument(
        "--network-profile",
        type=_text,
        metavar="FILE",
        help="the site's network as JSON (docs/network.md): workers get NCCL's settings for it, "
        "and nodes report what differs; default: nodes keep their own settings",
    )


class JobNetwork:
    """The settings of a site's jobs; jobs with the same watchdog have the same."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._rendered: dict[float, link_pb2.NetworkProfile | None] = {}

    @classmethod
    def of_option(cls, text: str | None, hang_floor_s: float) -> JobNetwork | None:
        """From the option's value; None without one.

        Raises:
            BadProfile: no job could run with it.
        """
        return cls(parse(text, hang_floor_s=hang_floor_s)) if text else None

    def check(self, config: JobConfig) -> None:
        """Refuse a job whose watchdog is too short for this site.

        Raises:
            JobError: names the field and the remedy.
        """
        try:
            render(self._of(config.recovery.collective_timeout_s))
        except BadProfile as error:
            problem = JobProblem(
                "recovery.collective_timeout_s",
                f"does not fit the network of this site: {str(error).partition(': ')[2]}",
                "or have the driver's --network-profile changed",
            )
            raise JobError([problem], config) from None

    def of(self, config: JobConfig) -> link_pb2.NetworkProfile | None:
        """The settings for the nodes of a job; None if none fit a job that was accepted earlier."""
        watchdog_s = config.recovery.collective_timeout_s
        if watchdog_s not in self._rendered:
            self._rendered[watchdog_s] = _message(self._of(watchdog_s))
        return self._rendered[watchdog_s]

    def _of(self, watchdog_s: float) -> Site:
        return replace(self._site, watchdog_s=watchdog_s)


def _message(site: Site) -> link_pb2.NetworkProfile | None:
    try:
        found = render(site)
    except BadProfile:
        return None
    return link_pb2.NetworkProfile(
        nccl=".".join(map(str, site.nccl)),
        cards=site.cards,
        settings=[
            link_pb2.NetworkSetting(
                name=each.name,
                value=each.value,
                reason=each.reason,
                default_value="" if each.default == "all cards" else each.default,
            )
            for each in found
        ],
    )


def _text(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{path}: {reason}") from None
    if len(text) > MAX_FILE_BYTES:
        raise argparse.ArgumentTypeError(f"{path}: it is larger than {MAX_FILE_BYTES >> 10} KiB")
    return text
