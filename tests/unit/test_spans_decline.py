"""Why the MFU fell: each cause is named on recorded and on steady spans, and none without cause."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness import recorded_spans
from tests.harness.injected_spans import Change, injected
from tests.harness.overlapped_spans import overlapped
from tests.harness.properties import examples

from megascale_common.node.spans import ops
from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.__main__ import main
from megascale_driver.analysis.spans.decline import CounterChange, Decline, split_step, why
from megascale_driver.analysis.spans.table import COLUMNS, RECORD, SpanTable
from megascale_job.layout import GroupName, RankLayout

RECORDED = recorded_spans.read(recorded_spans.CPU_DP4)
WINDOW, PAIRS = 28, 20
MS = 1_000_000


def window(number: int) -> SpanTable:
    first = 1 + number * WINDOW
    return RECORDED.of_steps(first, first + WINDOW - 1)


def steps_of(table: SpanTable) -> list[int]:
    return [int(step) for step in np.unique(table.step)]


def change_of(cause: str, table: SpanTable) -> Change:
    """A cause of a size that the recording's noise (equal steps differ by 30 %) does not hide."""
    steps, ranks = steps_of(table), range(len(table.nodes))
    match cause:
        case "data_wait":  # the loader of one node cannot follow
            return Change(data_wait={(2, step): 70 * MS for step in steps})
        case "garbage_collection":  # in each step another rank collects
            return Change(garbage={(step * 7 % 4, step): 70 * MS for step in steps})
        case "slow_host":
            return Change(compute={1: 5.0})
        case "network_wait":
            return Change(network={"reduce_scatter": 6.0})
        case "throttle":
            return Change(compute=dict.fromkeys(ranks, 5.0))
        case "checkpoint":
            return Change(snapshot={(r, step): 350 * MS for step in steps[::5] for r in ranks})
    raise AssertionError(cause)


CAUSES = (
    *("data_wait", "garbage_collection", "slow_host", "network_wait", "throttle", "checkpoint"),
)


def steady(steps: int = 40, first: int = 1, noise: float = 0.01, pp: int = 2) -> SpanTable:
    """Spans as of devices: 8 ranks on 4 nodes, a data-parallel reduction behind the computation."""
    layout, random = RankLayout(dp=8 // pp, pp=pp), np.random.default_rng(first)
    scatter, total = (
        ops.Op("reduce_scatter", "collective", "dp"),
        ops.Op("all_reduce", "collective", "world"),
    )
    names = (ops.STEP, ops.FORWARD, ops.BACKWARD, scatter, total, ops.OPTIMIZER)
    lengths = np.array([0, 30, 60, 8, 0.5, 5]) * MS
    rows = []
    clock = np.full(8, 10**15)
    for step in range(first, first + steps):
        begin = clock.copy()
        for op in range(1, len(names)):
            took = (lengths[op] * random.normal(1, noise, 8)).astype(np.int64)
            start = clock.copy()
            if names[op].kind == "collective":
                name: GroupName = "dp" if op == 3 else "world"
                for group in {layout.members(rank, name) for rank in range(layout.world_size)}:
                    clock[list(group)] = start[list(group)].max() + took[group[0]]
            else:
                clock = start + took
            rows += [(r, step, op, 0xFFFF, 0, start[r], clock[r] - start[r], 0) for r in range(8)]
        rows += [(r, step, 0, 0xFFFF, 0, begin[r], clock[r] - begin[r], 0) for r in range(8)]
    typed = {
        name: column.astype(dtype)
        for (name, dtype), column in zip(COLUMNS.items(), np.array(rows).T, strict=True)
    }
    nodes = tuple(f"n{rank // 2 + 1}" for rank in range(8))
    return SpanTable(**typed, ops=names, layout=layout, nodes=nodes)


def test_a_wait_inside_a_forward_is_not_computation() -> None:
    """Of overlapped data parallelism: all wait for the slow rank there, and none computes more."""
    found = why(overlapped({}), overlapped({2: 2.5}, first=41))
    assert (found.cause, found.node, found.rank) == ("slow_host", "n3", 2), found.sentence
    assert found.shares["slow_host"] == pytest.approx(1.0, abs=0.1)
    assert why(overlapped({}), overlapped({}, first=41)).cause == "none"


def with_pause(table: SpanTable, change: Change) -> SpanTable:
    return injected(table, change)


def rows_of(table: SpanTable) -> list[tuple[object, ...]]:
    names = [table.ops[op].name for op in table.op]
    columns = [getattr(table, name).tolist() for name in COLUMNS if name != "op"]
    return sorted(zip(names, *columns, strict=True))


@pytest.mark.parametrize("number", [0, 17])
def test_a_replay_without_a_change_is_the_recording(number: int) -> None:
    assert rows_of(injected(window(number), Change())) == rows_of(window(number))


@pytest.mark.parametrize("number", range(PAIRS))
def test_no_cause_is_named_for_a_clean_pair(number: int) -> None:
    found = why(window(2 * number), window(2 * number + 1))
    assert found.cause == "none", found.sentence


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_in_recorded_spans_is_named(cause: str) -> None:
    for number in range(0, 2 * PAIRS, 4):
        after = window(number + 1)
        found = why(window(number), injected(after, change_of(cause, after)))
        assert found.cause == cause, f"pair {number}: {found.sentence}"
        if cause in ("data_wait", "slow_host"):
            places = {"data_wait": ("n3", 2), "slow_host": ("n2", 1)}
            assert (found.node, found.rank) == places[cause]


SMALL = {
    "data_wait": Change(data_wait={(4, step): 8 * MS for step in range(41, 81)}),
    "garbage_collection": Change(garbage={(step % 8, step): 8 * MS for step in range(41, 81)}),
    "slow_host": Change(compute={5: 1.1}),
    "network_wait": Change(network={"reduce_scatter": 2.0}),
    "throttle": Change(compute=dict.fromkeys(range(8), 1.1)),
    "checkpoint": Change(snapshot={(r, s): 80 * MS for s in range(45, 81, 10) for r in range(8)}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_tenth_of_a_steady_step_is_enough(cause: str) -> None:
    before, after = steady(), injected(steady(first=41), SMALL[cause])
    found = why(before, after)
    assert found.cause == cause, found.sentence
    assert found.sentence.startswith("the MFU fell by ")
    assert found.step_after_ms - found.step_before_ms == pytest.approx(8, abs=2)
    if cause == "slow_host":
        assert (found.node, found.rank) == ("n3", 5) and "1.10 times" in found.sentence


def test_none_is_named_on_steady_pairs() -> None:
    for number in range(20):
        before, after = steady(first=1 + 80 * number), steady(first=41 + 80 * number)
        assert why(before, after).cause == "none"


def counter(node: str, name: str, target: str, before: float, after: float) -> CounterChange:
    return CounterChange(node, name, target, before, after)


def test_counters_decide_between_a_slow_and_a_throttled_node() -> None:
    after = injected(steady(first=41), Change(compute={5: 1.1}))
    hot = counter("n3", "gpu_throttled", "GPU-5:hw_thermal", 0.0, 0.7)
    found = why(steady(), after, [hot])
    assert (found.cause, found.node) == ("throttle", "n3")
    assert "hw_thermal) 70 % of the time, before 0 %" in found.sentence
    elsewhere = replace(hot, node="n1")
    assert why(steady(), after, [elsewhere]).cause == "slow_host"


def test_computation_that_grows_everywhere_at_full_clocks_has_no_known_cause() -> None:
    after = injected(steady(first=41), SMALL["throttle"])
    clock = counter("n1", "gpu_sm_clock_hertz", "GPU-0", 1.98e9, 1.98e9)
    found = why(steady(), after, [clock])
    assert found.cause == "unknown" and "no device's clock fell" in found.sentence
    slower = replace(clock, after=1.6e9)
    assert "1600 MHz instead of 1980" in why(steady(), after, [slower]).sentence


def test_the_network_is_named_with_its_counter_and_not_for_a_late_rank() -> None:
    after = injected(steady(first=41), SMALL["network_wait"])
    trouble = counter("n2", "rdma_ack_timeouts_total", "mlx5_0", 0.0, 12.0)
    found = why(steady(), after, [trouble])
    assert "rdma_ack_timeouts_total of n2 mlx5_0 rises by 12 a second" in found.sentence
    late = why(steady(), injected(steady(first=41), SMALL["data_wait"]), [trouble])
    assert late.cause == "data_wait" and "network_wait" not in late.shares


def test_a_pause_in_no_span_has_no_known_cause() -> None:
    paused = injected(steady(first=41), SMALL["data_wait"])
    waits = paused.ops.index(ops.DATA_WAIT)
    found = why(steady(), paused.where(paused.op != waits))
    assert found.cause == "unknown"
    assert "the first rank waits" in found.sentence and "no cause explains" in found.sentence


def test_evaluations_are_no_part_of_the_steps_that_they_lie_between() -> None:
    before, after = steady(), steady(first=41)
    pauses = {(rank, step): 200_000_000 for rank in range(8) for step in range(41, 81, 5)}
    paused = with_pause(after, Change(snapshot=pauses))
    names = tuple(ops.EVALUATION if op == ops.SNAPSHOT else op for op in paused.ops)
    answer = why(before, replace(paused, ops=names))
    assert answer.cause == "none", answer.sentence
    assert answer.step_after_ms == pytest.approx(answer.step_before_ms, rel=0.03)
    assert why(before, paused).cause == "checkpoint", "what they would be taken for"


def test_a_stage_that_is_slow_on_all_its_nodes_is_no_slow_host() -> None:
    found = why(steady(), injected(steady(first=41), Change(compute=dict.fromkeys(range(4), 1.1))))
    assert found.cause != "slow_host"


def test_too_few_steps_decide_nothing() -> None:
    assert why(steady(steps=3), steady(steps=40, first=41)).cause == "unknown"
    empty = SpanTable.empty(RankLayout(), ("n1",))
    assert why(empty, empty).cause == "unknown"
    with pytest.raises(ValueError, match="too few"):
        split_step(empty)


def joined(before: SpanTable, after: SpanTable) -> SpanTable:
    """Both windows as one table; the operations of ``before`` come first in ``after`` too."""
    assert after.ops[: len(before.ops)] == before.ops
    columns = {n: np.concatenate([getattr(before, n), getattr(after, n)]) for n in COLUMNS}
    return replace(after, **columns)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_command_finds_the_step_and_names_the_cause(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = joined(steady(), injected(steady(first=41), SMALL[cause]))
    path = tmp_path / "spans.json.z"
    path.write_bytes(recorded.dump(file_of(table)))
    assert main(["why", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["cause"] == cause, answer["sentence"]
    assert 35 <= answer["split_step"] <= 46
    assert main(["why", str(path), "--split", "41"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cause"] == cause


def file_of(table: SpanTable) -> dict[str, object]:
    """The table in the recorded format, with its layout and nodes."""
    ranks = []
    for rank in range(len(table.nodes)):
        own = table.where(table.rank == rank)
        records = np.empty(len(own), RECORD)
        for name in RECORD.names or ():
            records[name] = getattr(own, name)
        ranks.append(recorded.rank_entry(table.ops, records.tobytes()))
    layout = {axis: getattr(table.layout, axis) for axis in ("tp", "dp", "pp")}
    return {"ranks": ranks, "layout": layout, "nodes": list(table.nodes)}


def test_the_recorded_format_keeps_the_spans() -> None:
    table = steady(steps=2)
    again = recorded.load(recorded.dump(file_of(table)))
    assert rows_of(again.table) == rows_of(table)
    assert (again.table.layout, again.table.nodes) == (table.layout, table.nodes)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"no zlib", "no recorded spans"),
        (recorded.dump([])[:-3], "is cut"),
        (recorded.dump({"layout": {}}), "neither a list of ranks"),
        (recorded.dump([{"ops": "[]"}]), r"ranks\[0\]: KeyError"),
        (recorded.dump({"ranks": [], "layout": {"sp": 2}}), "unknown axes"),
        (recorded.dump({"ranks": [], "heartbeats": {"n1": [[1]]}}), "heartbeats"),
        (recorded.dump({"ranks": [], "nodes": ["n1"], "counters": [{"node": "n1"}]}), "counters"),
    ],
)
def test_a_damaged_file_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        recorded.load(data)
    path = tmp_path / "spans"
    path.write_bytes(data)
    assert main(["why", str(path)]) == 2


def test_anyone_can_run_it_on_a_file() -> None:
    command = [sys.executable, "-m", "megascale_driver.analysis.spans", "why"]
    result = subprocess.run(
        [*command, str(recorded_spans.CPU_DP4)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["cause"] == "none"
    missing = subprocess.run([*command, "/no/such/file"], capture_output=True, check=False)
    assert missing.returncode == 2


OPS = (
    ops.STEP,
    ops.FORWARD,
    ops.GARBAGE,
    ops.DATA_WAIT,
    ops.Op("all_reduce", "collective", "world"),
)
SPANS = st.lists(
    st.tuples(
        *(st.integers(0, 3), st.integers(0, 12), st.integers(0, 4), st.integers(0, 3)),
        *(st.integers(0, 2), st.integers(0, 10**12), st.integers(0, 10**10), st.just(0)),
    ),
    max_size=120,
)


@examples(60)
@given(SPANS, SPANS)
def test_any_spans_get_an_answer(
    before: list[tuple[int, ...]], after: list[tuple[int, ...]]
) -> None:
    def table(rows: list[tuple[int, ...]]) -> SpanTable:
        columns = np.array(rows, np.int64).reshape(-1, len(COLUMNS)).T
        typed = {
            name: column.astype(dtype)
            for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)
        }
        return SpanTable(**typed, ops=OPS, layout=RankLayout(dp=4), nodes=("a", "a", "b", "b"))

    found: Decline = why(table(before), table(after))
    assert found.sentence and found.cause
    json.dumps(found.shares, allow_nan=False)
