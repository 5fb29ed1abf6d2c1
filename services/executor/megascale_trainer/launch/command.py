"""The command line of a run by hand.

torch is imported only after the parent-death signal is armed and the children are started: its
import takes seconds, in which torchrun may die and the children can start.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import sys
from pathlib import Path

from megascale_common.node.output import steady, steady_streams
from megascale_common.node.process import arm_parent_death
from megascale_job.config import JobConfig
from megascale_job.job_file import load_config
from megascale_job.problems import JobError, JobProblem
from megascale_trainer.launch.display import duplicate
from megascale_trainer.launch.host_services import HostServices, new_token
from megascale_trainer.launch.place import LOOPBACK, Place, own_address

USAGE, INTERRUPTED = 2, 130
DEFAULT_RUN_FOLDER = Path("runs/by-hand")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def main(arguments: list[str] | None = None) -> int:
    """Train; 0: all steps are done, or the state is saved; 1: failed; 2: the job is refused.

    130: Ctrl-C before the first step.
    """
    try:
        return _train(arguments)
    except KeyboardInterrupt:
        print("ended by Ctrl-C before the first step", file=sys.stderr)
        return INTERRUPTED


def _train(arguments: list[str] | None) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A shell may end before a run that it started alone; torchrun may not.
        arm_parent_death(expected_parent_pid=os.getppid())
    options = parser().parse_args(arguments)
    steady_streams()
    rank = os.environ.get("RANK", "0")
    try:
        config, place = load_config(options.job), Place.of(os.environ)
        place.check(config)
        _check(config, options)
    except JobError as error:
        if rank == "0":  # every rank finds the same
            source = f"{error.source}: " if error.source else ""
            for problem in error.problems:
                print(f"refused: {source}{problem}", file=sys.stderr)
        return USAGE
    output, errors = steady(duplicate(1)), steady(duplicate(2))
    folder = options.run_folder.absolute() / "jobs" / config.name
    with contextlib.ExitStack() as stack:
        services = None
        if place.local_rank == 0:
            services = HostServices(config, folder, place.host)
            stack.callback(services.stop)
            services.start_loader()
            if config.checkpoint.uri and place.rank == 0:
                host = own_address(place) if options.insecure_network else LOOPBACK
                services.start_daemon(new_token(), host)
        # Collections find nothing while torch is imported, and are a seventh of its time.
        gc.disable()
        from megascale_trainer.launch.run import Run  # imports torch

        gc.enable()
        run = Run(config, place, options, folder, services, output, errors)
        status = run.carry_out()
    output.flush()
    errors.flush()
    # The interpreter's teardown after torch takes seconds, and can hang in a broken collective.
    os._exit(status)


def parser() -> argparse.ArgumentParser:
    """The options; tests/unit freezes their names."""
    made = argparse.ArgumentParser(
        prog="python -m megascale_trainer",
        description="Train a job by hand, without a cluster: alone, or on each of torchrun's "
        "processes. The same command continues a run that was ended or killed.",
    )
    made.add_argument("job", type=Path, metavar="JOB.YAML", help="the job; .json needs no PyYAML")
    made.add_argument(
        "--run-folder",
        type=Path,
        default=DEFAULT_RUN_FOLDER,
        help="where logs and records go, in jobs/NAME (default %(default)s)",
    )
    made.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes GPUs where there are any",
    )
    made.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="TIME",
        help="save and end after this time, such as 90m or 23.5h, counted from the start",
    )
    made.add_argument(
        "--insecure-network",
        action="store_true",
        help="several hosts: nobody else reads or writes on the network between them; rank 0's "
        "checkpoint daemon then listens on the address of MASTER_ADDR, without TLS",
    )
    made.add_argument(
        "--json", action="store_true", help="print one JSON object per step instead of text"
    )
    return made


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give 90m, 23.5h, or seconds")
    return float(found[1]) * _UNITS_S[found[2]]


def _check(config: JobConfig, options: argparse.Namespace) -> None:
    if options.time_limit is not None and not config.checkpoint.uri:
        problem = JobProblem(
            "checkpoint.uri",
            "is empty, so a run with --time-limit could not save what it has trained",
            "give a folder, or leave --time-limit out",
        )
        raise JobError([problem])
