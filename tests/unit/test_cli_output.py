"""The format of answers: text of users and machines is shown unchanged, whatever it contains."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_cli import output, performance, watch
from megascale_client import Job, RestoreSource
from megascale_job.visible import counted

NASTY = "RuntimeError: [/usr/pair.cc:537] read [127.0.0.1]:80 [bold]"


def shown(text: str) -> str:
    """What a terminal shows of rich markup."""
    stream = io.StringIO()
    Console(file=stream, width=400, highlight=False).print(text)
    return stream.getvalue()


def test_brackets_in_messages_are_no_markup() -> None:
    event = types_pb2.Event(reason="WORKER_EXITED", subject="nodes/n1", message=NASTY)
    job = driver_pb2.Job(
        spec=job_pb2.JobSpec(name="x"), phase=types_pb2.JOB_PHASE_FAILED, phase_reason=NASTY
    )
    assert NASTY in shown(output.event_text(event))
    assert NASTY in shown("\n".join(output.job_lines(job)))


def event(seq: int, reason: str, message: str) -> types_pb2.Event:
    return types_pb2.Event(seq=seq, reason=reason, message=message, time=Timestamp(seconds=seq))


def test_an_explanation_has_one_format_of_time_and_no_sentence_twice() -> None:
    text = "job a has failed: it broke\n\nwhat happened\n  1970-01-01 00:00:07Z X it broke"
    answer = driver_pb2.ExplainJobResponse(text=text)
    answer.events.extend(
        [event(9, "JOB_FAILED", "it broke"), event(5, "B", "second"), event(3, "A", "first")]
    )
    answer.plan.problem = "no prediction for cpu: give --calibration"
    lines = shown("\n".join(output.explanation_lines(answer))).splitlines()
    assert lines[: len(text.splitlines())] == text.splitlines()
    assert lines[-3:] == [
        "other events",
        "  1970-01-01 00:00:03Z A first",
        "  1970-01-01 00:00:05Z B second",
    ]
    assert not any("prediction" in line for line in lines)
    alone = output.explanation_lines(driver_pb2.ExplainJobResponse(text="all is well"))
    assert alone == ["all is well"]


def test_the_held_out_loss_of_a_job_is_the_newest_that_was_evaluated() -> None:
    job = driver_pb2.Job(spec=job_pb2.JobSpec(name="x"))
    job.last_record.step = 31
    job.last_evaluation.step, job.last_evaluation.evaluation_loss = 25, 4.125
    assert "held-out loss 4.1250 after step 25" in "\n".join(output.job_lines(Job(job)))


def test_an_ended_job_has_no_ranks_to_show() -> None:
    job = driver_pb2.Job(phase=types_pb2.JOB_PHASE_SUCCEEDED, phase_reason="all 6 steps are done")
    said = performance.without_ranks(Job(job))
    assert said == "it has succeeded, so none of its ranks runs: all 6 steps are done"


def test_a_terminal_gets_colours_of_ours_and_none_of_a_message() -> None:
    stream = io.StringIO()
    terminal = output._Console(file=stream, force_terminal=True, width=200, highlight=False)
    hostile = "\x1b[2J\x9b31m\u202eend"
    terminal.print(output.table(("A", "B"), [(f"[red]{hostile}[/red]", hostile)]))
    terminal.print(output.event_text(types_pb2.Event(reason="X", message=hostile)))
    text = stream.getvalue()
    assert text.count("\\x1b[2J\\x9b31m\\u202eend") == 3
    assert not [sign for sign in ("\x1b[2J", "\x9b", "\u202e") if sign in text]
    assert "\x1b[31m" in text, "the table's own red"


def test_a_long_message_is_clipped_on_a_terminal_and_whole_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = types_pb2.Event(reason="X", message="first\n" + "long " * 100)
    assert output.event_text(event).endswith("first " + ("long " * 100).strip())
    monkeypatch.setattr(output, "on_a_terminal", lambda: True)
    text = shown(output.event_text(event))
    assert len(text.splitlines()) == 1
    assert "…" in text
    output.print_json(event)
    assert json.loads(capsys.readouterr().out)["message"] == event.message


def test_json_has_proto_names_and_fields_at_their_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.print_json(driver_pb2.Job(committed_step=7))
    value = json.loads(capsys.readouterr().out)
    assert (value["committed_step"], value["restored_step"], value["phase"]) == (
        "7",
        "0",
        "JOB_PHASE_UNSPECIFIED",
    )


def test_mfu_is_shown_twice_or_not_at_all() -> None:
    assert output.mfu_text(types_pb2.StepRecord()) == "n/a"
    assert output.mfu_text(types_pb2.StepRecord(mfu_causal=0.5, mfu_full=0.55)) == "50.0%/55.0%"
    line = output.step_text(
        types_pb2.StepRecord(step=3, loss=2.5, tokens_per_s=12_345.6, attempt=2), 100
    )
    assert "step   3/100" in line
    assert "loss 2.5000" in line
    assert "12,346 tokens/s" in line
    assert "attempt 2" in line
    assert "memory" not in line, "a build before this one reports none"
    record = types_pb2.StepRecord(step=3, memory_bytes=3 << 29)
    record.data_wait.FromMicroseconds(1_250)
    assert "memory 1.50 GiB  data 1.2 ms" in output.step_text(record, 100)


def test_a_watch_that_replays_shows_the_time_that_the_job_takes() -> None:
    bar, steps = watch._Bar(), 300
    spec = job_pb2.JobSpec(name="x")
    spec.trainer.training.steps = steps
    bar.job(Job(driver_pb2.Job(spec=spec, phase=types_pb2.JOB_PHASE_RUNNING)))
    for step in range(1, 101):  # within milliseconds
        record = types_pb2.StepRecord(step=step, attempt=1)
        record.step_time.FromMilliseconds(60_000 if step in (50, 99) else 1_200)
        bar.step(record)
    (task,) = bar._progress.tasks
    assert (task.completed, task.fields["left"]) == (100, "4m left")
    bar.job(Job(driver_pb2.Job(spec=spec, phase=types_pb2.JOB_PHASE_STOPPING)))
    assert task.fields["left"] == ""


def test_phase_and_enum_names_are_short() -> None:
    assert shown(output.phase_text(types_pb2.JOB_PHASE_RUNNING)).strip() == "running"
    assert output.short(RestoreSource.STORAGE) == "storage"


@pytest.mark.parametrize(
    ("ago_s", "text"), [(0, "0s"), (59, "59s"), (120, "2m"), (7_200, "2h"), (3 * 86_400, "3d")]
)
def test_ages_have_the_largest_fitting_unit(ago_s: int, text: str) -> None:
    stamp = Timestamp()
    stamp.FromMicroseconds(int((time.time() - ago_s) * 1e6))
    assert output.age(stamp) == text
    assert output.age(Timestamp()) == output.local_time(Timestamp()) == "-"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_have_a_unit(size: int, text: str) -> None:
    assert output.size_text(size) == text


def test_a_job_that_did_not_save_its_last_step_shows_it() -> None:
    condition = driver_pb2.JobCondition(
        type=types_pb2.JOB_CONDITION_TYPE_NOT_SAVED, message="the disk [full] is full"
    )
    job = driver_pb2.Job(phase=types_pb2.JOB_PHASE_SUCCEEDED, conditions=[condition])
    assert "not saved: the disk [full] is full" in shown("\n".join(output.job_lines(Job(job))))


def test_a_narrow_terminal_wraps_the_name_and_the_last_column_and_cuts_none() -> None:
    stream = io.StringIO()
    row = ("a-long-name" * 5, "running", "50/200", "n1,n2", "all workers train " * 3)
    table = output.table(("NAME", "PHASE", "STEP", "NODES", "WHY"), [row])
    Console(file=stream, width=60).print(table)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 60
    assert all(cell in text for cell in ("running", "50/200", "n1,n2"))
    shown = [line.split("  ")[0].strip() for line in text.splitlines()[1:]]
    assert "".join(shown).startswith(row[0])


def test_a_job_is_shown_beside_its_plan_and_with_what_its_place_costs() -> None:
    job = driver_pb2.Job(spec=job_pb2.JobSpec(name="x"), phase=types_pb2.JOB_PHASE_RUNNING)
    assert "plan" not in shown("\n".join(output.job_lines(job))), "nothing is known yet"
    job.plan.sentence = "step 7.4 s, plan 6.5 s [bold]"
    job.plan.terms.add(name="data_parallel", measured_s=1.0, predicted_s=0.3)
    job.placement.reason = "16 nodes on 2 switches"
    job.placement.score.cost_byte_tiers = 1e9
    text = shown("\n".join(output.job_lines(job)))
    assert "plan: step 7.4 s, plan 6.5 s [bold]" in text
    assert "ms measured (planned): data-parallel 1,000 (300)" in text
    assert "16 nodes" not in text, "all of it lies below one switch"
    job.placement.score.cross_switch_edges = 8
    job.plan.problem = "no prediction for cpu"
    text = shown("\n".join(output.job_lines(job)))
    assert "placement: 16 nodes on 2 switches" in text and "plan: no prediction for cpu" in text
    assert "step 7.4 s" not in text


COUNTED = (
    "nodes|jobs|ranks|steps|restarts|attempts|records|checkpoints|files|devices|lines|events|"
    "stages|micro-batches|faults|replicas|products|documents"
)
# Of these the number is never one, or the word stands behind a name.
NEVER_ONE = {
    "demo/claims.py",
    "demo/fault.py",
    "demo/plan.py",
    "performance.py",  # counts ranks where they are too many for a table
}


def test_numbers_agree_with_what_they_count() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1234)] == [
        *("0 steps", "1 step", "2 steps", "1,234 steps")
    ]
    assert counted(2, "micro-batch") == "2 micro-batches"
    folder = Path(output.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in folder.rglob("*.py")
        if str(path.relative_to(folder)) not in NEVER_ONE
        for line in path.read_text().splitlines()
        if re.search(rf"\}} ({COUNTED})\b", line)
    ]
    assert found == []


def test_a_step_and_a_job_with_experts_show_how_even_their_loads_are() -> None:
    record = types_pb2.StepRecord(step=3, loss=2.5, balance=1.25, router_z=0.5)
    assert "loss 2.5000  balance 1.2500  norm" in output.step_text(record, 100)
    record.expert_load_max, record.expert_load_min = 4.2, 0.25
    record.hot_experts.experts.add(layer=5, expert=17, load=4.2)
    record.hot_experts.experts.add(layer=3, expert=0, load=1.5)
    assert "balance 1.2500  largest expert load 4.20  norm" in output.step_text(record, 100)
    message = driver_pb2.Job(last_record=record)
    (line,) = [
        each for each in output.job_lines(Job(message)) if "expert" in each and "step" not in each
    ]
    assert line == (
        "loads of experts: 0.25 to 4.20 times the mean; hottest: layer 5 expert 17 (4.20), layer 3 "
        "expert 0 (1.50)"
    )
    dense = types_pb2.StepRecord(step=3, loss=2.5)
    assert "expert" not in output.step_text(dense, 100)


def heat_answer(ranks: int, hot: int) -> driver_pb2.GetHeatMapResponse:
    answer = driver_pb2.GetHeatMapResponse(rank_nodes=[f"n{rank}" for rank in range(ranks)])
    ratio = [1.3 if rank == hot else 1.0 for rank in range(ranks)]
    answer.rows.add(operation="forward", kind="compute", ratio=ratio, median_ms=ratio)
    return answer


def with_hot_rank(answer: driver_pb2.GetHeatMapResponse, hot: int) -> None:
    shares = [1.8 if rank == hot else 0.95 for rank in range(len(answer.rank_nodes))]
    shares[0] = float("nan")
    answer.routing.expert_share.extend(shares)
    answer.routing.hot_ranks.add(rank=hot, node=f"n{hot}", expert_share=1.8, operation="forward")


def test_the_cell_of_a_hot_rank_names_its_experts_and_looks_like_no_slow_node() -> None:
    answer = heat_answer(4, 2)
    headings, rows = performance._table(answer)
    assert [row[0] for row in rows] == ["forward"] and "[red]1.30 (1.30)[/red]" in rows[0]
    with_hot_rank(answer, 2)
    assert performance._table(answer) == (
        headings,
        [
            ("forward", "1.00", "1.00", "[magenta]1.30 (1.30)[/magenta]", "1.00"),
            (
                "rows of experts",
                "-",
                "0.95",
                "[magenta]hot experts (1.8 times the mean rows)[/magenta]",
                "0.95",
            ),
        ],
    )


def test_of_many_ranks_the_rows_of_experts_have_their_extremes() -> None:
    answer = heat_answer(40, 21)
    with_hot_rank(answer, 21)
    _, rows = performance._table(answer)
    assert rows[1] == ("rows of experts", "0.95", "0.95 (rank 1, n1)", "1.80 (rank 21, n21)")
