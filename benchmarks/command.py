"""What the command lines of `throughput.py` and `ablation.py` share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import launch, options
from benchmarks.options import Entry
from benchmarks.presets import ConfigurationRefused

EntriesOf = Callable[[argparse.Namespace, Sequence[str]], list[Entry]]


def _all_results(lines: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    return {"results": lines}, True


def main(
    arguments: Sequence[str],
    description: str,
    own_options: Callable[[argparse.ArgumentParser], None],
    entries_of: EntriesOf,
    text: Callable[[dict[str, Any]], str],
    conclude: Callable[[list[dict[str, Any]]], tuple[dict[str, Any], bool]] = _all_results,
) -> int:
    """Measure what the command line names; returns the exit status.

    Each result goes to stderr as it comes; the last line of stdout is one JSON object with all of
    them. Exit status: 0, 1 if a measurement failed, 2 for a command line that cannot run here.

    Args:
        own_options: adds the script's own options.
        entries_of: the measurements, from the script's own and the machine's options and the rest
            of the command line.
        text: a result for people.
        conclude: the last line, and whether it is as it should be.
    """
    devices = torch.cuda.device_count()  # by NVML: a CUDA context would not survive the fork
    machine, rest = _split(arguments, description, own_options, devices)
    try:
        entries = entries_of(machine, rest)
        plan = launch.LaunchPlan(
            entries=entries,
            cuda=machine.device == "cuda",
            ranks=ranks(machine, entries),
            folder=machine.folder,
            report=lambda line: print(
                json.dumps(line) if machine.json else text(line), file=sys.stderr, flush=True
            ),
            budget_s=machine.budget_s,
            limit_s=machine.limit_s,
        )
        results = machine.folder / machine.results if machine.results else None
        status, lines = launch.run(plan, results)
    except (ConfigurationRefused, OSError) as problem:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr)
        return 2
    if lines is not None:
        found, holds = conclude(lines)
        print(json.dumps(found), flush=True)
        return status if holds else max(status, 1)
    return status


def _split(
    arguments: Sequence[str],
    description: str,
    own_options: Callable[[argparse.ArgumentParser], None],
    devices: int,
) -> tuple[argparse.Namespace, Sequence[str]]:
    """The options of the machine, and the rest, which describes measurements."""
    whole = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_configuration(whole)
    options.add_measurement(whole)
    machine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for parser in (whole, machine):
        options.add_machine(parser, devices)
        own_options(parser)
    whole.parse_args(arguments)  # one help and one usage for everything
    return machine.parse_known_args(arguments)


def ranks(machine: argparse.Namespace, entries: Sequence[Entry]) -> int:
    """How many ranks: as given, as torchrun started, all devices, or what the layouts need.

    All devices if a layout leaves dp open.
    """
    if machine.ranks or "WORLD_SIZE" in os.environ:
        return int(machine.ranks or os.environ["WORLD_SIZE"])
    runs = [variant.run for entry in entries for variant in entry.variants]
    if machine.device == "cuda" and any(not run.dp for run in runs):
        return torch.cuda.device_count()
    return max(run.tp * run.pp * max(run.dp, 1) for run in runs)
