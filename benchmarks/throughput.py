"""Measures the trainer: tokens per second, step times, MFU, memory, and where a step goes.

    python benchmarks/throughput.py --preset tiny --tp 2 --pp 2 --dp 2 --device cpu
    python benchmarks/throughput.py --preset 7b --tp 2 --pp 2 --vpp 2 --overlap tp,pp,dp \\
        --profile step.json.gz
    python benchmarks/throughput.py --preset 7b --tp 8 --overlap tp --against overlap=none
    python benchmarks/throughput.py --sweep benchmarks/sweeps/table-8.json \\
        --results table.jsonl --budget-s 540
    python benchmarks/throughput.py --sweep benchmarks/sweeps/ablation-4.json --budget-s 540

It starts its own ranks. benchmarks/README.md explains the figures. The last line of stdout is one
JSON object; exit status: 0, 1 if a measurement failed, 2 for a command line that cannot run here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import launch, options
from benchmarks.options import ConfigurationRefused, Entry


def main(arguments: Sequence[str]) -> int:
    """Measure what the command line describes; returns the exit status.

    Each result goes to stderr as it comes; the last line of stdout is one JSON object with all of
    them.
    """
    devices = torch.cuda.device_count()  # by NVML: a CUDA context would not survive the fork
    machine, rest = _split(arguments, devices)
    try:
        entries = _entries(machine, rest)
        plan = launch.LaunchPlan(
            entries=entries,
            cuda=machine.device == "cuda",
            ranks=ranks(machine, entries),
            folder=machine.folder,
            report=lambda line: print(
                json.dumps(line) if machine.json else text(line), file=sys.stderr, flush=True
            ),
            turns=machine.turns,
            budget_s=machine.budget_s,
            limit_s=machine.limit_s,
        )
        results = machine.folder / machine.results if machine.results else None
        status, lines = launch.run(plan, results)
    except (ConfigurationRefused, OSError) as problem:
        print(f"throughput.py: {problem}", file=sys.stderr)
        return 2
    print(json.dumps({"results": lines}), flush=True)
    return status


def _split(arguments: Sequence[str], devices: int) -> tuple[argparse.Namespace, Sequence[str]]:
    """The options of the machine, and the rest, which describes measurements."""
    whole = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_configuration(whole)
    options.add_measurement(whole)
    machine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for parser in (whole, machine):
        options.add_machine(parser, devices)
        parser.add_argument(
            "--sweep", type=Path, help="a JSON file of measurements; other options apply to all"
        )
        parser.add_argument(
            "--only", default="", help="run the measurements of a sweep whose names contain this"
        )
    whole.parse_args(arguments)  # one help and one usage for everything
    return machine.parse_known_args(arguments)


def _entries(machine: argparse.Namespace, rest: Sequence[str]) -> list[Entry]:
    if machine.sweep is None:
        return [options.entry_of(rest)]
    entries = [
        entry for entry in options.read_sweep(machine.sweep, rest) if machine.only in entry.name
    ]
    if not entries:
        raise ConfigurationRefused(
            f"--only {machine.only!r}: no measurement of {machine.sweep} has that in its name"
        )
    return entries


def ranks(machine: argparse.Namespace, entries: Sequence[Entry]) -> int:
    """The number of ranks: as given, or what the layouts need.

    All devices if a layout leaves dp open.
    """
    if machine.ranks:
        return int(machine.ranks)
    runs = [variant.run for entry in entries for variant in entry.variants]
    if machine.device == "cuda" and any(not run.dp for run in runs):
        return torch.cuda.device_count()
    return max(max(run.tp * max(run.dp, 1), run.ep) * run.pp for run in runs)


_Line = Mapping[str, Any]


def text(line: _Line) -> str:
    """A few lines about one result."""
    for problem in ("failed", "skipped"):
        if problem in line:
            return f"{line['name']}: {problem}: {line[problem]}"
    parts = [f"{line['name']}: {_where(line)}", f"  {_speed(line)}"]
    parts += [f"  {row['label']}: {_speed(row)}{_gains(row)}" for row in line.get("variants", ())]
    if "exclusive_ms" in line.get("profile", {}):
        parts += [f"  {row}" for row in _profile(line["profile"])]
    return "\n".join(parts)


def _where(line: _Line) -> str:
    overlap = ",".join(line["overlap"]) or "none"
    return (
        f"{line['preset']} (L{line['layers']}) "
        f"TP{line['tp']} PP{line['pp']} VPP{line['vpp']} DP{line['dp']} EP{line['ep']}, "
        f"s {line['sequence_length']}, micro-batch {line['micro_batch_size']}, "
        f"batch {line['global_batch_size']}, {line['precision']}, {line['block']} block, "
        f"kernels {line['kernels']}, overlap {overlap}, {line['device']}"
    )


def _speed(row: _Line) -> str:
    times = row["step_time_s"]
    return (
        f"{row['tokens_per_s_per_device']:,.1f} tokens/s per device, step {times['p50']:.4f} s "
        f"(p90 {times['p90']:.4f}, max {times['max']:.4f}, "
        f"spread {times['spread']:.2%} of {times['steps']}), "
        f"{row['model_tflops']:.3g} model TFLOP/s, MFU {_mfu(row)}, "
        f"{row['memory_gib']:.2f} GiB (estimate {row['memory_estimate_gib']:.2f}), "
        f"loss {row['loss']:.5g}"
        f"{_sensors(row.get('sensors'))}"
    )


def _sensors(found: _Line | None) -> str:
    if found is None:
        return ""
    reasons = "+".join(found["throttled_by"]) or "nothing"
    return (
        f", {found['clock_mhz']} MHz, {found['power_w']} W, {found['temperature_c']} degrees C, "
        f"{found['joules_per_token']:.4f} J a token, throttled by {reasons}"
    )


def _mfu(row: _Line) -> str:
    if row["mfu_causal"] is None:
        return "-"
    return f"{row['mfu_causal']:.1%} / {row['mfu_full']:.1%}"


def _gains(row: _Line) -> str:
    return f"; gain {_gain(row['gain_over_previous'])}" if "gain_over_previous" in row else ""


def _gain(found: _Line | None) -> str:
    if found is None:
        return "-"
    spread = f"{found['min']:+.1%} to {found['max']:+.1%}"
    return f"{found['median']:+.1%} ({spread}, {found['pairs']} pairs)"


def _profile(found: _Line) -> list[str]:
    rows = [f"a step of {found['step_ms']:.1f} ms, as one kind at a time / as busy time:"]
    for kind, time_ms in found["exclusive_ms"].items():
        busy = found["busy_ms"].get(kind)
        rows.append(
            f"  {kind:>13} {time_ms:9.2f} ms" + (f" / {busy:9.2f} ms" if busy is not None else "")
        )
    rows.append(f"  communication under computation {found['communication_hidden_ms']:.2f} ms")
    rows += [
        f"  {row['share']:7.1%} {row['ms']:9.2f} ms  {row['what']}"
        for row in found.get("waterfall", ())
    ]
    rows += [
        f"  {entry['ms']:9.2f} ms  {entry['kind']}: {entry['kernel'][:100]}"
        for entry in found["largest"]
    ]
    return rows


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
