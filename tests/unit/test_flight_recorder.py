"""Dumps of NCCL's flight recorder: who did not enter the operation that the others wait in.

The dumps have the fields and types that torch 2.13 writes (dump_json of FlightRecorderDetail.hpp,
version 2.10): numbers as text in pg_status, ranks of a group as text.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megascale_common.node import flight_record
from megascale_common.node.flight_record import GroupRecord, RankRecord
from megascale_driver.analysis.flight_recorder import main, parse, verdict

Group = tuple[str, str, list[int]]  # name, desc, ranks
WORLD: Group = ("0", "default_pg", [0, 1, 2, 3])
ONE_TWO: Group = ("5", "pp0-1.activation", [1, 2])


def entry(
    group: Group, number: int, state: str, name: str = "all_reduce", *, p2p: bool = False
) -> dict[str, Any]:
    return {
        "frames": [{"name": "step", "filename": "trainer.py", "line": "7"}],
        "record_id": number, "pg_id": int(group[0]), "process_group": [group[0], group[1]],
        "thread_name": "pt_main", "thread_id": "1", "op_id": number,
        "collective_seq_id": 0 if p2p else number, "p2p_seq_id": number if p2p else 0,
        "profiling_name": f"nccl:{name}", "time_created_ns": 10**18 + number,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
        "output_dtypes": ["Float"], "state": state, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": state == "completed",
        "timeout_ms": 600000, "is_p2p": p2p,
    }  # fmt: skip


def dump(*entries: dict[str, Any], groups: tuple[Group, ...] = (WORLD, ONE_TWO)) -> bytes:
    config = {n: {"name": n, "desc": desc, "ranks": str(ranks)} for n, desc, ranks in groups}
    last = str(len(entries))
    status = {"last_enqueued_collective": last, "last_started_collective": last}
    return json.dumps(
        {
            "version": "2.10", "comm_lib_version": "2.27.5", "pg_config": config,
            "pg_status": {"0": {**status, "last_completed_collective": "1"}},
            "entries": list(entries), "nccl_comm_state": {},
        }
    ).encode()  # fmt: skip


def inside(number: int) -> bytes:
    done = [entry(WORLD, each, "completed") for each in range(1, number)]
    return dump(*done, entry(WORLD, number, "started"))


def test_the_rank_that_did_not_enter_is_named_with_what_it_is_missing_from() -> None:
    late = dump(*(entry(WORLD, each, "completed") for each in range(1, 4)))
    found = verdict([*(parse(rank, inside(4)) for rank in (0, 1, 2)), parse(3, late)])
    assert found.culprits == (3,)
    assert found.sentence == (
        "rank 3 did not enter all_reduce 4 of default_pg, in which ranks 0, 1, 2 waited."
    )
    (missing,) = found.missing
    assert (missing.number, missing.waiting, missing.missing) == (4, (0, 1, 2), (3,))


def test_communicators_of_the_same_ranks_without_a_description_are_not_one() -> None:
    """torch describes a group that nobody has described as "undefined" (H200s, torch 2.11)."""
    there: Group = ("7", "undefined", [0, 1])
    back: Group = ("8", "undefined", [0, 1])

    def rank(there_until: int, back_until: int) -> bytes:
        return dump(
            *(entry(there, each, "completed", p2p=True) for each in range(1, there_until + 1)),
            *(entry(back, each, "scheduled", p2p=True) for each in range(1, back_until + 1)),
            groups=(there, back),
        )

    found = verdict([parse(0, rank(9, 1)), parse(1, rank(9, 0))])
    assert found.culprits == (1,), "of the second it has entered none, of the first nine"
    assert found.missing[0].group == "8"


def test_hosts_that_are_ahead_of_their_devices_wait_in_the_first_that_is_not_complete() -> None:
    # Ranks 0 to 2 have enqueued up to 9 and the device stands in 4, which rank 3 has not enqueued.
    ahead = dump(
        *(entry(WORLD, each, "completed") for each in range(1, 4)),
        entry(WORLD, 4, "started"),
        *(entry(WORLD, each, "scheduled") for each in range(5, 10)),
    )
    late = dump(*(entry(WORLD, each, "completed") for each in range(1, 4)))
    found = verdict([*(parse(rank, ahead) for rank in (0, 1, 2)), parse(3, late)])
    assert found.culprits == (3,) and found.missing[0].number == 4


def test_a_chain_of_waiting_over_a_pipeline_edge_leads_to_its_end() -> None:
    sends = [entry(ONE_TWO, 1, "completed", "recv 2<-1", p2p=True)]
    waits = dump(*sends, entry(ONE_TWO, 2, "started", "recv 2<-1", p2p=True))
    quiet = dump(
        entry(ONE_TWO, 1, "completed", "send 1->2", p2p=True), entry(WORLD, 1, "completed")
    )
    found = verdict([parse(0, inside(2)), parse(1, quiet), parse(2, waits), parse(3, inside(2))])
    assert found.culprits == (1,)  # rank 2 too has not entered the all-reduce, and waits for rank 1
    assert any(each.operation == "recv 2<-1" and each.missing == (1,) for each in found.missing)


def test_a_rank_without_a_dump_is_the_silent_one() -> None:
    found = verdict([parse(rank, inside(4)) for rank in (0, 1, 2)])
    assert (found.culprits, found.without_dump) == ((3,), (3,))
    assert found.sentence.endswith("of which no dump came from rank 3.")


def test_where_all_have_entered_nobody_is_named() -> None:
    found = verdict([parse(rank, inside(4)) for rank in range(4)])
    assert found.culprits == () and found.missing == ()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"version": "1.4", "pg_config": {}}', "version 1.4, not 2.x"),
        (b'{"pg_config": {}}', "not one of torch's"),
        (b"[]", "not one of torch's"),
        (b'{"version": "2.10", "pg_config": {"0": 3}}', "not one of torch's"),
        (b"\x80\x02}", "decode"),
    ],
)
def test_what_is_no_dump_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(0, data)


def test_a_dump_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_record, "MAX_DUMP_BYTES", 100)
    with pytest.raises(ValueError, match="100 at most"):
        parse(0, inside(3))


def test_a_folder_of_dumps_is_read_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2 and "no file there" in capsys.readouterr().err
    for rank in (0, 1, 2):
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_bytes(inside(4))
    (tmp_path / "nccl_trace_rank_3").write_bytes(inside(3))
    (tmp_path / "notes.txt").write_text("mine")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["culprits"] == [3] and "rank 3 did not enter" in said.err
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"{}")
    assert main([str(tmp_path)]) == 2 and "nccl_trace_rank_3" in capsys.readouterr().err
    assert main([]) == 2


def test_the_ranks_of_a_group_are_few_numbers_where_they_are_evenly_spaced() -> None:
    groups = (WORLD, ("7", "dp", [1, 3, 5]), ("8", "odd", [0, 1, 3]), ("9", "one", [2]))
    entries = [entry(group, 1, "completed") for group in groups]
    ranks = {each.group: each.ranks for each in parse(1, dump(*entries, groups=groups)).groups}
    assert ranks == {
        "default_pg": range(4), "dp": range(1, 6, 2), "odd": (0, 1, 3), "one": range(2, 3),
    }  # fmt: skip


def test_a_verdict_on_many_ranks_takes_time_that_grows_with_them() -> None:
    def took_s(ranks: int) -> float:
        def record(rank: int) -> RankRecord:
            world = GroupRecord("world", range(ranks), False, 5, 0 if rank == 7 else 6, "all")
            ahead = GroupRecord("world", range(ranks), False, 6, 6, "all")
            pair = range(rank - rank % 2, rank - rank % 2 + 2)
            return RankRecord(
                rank, (world if rank == 7 else ahead, GroupRecord("tp", pair, False, 3))
            )

        records = [record(rank) for rank in range(ranks)]
        began_s = time.process_time()
        found = verdict(records, ranks)
        assert found.culprits == (7,) and len(found.missing[0].waiting) == ranks - 1
        return time.process_time() - began_s

    took_s(256)
    assert took_s(12_288) < 2.0  # pairs of ranks would be 150 million
