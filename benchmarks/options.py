"""The options of the benchmarks' command lines, and sweeps: JSON files of such command lines.

A sweep is a list of objects whose keys are the options of one measurement (``"micro_batch": 4``).
Only ``rows`` are not an option: changes that are added one after the other, each compared with the
one before and with the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from benchmarks.presets import OVERLAPS, PRESETS, ConfigurationRefused, Run

from megascale_job.config import (
    Block,
    FastAccumulation,
    Fp8Config,
    Fp8Format,
    Kernels,
    Mlp,
    Norm,
    ParameterGather,
    PipelineSchedule,
    Precision,
    Recompute,
)

SILENCED = ("all", "tp", "pp", "dp")
COMPARED_ROUNDS = 5
LEAST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """One of several configurations that are measured in turn."""

    label: str
    run: Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One measurement.

    Args:
        variants: configurations, measured in turn ``rounds`` times; the last one is the subject.
        exposed: dimensions whose communication is left out for comparison.
        repeats: how many runs from the same initial values have their losses compared.
        losses, profile: files, relative to the folder of results.
        environment: variables of the ranks.
    """

    name: str
    variants: tuple[Variant, ...]
    rounds: int
    exposed: tuple[str, ...]
    repeats: int
    losses: str
    profile: str
    environment: tuple[tuple[str, str], ...]

    @property
    def run(self) -> Run:
        """The configuration that the measurement is about."""
        return self.variants[-1].run


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """The options of :class:`Run`."""
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="layers (default: the preset's)")
    for axis in ("tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--dp", type=int, default=0, help="default: the ranks that tp and pp leave")
    parser.add_argument(
        "--vpp", type=int, default=1, help="virtual stages per pipeline stage (interleaved 1F1B)"
    )
    parser.add_argument(
        "--stage-layers",
        type=_numbers,
        default=(),
        help="layers of each virtual stage, as 9,8,8,7 (default: even)",
    )
    parser.add_argument(
        "--seq", type=int, default=0, help="sequence length in tokens (default: the preset's)"
    )
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences in a micro-batch")
    parser.add_argument(
        "--global-batch", type=int, default=0, help="sequences in a step over all ranks"
    )
    parser.add_argument("--block", choices=get_args(Block), default="parallel")
    parser.add_argument("--mlp", choices=get_args(Mlp), default="gelu")
    parser.add_argument(
        "--ffn", type=int, default=0, help="width of the feed-forward layer (default: 4 * hidden)"
    )
    parser.add_argument("--norm", choices=get_args(Norm), default="layernorm")
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--attention", choices=["causal", "documents"], default="causal")
    parser.add_argument("--window", type=int, default=0, help="sliding window in tokens; 0: none")
    parser.add_argument(
        "--overlap",
        type=_overlap,
        default=(),
        metavar="DIMENSIONS",
        help="some of tp,pp,dp,peer_edges, or none",
    )
    parser.add_argument("--kernels", choices=get_args(Kernels), default="torch")
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none")
    parser.add_argument("--schedule", choices=get_args(PipelineSchedule), default="1f1b")
    parser.add_argument("--bucket-mib", type=int, default=64, help="bound of a gradient bucket")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="launch the kernels of a layer together",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="",
        help="default: bf16 on CUDA, fp32 on a CPU",
    )
    parser.add_argument("--fp8-format", choices=get_args(Fp8Format), default="hybrid")
    parser.add_argument(
        "--parameter-gather",
        choices=get_args(ParameterGather),
        default="bf16",
        help="how the weights of layers in FP8 travel over dp",
    )
    parser.add_argument(
        "--fast-accumulation",
        choices=get_args(FastAccumulation),
        default=Fp8Config().fast_accumulation,
        help="which FP8 products are summed with fewer bits",
    )
    parser.add_argument("--optimizer", choices=["adamw", "lamb"], default="adamw")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=10,
        help="steps of a leg; the first 3 of a new trainer warm up",
    )
    parser.add_argument(
        "--data", type=_prefix, default="", help="prefix of a corpus (default: random tokens)"
    )
    parser.add_argument(
        "--initial",
        choices=["device", "exact"],
        default="device",
        help="exact: equal in all layouts",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="of exact initial values and the order of --data"
    )
    parser.add_argument(
        "--loop",
        choices=["product", "bare"],
        default="product",
        help="a job's loop with loader, step records and status page, or the step alone",
    )
    parser.add_argument(
        "--trackers",
        choices=["none", "tensorboard"],
        default="none",
        help="what gets the product's records",
    )


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """The options of a measurement: what is measured of a configuration."""
    parser.add_argument("--name", default="", help="what the results call it")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="compare in A/B pairs",
    )
    parser.add_argument(
        "--exposed", type=_silenced, default=(), help="share of these dimensions: all,tp,pp,dp"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="turns (default: 1, or 5 where there is a comparison)"
    )
    parser.add_argument(
        "--repeats", type=int, default=0, help="runs from the same initial values, losses compared"
    )
    parser.add_argument(
        "--losses", default="", help="write every step's loss to this file (JSON lines)"
    )
    parser.add_argument(
        "--profile", default="", help="write a trace of two steps of rank 0 to this file (.json.gz)"
    )
    parser.add_argument(
        "--environment", action="append", default=[], metavar="NAME=VALUE", help="for the ranks"
    )


def add_machine(parser: argparse.ArgumentParser, device_count: int) -> None:
    """The options of the machine: where it runs, and where results go."""
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if device_count else "cpu"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="default: tp * pp * dp, else all devices"
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="where relative files go")
    parser.add_argument(
        "--results", default="", help="JSON lines, one per measurement, written as they come"
    )
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help="end after this time, whatever is left"
    )
    parser.add_argument(
        "--limit-s", type=float, default=150.0, help="kill ranks without progress for so long"
    )
    parser.add_argument(
        "--json", action="store_true", help="results on stderr as JSON lines instead of text"
    )


def entry_of(arguments: Sequence[str], rows: Sequence[Mapping[str, Any]] = ()) -> Entry:
    """The measurement of one command line.

    Raises:
        ConfigurationRefused: an unknown option, or options that contradict each other.
    """
    parser = _Parser(prog="a measurement", add_help=False, allow_abbrev=False)
    add_configuration(parser)
    add_measurement(parser)
    found = parser.parse_args(arguments)
    changes = [_split(text) for text in found.against]
    if changes and rows:
        raise ConfigurationRefused(
            "a measurement has either rows or something that it is compared against"
        )
    if changes:
        against = parser.parse_args([*arguments, *to_arguments(dict(changes))])
        variants = [
            Variant(", ".join(found.against), _run(against)),
            Variant("measured", _run(found)),
        ]
    else:
        variants = [Variant("baseline" if rows else "measured", _run(found))]
    growing = list(arguments)
    for row in rows:
        growing += to_arguments({key: value for key, value in row.items() if key != "row"})
        variants.append(Variant(row["row"], _run(parser.parse_args(growing))))
    compared = len(variants) > 1 or found.exposed
    return Entry(
        name=found.name or found.preset,
        variants=tuple(variants),
        rounds=found.rounds or (COMPARED_ROUNDS if compared else 1),
        exposed=found.exposed,
        repeats=found.repeats,
        losses=found.losses,
        profile=found.profile,
        environment=tuple(_split(text) for text in found.environment),
    )


def read_sweep(path: Path, common: Sequence[str]) -> list[Entry]:
    """The measurements of a sweep file; ``common`` options apply where an entry has none.

    Raises:
        ConfigurationRefused: the file is not a list of such objects; names the entry.
    """
    try:
        sweep = json.loads(path.read_text())
    except ValueError as problem:
        raise ConfigurationRefused(f"{path} is not JSON: {problem}") from problem
    entries = []
    for number, values in enumerate(sweep):
        rest = {key: value for key, value in values.items() if key != "rows"}
        try:
            entries.append(entry_of([*common, *to_arguments(rest)], values.get("rows", ())))
        except ConfigurationRefused as refusal:
            raise ConfigurationRefused(
                f"{path}, entry {number} ({values.get('name', 'unnamed')}): {refusal}"
            ) from refusal
    return entries


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """A JSON object as command line: true and false are flags, objects repeat their option."""
    arguments = []
    for key, value in values.items():
        option = "--" + key.replace("_", "-")
        if isinstance(value, bool) or value in ("true", "false"):
            arguments.append(
                option if value in (True, "true") else option.replace("--", "--no-", 1)
            )
        elif isinstance(value, Mapping):
            arguments += [
                text for name, found in value.items() for text in (option, f"{name}={_text(found)}")
            ]
        else:
            arguments += [option, str(value)]
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigurationRefused(message)


def _run(found: argparse.Namespace) -> Run:
    return Run(**{field.name: getattr(found, field.name) for field in fields(Run)})


def _overlap(text: str) -> tuple[str, ...]:
    return _several(text, OVERLAPS)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _silenced(text: str) -> tuple[str, ...]:
    return _several(text, SILENCED)


def _several(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = () if text in ("", "none") else tuple(text.split(","))
    if set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(known)}, or none")
    return tuple(name for name in known if name in names)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_STEPS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give at least {LEAST_STEPS}, three of which warm up"
        )
    return int(text)


def _prefix(text: str) -> str:
    return str(Path(text).absolute()) if text else ""


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationRefused(f"{text!r} is not NAME=VALUE")
    return name, value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
