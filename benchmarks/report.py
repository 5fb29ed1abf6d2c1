"""Results as text: a few lines for people, a table row for a dated results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Line = Mapping[str, Any]


def text(line: _Line) -> str:
    """A few lines about one result."""
    for problem in ("failed", "skipped"):
        if problem in line:
            return f"{line['name']}: {problem}: {line[problem]}"
    parts = [f"{line['name']}: {_where(line)}", f"  {_speed(line)}"]
    parts += [f"  {row['label']}: {_speed(row)}{_gains(row)}" for row in line.get("variants", ())]
    for dimension, found in line.get("exposed", {}).items():
        bubble = found.get("of_which_ideal_bubble")
        parts.append(
            f"  exposed, {dimension}: {found['share']:.1%} "
            f"({found['min']:.1%} to {found['max']:.1%} in {found['rounds']} rounds), "
            f"stand-in copies {found['stand_in_copies_share']:.1%}"
            + (f", of which ideal bubble {bubble:.1%}" if bubble is not None else "")
        )
    if "repeats" in line:
        found = line["repeats"]
        equal = "bit for bit equal" if found["losses_bitwise_equal"] else "not bitwise equal"
        parts.append(
            f"  {found['runs']} runs: losses {equal}, "
            f"at most {found['largest_loss_difference']:.3g} apart; "
            f"spread of their median step times {found['spread']:.2%}"
        )
    if "exclusive_ms" in line.get("profile", {}):
        parts += [f"  {row}" for row in _profile(line["profile"])]
    return "\n".join(parts)


def table(rows: Sequence[_Line], columns: Mapping[str, Sequence[str]]) -> str:
    """A markdown table of ``rows`` of one ladder; ``columns`` holds further cells by heading."""
    head = [
        "row",
        "tokens/s/GPU",
        "MFU causal / full",
        "gain over the row before",
        "gain over the first",
        *columns,
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for number, row in enumerate(rows):
        cells = [row["label"], f"{row['tokens_per_s_per_device']:,.0f}", _mfu(row)]
        cells += [_gain(row.get("gain_over_previous")), _gain(row.get("gain_over_first"))]
        lines.append(
            "| " + " | ".join([*cells, *(column[number] for column in columns.values())]) + " |"
        )
    return "\n".join(lines)


def _where(line: _Line) -> str:
    overlap = ",".join(line["overlap"]) or "none"
    return (
        f"{line['preset']} (L{line['layers']}) "
        f"TP{line['tp']} PP{line['pp']} VPP{line['vpp']} DP{line['dp']}, "
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
        f"MFU {_mfu(row)}, {row['memory_gib']:.2f} GiB, loss {row['loss']:.5g}"
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
