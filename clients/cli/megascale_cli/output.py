"""Formats answers: JSON lines for programs, tables and short sentences for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megascale.v1 import driver_pb2, types_pb2

MAX_MESSAGE_CHARACTERS = 160  # of an event
PIPE_COLUMNS = 1000

console = Console(highlight=False)

_PHASE_STYLES = {
    types_pb2.JOB_PHASE_RUNNING: "green",
    types_pb2.JOB_PHASE_SUCCEEDED: "bold green",
    types_pb2.JOB_PHASE_FAILED: "bold red",
    types_pb2.JOB_PHASE_CANCELLED: "magenta",
}


def plain(message: Message) -> dict[str, Any]:
    """A message in the protobuf JSON mapping, with snake_case names and default values."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_json(value: Message | dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    print(json.dumps(plain(value) if isinstance(value, Message) else value), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print a table, or the sentence ``empty`` when it has no rows."""
    listed = list(rows)
    if not listed:
        console.print(empty)
        return
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in listed:
        table.add_row(*row)
    # A pipe has no width, so nothing is cut for the program that reads it.
    console.print(table, width=None if console.is_terminal else max(console.width, PIPE_COLUMNS))


def short(enum: Any, number: int, prefix: str) -> str:
    """Name of an enum value without its prefix, lower case: JOB_PHASE_RUNNING is ``running``."""
    return str(enum.Name(number)).removeprefix(prefix).lower()


def phase_text(phase: types_pb2.JobPhase.ValueType) -> str:
    """A job's phase in its colour, in rich markup."""
    name = short(types_pb2.JobPhase, phase, "JOB_PHASE_")
    style = _PHASE_STYLES.get(phase)
    return f"[{style}]{name}[/{style}]" if style else name


def local_time(stamp: Timestamp) -> str:
    """HH:MM:SS.mmm in the local time zone, with the date unless it is today; "-" for no time."""
    if not stamp.seconds:
        return "-"
    moment = datetime.fromtimestamp(stamp.ToMicroseconds() / 1e6, UTC).astimezone()
    day = (
        "" if moment.date() == datetime.now().astimezone().date() else moment.strftime("%Y-%m-%d ")
    )
    return f"{day}{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"


def age(stamp: Timestamp) -> str:
    """How long ago, in the largest fitting unit; "-" for no time."""
    if not stamp.seconds:
        return "-"
    seconds = max(0.0, datetime.now(UTC).timestamp() - stamp.ToMicroseconds() / 1e6)
    for size_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f}{unit}"
    return f"{seconds:.0f}s"


def size_text(size_bytes: int) -> str:
    """A size with its unit."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def mfu_text(record: types_pb2.StepRecord) -> str:
    """Both MFUs, exact causal then full attention; n/a where the device's peak is unknown."""
    if not record.HasField("mfu_causal") or not record.HasField("mfu_full"):
        return "n/a"
    return f"{record.mfu_causal:.1%}/{record.mfu_full:.1%}"


def step_text(record: types_pb2.StepRecord, steps: int) -> str:
    """One step as one line."""
    return (
        f"step {record.step:>{len(str(steps))}}/{steps}  loss {record.loss:.4f}  "
        f"norm {record.gradient_norm:.3f}  lr {record.learning_rate:.2e}  "
        f"{record.tokens_per_s:,.0f} tokens/s  MFU {mfu_text(record)}  "
        f"attempt {record.attempt}{evaluation_text(record)}"
    )


def evaluation_text(record: types_pb2.StepRecord) -> str:
    """The loss on held-out data, where an evaluation followed the step."""
    return (
        f"  held-out loss {record.evaluation_loss:.4f}"
        if record.HasField("evaluation_loss")
        else ""
    )


def event_text(event: types_pb2.Event) -> str:
    """One event as one line of rich markup."""
    when, message = local_time(event.time), escape(clipped(event.message))
    return f"[dim]{when}[/dim] [bold]{event.reason}[/bold] [dim]{event.subject}[/dim] {message}"


def clipped(text: str) -> str:
    """The text on one line of at most MAX_MESSAGE_CHARACTERS; --json has all of it."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[: MAX_MESSAGE_CHARACTERS - 1]}…"


def job_lines(job: driver_pb2.Job) -> list[str]:
    """A job in full, as lines of rich markup."""
    parallelism, steps = job.spec.trainer.parallelism, job.spec.trainer.training.steps
    lines = [
        f"[bold]{job.spec.name}[/bold]  {phase_text(job.phase)}  {escape(job.phase_reason)}",
        f"step {job.step} of {steps}, attempt {job.attempt}, {job.restarts} restarts",
        f"layout tp {parallelism.tp or 1}, pp {parallelism.pp or 1}, dp {parallelism.dp or 1}",
        f"nodes {', '.join(job.nodes) or 'none'}; spares {', '.join(job.spare_nodes) or 'none'}; "
        f"evicted {', '.join(job.evicted_nodes) or 'none'}",
        f"newest complete checkpoint: step {job.committed_step}"
        if job.committed_step
        else "no checkpoint yet",
    ]
    if job.restored_step:
        source = short(types_pb2.RestoreSource, job.restore_source, "RESTORE_SOURCE_")
        lines.append(f"restored from step {job.restored_step} ({source})")
    if job.HasField("last_record"):
        lines.append(step_text(job.last_record, steps))
    return lines
