"""The output of a run by hand: a bar on a terminal, a line per step elsewhere, or JSON lines.

JSON lines name the values of a step as trackers and megascale.v1.StepRecord do. JSON has no NaN and
no infinity, so these are null.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, TextIO

from megascale_job.visible import visible
from megascale_trainer.process import expert_loads

BAR_CELLS = 20
_LEAST_REDRAW_S = 0.1
_SKIPPED = {
    "no_targets": "no target in its batch has a loss weight, so there is no loss",
    "not_finite": "its loss or a gradient was not finite",
    "norm": "its gradient norm was above trainer.optimizer.skip_norm",
}
_SMOOTHING = 0.1  # weight of the newest step in the step time that predicts the remaining time


class Display:
    """Writes to ``output``; without one (ranks other than 0) it shows nothing."""

    def __init__(self, output: TextIO | None, steps: int, *, as_json: bool = False) -> None:
        self._output = output
        self._steps = steps
        self._json = as_json
        self._bar = output is not None and not as_json and output.isatty()
        self._step_time_s = 0.0
        self._drawn_at_s = 0.0
        self._line = ""
        self.skipped = 0  # updates that were skipped in the steps shown so far

    def note(self, text: str) -> None:
        """Show a sentence about the run."""
        if self._json:
            self._print({"event": "note", "text": text})
        else:
            self._clear()
            self._write(f"{visible(text)}\n")

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Show an event: its values to programs, its sentence to people."""
        if self._json:
            self._print({"event": name, **values})
        elif text:
            self.note(text)

    def running(self, step: int, passed_over: str) -> None:
        """Show that the ranks have met and restored ``step``."""
        text = f"continues from step {step}" if step else "starts from step 0"
        if passed_over:
            text += f"; passed over: {passed_over}"
        self.event("running", {"step": step, "passed_over": passed_over}, text)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a completed step."""
        time_s = float(record["step_time_s"])
        self._step_time_s += (_SMOOTHING if self._step_time_s else 1.0) * (
            time_s - self._step_time_s
        )
        why = record.get("skipped_because", "")
        self.skipped += bool(why)
        if self._json:
            self._print({"event": "step", **record})
            return
        if why:
            said = _SKIPPED.get(why, why)
            self.note(f"step {record['step']} changed nothing: {said} ({self.skipped} so far)")
        if not self._bar:
            self._write(f"{step_line(record, self._steps)}\n")
        else:
            self._draw(record)

    def _draw(self, record: Mapping[str, Any]) -> None:
        now_s, last = time.monotonic(), record["step"] == self._steps
        if now_s - self._drawn_at_s < _LEAST_REDRAW_S and not last:
            return
        self._drawn_at_s = now_s
        share = record["step"] / self._steps
        bar = ("#" * round(share * BAR_CELLS)).ljust(BAR_CELLS, ".")
        left = duration((self._steps - record["step"]) * self._step_time_s)
        # The most important first: a narrow terminal cuts off the end.
        line = f"[{bar}] left {left}  {step_line(record, self._steps)}"
        width = shutil.get_terminal_size().columns - 1
        self._clear()
        self._line = line[:width]
        self._write(self._line + ("\n" if last else ""))
        if last:
            self._line = ""

    def _clear(self) -> None:
        if self._line:
            self._write("\r" + " " * len(self._line) + "\r")
            self._line = ""

    def _print(self, values: Mapping[str, Any]) -> None:
        plain = {name: _finite(value) for name, value in values.items()}
        self._write(json.dumps(plain, allow_nan=False) + "\n")

    def _write(self, text: str) -> None:
        if self._output is None:
            return
        try:
            self._output.write(text)
            self._output.flush()
        except OSError:  # the terminal or the reader of the pipe has gone; training continues
            self._output = None


def _finite(value: Any) -> Any:
    """``value``, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def step_line(record: Mapping[str, Any], steps: int) -> str:
    """One step in a line: loss, balance of experts, speed, utilisation, memory, wait for data."""
    parts = [
        f"step {record['step']}/{steps}",
        f"loss {record['loss']:.4f}" if math.isfinite(record["loss"]) else "no loss",
        *expert_loads.in_words(record),
        f"{_count(record['tokens_per_s'])} tokens/s",
    ]
    if record.get("mfu_causal") is not None:
        parts.append(f"MFU {record['mfu_causal']:.1%} ({record['mfu_full']:.1%} full)")
    parts.append(f"memory {record['memory_bytes'] / 2**30:.2f} GiB")
    parts.append(f"data {1e3 * record['data_wait_s']:.1f} ms")
    parts.append(f"step time {1e3 * record['step_time_s']:.0f} ms")
    held_out = record.get("evaluation_loss")
    if held_out is not None and math.isfinite(held_out):
        parts.append(f"held-out loss {held_out:.4f}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def duplicate(descriptor: int) -> TextIO:
    """A copy of the stream ``descriptor``, which stays when the descriptor is redirected."""
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="replace")
