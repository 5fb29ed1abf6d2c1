"""Formats answers: JSON lines for programs, tables and short sentences for people."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import Job, JobCondition, JobPhase, Node
from megascale_client.messages import remaining_s
from megascale_client.views import View
from megascale_job.visible import counted, visible

Item = TypeVar("Item", bound=Message | View)

MAX_MESSAGE_CHARACTERS = 160  # of an event, on a terminal


class _Console(Console):
    """The console of the commands: it shows control characters in foreign text as text.

    Lines are never wrapped, so a pipe gets them as they are.
    """

    def render_str(self, text: str, **settings: Any) -> Text:
        """Text with or without markup, before it is measured."""
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The parts of what is printed; rich's own control codes are parts of another kind."""
        # Reasons, log lines and names come from workers and job files. An escape sequence in them
        # could rewrite the screen of an operator.
        for segment in super().render(renderable, options):
            if segment.control or segment.text == (text := visible(segment.text)):
                yield segment
            else:
                yield Segment(text, segment.style)


console = _Console(highlight=False, soft_wrap=True)

_PHASE_STYLES = {
    JobPhase.RUNNING: "green",
    JobPhase.SUCCEEDED: "bold green",
    JobPhase.FAILED: "bold red",
    JobPhase.CANCELLED: "magenta",
}


def plain(message: Message) -> dict[str, Any]:
    """A message in the protobuf JSON mapping, with snake_case names and default values."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_json(value: Message | View | dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    message = value.proto if isinstance(value, View) else value
    print(json.dumps(plain(message) if isinstance(message, Message) else message), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print a table, or the sentence ``empty`` when it has no rows; cells are rich markup."""
    listed = list(rows)
    if not listed:
        console.print(empty)
    elif on_a_terminal():
        console.print(table(columns, listed), soft_wrap=False)  # the one thing that is fitted
    else:
        for line in table_lines(columns, listed):
            print(line)


def print_items(
    items: Iterable[Item],
    columns: Sequence[str],
    row: Callable[[Item], Sequence[str]],
    *,
    empty: str,
    as_json: bool,
) -> None:
    """Print what a command lists: one JSON object a line, or a table of their ``row``."""
    if as_json:
        for item in items:
            print_json(item)
    else:
        print_table(columns, map(row, items), empty=empty)


def on_a_terminal() -> bool:
    """Whether a person reads stdout; a colour forced by the environment does not make it one."""
    return console.is_terminal and console.file.isatty()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal: where that is too narrow, the first and last column are wrapped."""
    heads = [
        Column(name, no_wrap=index > 0, overflow="fold") for index, name in enumerate(columns[:-1])
    ]
    shown = Table(*heads, Column(columns[-1]), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*row)
    return shown


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table for a pipe: aligned, nothing cut, "-" in a cell that is empty."""
    plain_rows = [[visible(Text.from_markup(cell).plain) or "-" for cell in row] for row in rows]
    listed = [list(columns), *plain_rows]
    widths = [max(map(cell_len, column)) for column in zip(*listed, strict=True)]
    return [
        "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in listed
    ]


def short(member: enum.Enum) -> str:
    """Name of an enum's member in lower case."""
    return member.name.lower()


def phase_text(phase: int) -> str:
    """A job's phase in its colour, in rich markup."""
    member = JobPhase(phase)
    style = _PHASE_STYLES.get(member)
    return f"[{style}]{short(member)}[/{style}]" if style else short(member)


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
    """Time since ``stamp`` in the largest fitting unit; "-" for no time."""
    if not stamp.seconds:
        return "-"
    return duration(max(0.0, datetime.now(UTC).timestamp() - stamp.ToMicroseconds() / 1e6))


def duration(seconds: float) -> str:
    """A duration in the largest fitting unit."""
    for size_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f}{unit}"
    return f"{seconds:.0f}s"


def percent(job: Job) -> float:
    """Share of a job's steps that are completed, in percent."""
    return 100 * job.step / max(1, job.spec.trainer.training.steps)


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
        f"{experts_text(record)}norm {record.gradient_norm:.3f}  lr {record.learning_rate:.2e}  "
        f"{record.tokens_per_s:,.0f} tokens/s  MFU {mfu_text(record)}  {needs_text(record)}"
        f"attempt {record.attempt}{evaluation_text(record)}"
    )


def experts_text(record: types_pb2.StepRecord) -> str:
    """The balance loss and the largest load of an expert; "" for a dense model."""
    if not record.HasField("balance"):
        return ""
    text = f"balance {record.balance:.4f}  "
    if record.HasField("expert_load_max"):
        text += f"largest expert load {record.expert_load_max:.2f}  "
    return text


def needs_text(record: types_pb2.StepRecord) -> str:
    """Memory and the wait for data; "" where the trainer is of a build that reports neither."""
    if not record.HasField("data_wait"):
        return ""
    wait_ms = record.data_wait.ToNanoseconds() / 1e6
    return f"memory {record.memory_bytes / 2**30:.2f} GiB  data {wait_ms:.1f} ms  "


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


def explanation_lines(answer: driver_pb2.ExplainJobResponse) -> list[str]:
    """An explanation as lines of rich markup: its text, the plan, and what else was logged.

    All times are as in the driver's text, in UTC. Events that the text quotes are left out.
    """
    lines = [escape(answer.text)]
    if not answer.plan.problem and (plan := plan_lines(answer.plan)):
        lines += ["", *plan]
    rest = sorted(
        (event for event in answer.events if event.message not in answer.text),
        key=lambda event: event.seq,
    )
    if rest:
        lines += ["", "other events", *(f"  {_logged(event)}" for event in rest)]
    return lines


def _logged(event: types_pb2.Event) -> str:
    """An event as the driver's texts have one."""
    moment = datetime.fromtimestamp(event.time.ToMicroseconds() / 1e6, UTC)
    day = "" if moment.date() == datetime.now(UTC).date() else "%Y-%m-%d "
    when = moment.strftime(f"{day}%H:%M:%SZ")
    return f"{when} [bold]{event.reason}[/bold] {escape(clipped(event.message))}"


def clipped(text: str) -> str:
    """The text on one line; on a terminal of at most MAX_MESSAGE_CHARACTERS."""
    line = " ".join(text.split())
    if not on_a_terminal():
        return line
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[: MAX_MESSAGE_CHARACTERS - 1]}…"


def condition_lines(job: Job) -> list[str]:
    """The conditions of a job, which its phase does not show, as lines of rich markup."""
    return [
        f"[bold red]{_condition_name(item)}[/bold red]: {escape(item.message)}"
        for item in job.conditions
    ]


def _condition_name(condition: JobCondition) -> str:
    kind = short(condition.type)
    return kind.replace("_", " ")


def job_lines(job: Job) -> list[str]:
    """A job in full, as lines of rich markup."""
    parallelism, steps = job.spec.trainer.parallelism, job.spec.trainer.training.steps
    left_s = remaining_s(job)
    left = "" if left_s is None else f", about {duration(left_s)} left"
    lines = [
        f"[bold]{job.spec.name}[/bold]  {phase_text(job.phase)}  {escape(job.phase_reason)}",
        *condition_lines(job),
        f"step {job.step} of {steps} ({percent(job):.0f}%{left}), attempt {job.attempt}, "
        f"{counted(job.restarts, 'restart')}",
        f"layout tp {parallelism.tp or 1}, pp {parallelism.pp or 1}, dp {parallelism.dp or 1}",
        f"nodes {', '.join(job.nodes) or 'none'}; spares {', '.join(job.spare_nodes) or 'none'}; "
        f"evicted {', '.join(job.evicted_nodes) or 'none'}",
        *_placement_lines(job),
        _checkpoint_text(job),
    ]
    if job.spec.checkpoint.replicas:
        lines.append(_replica_text(job))
    if job.restored_step:
        source = short(job.restore_source)
        lines.append(f"restored from step {job.restored_step} ({source})")
    if job.HasField("last_record"):
        lines.append(step_text(job.last_record, steps))
        lines += _hot_experts(job.last_record)
    if job.HasField("last_evaluation"):
        evaluated = job.last_evaluation
        lines.append(f"held-out loss {evaluated.evaluation_loss:.4f} after step {evaluated.step}")
    lines += plan_lines(job.plan)
    if job.HasField("goodput"):
        lines.append(_goodput_text(job.goodput))
    return lines


def _hot_experts(record: types_pb2.StepRecord) -> list[str]:
    """The hottest expert of each of the layers with the hottest ones, and the range of loads."""
    if not record.HasField("hot_experts"):
        return []
    hottest = ", ".join(
        f"layer {one.layer} expert {one.expert} ({one.load:.2f})"
        for one in record.hot_experts.experts
    )
    loads = f"{record.expert_load_min:.2f} to {record.expert_load_max:.2f} times the mean"
    return [f"loads of experts: {loads}; hottest: {hottest}"]


def order_text(name: str, job: Job, consequence: str, check: bool) -> str:
    """Effect of an order on a job, or with ``check`` its expected effect; rich markup."""
    now = "would do" if check else phase_text(job.phase)
    return f"job [bold]{name}[/bold]: {now}; {escape(consequence)}"


def node_order_text(node: Node, consequence: str, wanted: str, check: bool) -> str:
    """State of a node after an order, or with ``check`` the ``wanted`` one; rich markup."""
    outcome = f"would be {wanted}" if check else f"is {short(node.disposition)}"
    return f"node [bold]{node.name}[/bold] {outcome}\n{escape(consequence)}".rstrip()


def plan_lines(plan: driver_pb2.PlanComparison) -> list[str]:
    """Measured step times of a job against the planner's prediction, by term; rich markup."""
    if plan.problem:
        return [f"plan: {escape(plan.problem)}"]
    lines = []
    if plan.sentence:
        color = "bold red" if plan.slower_by else "default"
        lines.append(f"plan: [{color}]{escape(plan.sentence)}[/{color}]")
    if plan.terms:
        parts = [
            f"{term.name.replace('_', '-')} {1000 * term.measured_s:,.4g} "
            f"({1000 * term.predicted_s:,.4g})"
            for term in plan.terms
        ]
        lines.append(f"  ms measured (planned): {', '.join(parts)}")
    return lines


def _placement_lines(job: Job) -> list[str]:
    """Why the job runs where it does, if that was more than a choice of one switch."""
    score = job.placement.score
    return [f"placement: {escape(job.placement.reason)}"] if score.cross_switch_edges else []


def _replica_text(job: Job) -> str:
    """The newest copies on other nodes, and why one is missing."""
    newest = f"step {job.replicated_step}" if job.replicated_step else "none yet"
    problem = f"; [bold red]{escape(job.replica_problem)}[/bold red]" if job.replica_problem else ""
    return f"newest replicas on other nodes: {newest}{problem}"


def _checkpoint_text(job: Job) -> str:
    if not job.committed_step:
        return f"no checkpoint yet{_interval_text(job)}"
    text = f"newest complete checkpoint: step {job.committed_step}"
    if not job.HasField("committed_at"):
        return text + _interval_text(job)
    return f"{text}, {age(job.committed_at)} ago{_interval_text(job)}"


def _interval_text(job: Job) -> str:
    """The interval that the run has chosen, with `checkpoint.interval: auto`."""
    record = job.last_record
    if not record.checkpoint_interval_steps:
        return ""
    cost = f"; one costs {record.checkpoint_cost_s:.2g} s"
    known = cost if record.HasField("checkpoint_cost_s") else ""
    return f"; auto: every {counted(record.checkpoint_interval_steps, 'step')}{known}"


def _goodput_text(goodput: driver_pb2.Goodput) -> str:
    """Goodput in one line: the share, then each part of the time that is not zero."""
    parts = {
        field.name: value.ToMicroseconds() / 1e6
        for field, value in goodput.ListFields()
        if field.message_type and field.name != "wall_time"
    }
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds)
    return (
        f"goodput {goodput.ratio:.1%} since submission, {goodput.ratio_since_start:.1%} since the "
        f"start; {counted(goodput.lost_steps, 'step')} lost; {spent}"
    )
