"""Damaged files are refused by name (flipped bits, missing bytes) and an older state is used."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tests.harness.checkpoint_files import (
    COMMIT,
    image_of,
    slot_bytes,
    stored_plan,
    write_checkpoint,
)
from tests.harness.command_line import command
from tests.harness.properties import examples
from typer.testing import CliRunner

from megascale_checkpoint.checksums import checksum, dump_record
from megascale_checkpoint.commands.app import app
from megascale_checkpoint.commit import commit_record as records
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.manifest import MAX_MANIFEST_BYTES
from megascale_checkpoint.commit.restore_decision import RestoreDecision, SealedStep, decide
from megascale_checkpoint.commit.shard_file import MAX_HEADER_BYTES, Origin, encode_header
from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_checkpoint.storage import FileStorage
from megascale_cli.exits import FAILED, OK, USAGE
from megascale_common.service.errors import DamagedError, NotFoundError, RequestError, UnusableError
from megascale_job.sections.parallelism import MAX_WORLD_SIZE
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

VALUES = {"matrix": np.arange(60, dtype=np.float32).reshape(6, 10)}
FILE = "attempts/attempt-000001/step-000000010/rank-00001.safetensors"


def layout_of(rank: int) -> ShardLayout:
    start, stop = (3 * rank, 0), (3 * rank + 3, 10)
    box = ("float32", (6, 10), start, stop, 0, 30)
    pieces = (
        ShardPiece("matrix", "master", *box, 0, primary=True),
        ShardPiece("matrix", "exp_avg", *box, 128, primary=True),
    )
    return ShardLayout(pieces, slot_bytes(pieces))


LAYOUTS = [layout_of(0), layout_of(1)]


def read(uri: str, rank: int) -> bytearray:
    image = bytearray(LAYOUTS[rank].slot_bytes)
    restore.fill(stored_plan(uri), rank, LAYOUTS[rank], memoryview(image))
    return image


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_files_are_standard_safetensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    with safe_open(tmp_path / FILE, framework="numpy") as file:
        assert sorted(file.keys()) == ["matrix/exp_avg/1", "matrix/master/0"]
        assert file.get_tensor("matrix/master/0").tolist() == list(range(30, 60))
        assert '"global_shape": [6, 10]' in file.metadata()["matrix/master/0"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint that tests may damage if they repair it: its folder and its manifest's URI."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, LAYOUTS, VALUES)


@examples(150)
@given(data=st.data())
def test_a_flipped_bit_is_never_loaded(written: tuple[Path, str], data: st.DataObject) -> None:
    folder, uri = written
    path = folder / FILE
    size = path.stat().st_size
    # Most of a small file is padding of the header: bytes with meaning are drawn just as often.
    header, tail = st.integers(0, 8 * 1500), st.integers(8 * (size - 240), 8 * size - 1)
    bit = data.draw(header | tail | st.integers(0, 8 * size - 1))
    flip(path, bit)
    try:
        image = read(uri, 1)
        assert image == image_of(LAYOUTS[1], VALUES), "a flipped bit changed what was loaded"
    except DamagedError as error:
        assert error.file == str(path)
    finally:
        verified = CliRunner().invoke(app, ["verify", str(folder)])
        flip(path, bit)
    assert verified.exit_code == 1 and str(path) in verified.output


@pytest.mark.parametrize("keep", [0, 7, 8, 500, 4096, 4100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedError) as caught:
        read(uri, 1)
    assert caught.value.file == str(path)
    # Each rank reads the files that it needs; all of them are checked when the attempt is opened.
    assert read(uri, 0) == image_of(LAYOUTS[0], VALUES)
    with pytest.raises(UnusableError) as unusable:
        decision(tmp_path)
    assert str(caught.value) in str(unusable.value), (
        "the job must not start over from step 0 unasked"
    )
    assert decision(tmp_path, sealed=9) == ("memory", 9, (str(caught.value),))


def test_a_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES, step=10)
    write_checkpoint(tmp_path, LAYOUTS, {"matrix": VALUES["matrix"] + 1}, step=11)
    path = tmp_path / FILE
    path.write_bytes((tmp_path / FILE.replace("010", "011")).read_bytes())
    with pytest.raises(DamagedError, match="belongs to"):
        read(uri, 1)


def decided(
    root: Path, sealed: int = 0, refused: tuple[int, ...] = (), load_uri: str = ""
) -> RestoreDecision:
    log = CommitLog(FileStorage(root))
    log.refresh()
    return decide(log, str(root), SealedStep(sealed, 1), frozenset(refused), load_uri)


def decision(
    root: Path, sealed: int = 0, refused: tuple[int, ...] = ()
) -> tuple[str, int, tuple[str, ...]]:
    made = decided(root, sealed, refused)
    return made.plan.source, made.plan.step, made.passed_over


def test_a_plan_from_memory_names_the_stored_copy_of_the_same_state(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS, VALUES, step=10)
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES, step=20)
    plan = decided(tmp_path, sealed=20).plan
    assert (plan.source, plan.manifest_uri) == ("memory", uri)
    assert plan.manifest_xxh3 == checksum(Path(uri).read_bytes())
    assert decided(tmp_path, sealed=25).plan.manifest_uri == "", "step 25 is stored nowhere"
    # Another attempt has reached step 20 as well, perhaps with other values: no copy of that.
    log = CommitLog(FileStorage(tmp_path))
    log.refresh()
    other = decide(log, str(tmp_path), SealedStep(20, 2), frozenset()).plan
    assert (other.source, other.written_by_attempt, other.manifest_uri) == ("memory", 2, "")
    # A damaged copy is none; memory is used all the same.
    (Path(uri).parent / "rank-00001.safetensors").unlink()
    plan = decided(tmp_path, sealed=20).plan
    assert (plan.source, plan.step, plan.manifest_uri) == ("memory", 20, "")


def test_a_copy_that_the_next_attempt_stored_is_one_of_the_same_state(tmp_path: Path) -> None:
    log = CommitLog(FileStorage(tmp_path))
    opened = {"job": "job", "epoch": [1, 1]}
    log.append_open(1, lambda: opened)
    log.append_open(2, lambda: {**opened, "restored_from": decided(tmp_path, 30).to_record()})
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES, step=30, attempt=2)
    plan = decided(tmp_path, sealed=30).plan
    assert (plan.source, plan.written_by_attempt, plan.manifest_uri) == ("memory", 1, uri)
    # What attempt 2 computed itself is another state than attempt 1's of that step.
    write_checkpoint(tmp_path, LAYOUTS, VALUES, step=40, attempt=2)
    plan = decided(tmp_path, sealed=40).plan
    assert (plan.source, plan.written_by_attempt, plan.manifest_uri) == ("memory", 1, "")


def test_a_job_without_a_state_of_its_own_starts_from_another_jobs(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    own.mkdir()
    newest = [write_checkpoint(other, LAYOUTS, VALUES, step=step) for step in (10, 20)][-1]
    made = decided(own, load_uri=str(other))
    assert (made.plan.source, made.plan.step, made.plan.manifest_uri) == ("storage", 20, newest)
    assert made.plan.written_by_attempt == 0, "no attempt of this job wrote it"
    assert decided(own, refused=(20,), load_uri=str(other)).plan.step == 10
    # with a state of its own, sealed or committed, the other job's newer one does not count
    assert decided(own, sealed=15, load_uri=str(other)).plan.source == "memory"
    write_checkpoint(own, LAYOUTS, VALUES, step=15)
    made = decided(own, load_uri=str(other))
    assert (made.plan.step, made.plan.written_by_attempt) == (15, 1)


def test_nothing_to_start_from_is_an_error_not_a_start_from_scratch(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    with pytest.raises(
        NotFoundError, match=f"load_uri: {tmp_path}/nowhere holds no complete checkpoint"
    ):
        decided(own, load_uri=str(tmp_path / "nowhere"))
    write_checkpoint(other, LAYOUTS, VALUES, step=10)
    next((other / FILE).parent.glob("*.safetensors")).unlink()
    with pytest.raises(NotFoundError, match="is missing"):
        decided(own, load_uri=str(other))


def test_the_newest_whole_state_is_restored(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, LAYOUTS, VALUES, step=step)
    assert decision(tmp_path) == ("storage", 30, ())
    assert decision(tmp_path, sealed=29) == ("storage", 30, ())
    assert decision(tmp_path, sealed=30) == ("memory", 30, ())
    assert decision(tmp_path, sealed=40, refused=(40,)) == ("storage", 30, ())
    assert decision(tmp_path, refused=(30, 20)) == ("storage", 10, ())
    with pytest.raises(UnusableError, match=r"step 20 failed its checksums.*a new checkpoint.uri"):
        decision(tmp_path, refused=(30, 20, 10))
    folder = tmp_path / "attempts/attempt-000001"
    with (folder / "step-000000030/rank-00000.safetensors").open("ab") as file:
        file.write(b"x")
    flip(folder / "step-000000020/manifest.json", 8 * 200 + 1)
    source, step, passed_over = decision(tmp_path)
    assert (source, step, len(passed_over)) == ("storage", 10, 2)
    assert f"{folder}/step-000000030/rank-00000.safetensors: has" in passed_over[0]
    assert f"{folder}/step-000000020/manifest.json" in passed_over[1]
    (folder / "step-000000010/rank-00001.safetensors").unlink()
    assert decision(tmp_path, sealed=9)[:2] == ("memory", 9)


def test_storage_that_does_not_answer_is_no_evidence_of_damage(tmp_path: Path) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES)
    whole, manifest = tmp_path / FILE, Path(uri)
    broken = whole.with_name("elsewhere")
    whole.rename(broken)
    whole.symlink_to(whole)  # every access ends in ELOOP
    with pytest.raises(OSError, match="symbolic link"):
        read(uri, 1)
    with pytest.raises(OSError, match="symbolic link"):
        decision(tmp_path)
    whole.unlink()
    broken.rename(whole)
    manifest.rename(broken)
    with pytest.raises(
        RequestError, match="is missing on this node: is the checkpoint folder shared"
    ):
        read(uri, 1)
    with pytest.raises(UnusableError, match="is missing"):
        decision(tmp_path)


def test_list_and_verify_without_a_cluster(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(app, ["list", str(tmp_path)])
    assert "holds no commit log" in str(missing.exception)  # the CLI prints it
    for step in (10, 20):
        write_checkpoint(tmp_path, LAYOUTS, VALUES, step=step)
    listed = runner.invoke(app, ["list", str(tmp_path), "--json"])
    assert listed.exit_code == 0
    assert listed.output.index('"step": 20') < listed.output.index('"step": 10')
    assert runner.invoke(app, ["verify", str(tmp_path)]).exit_code == 0
    (tmp_path / FILE).unlink()
    verified = runner.invoke(app, ["verify", str(tmp_path)])
    assert verified.exit_code == 1
    assert (
        "step 20 of attempt 1: whole" in verified.output
        and f"{tmp_path / FILE}: is missing" in verified.output
    )


def test_small_states_come_back_per_rank(tmp_path: Path) -> None:
    states = [{"position": 10, "random": rank} for rank in range(2)]
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES, small_states=states)
    found = [
        restore.fill(
            stored_plan(uri), rank, LAYOUTS[rank], memoryview(bytearray(LAYOUTS[rank].slot_bytes))
        )
        for rank in (0, 1)
    ]
    assert [filled.small_state for filled in found] == states


# What a fault of a writer, or somebody who can write there, may leave: every checksum is right.
Values = dict[str, Any]


def committed_again(folder: Path, manifest: bytes, **fields: Any) -> Path:
    """Put ``manifest`` in the place of the first checkpoint's, with a log that commits it."""
    path = folder / "attempts/attempt-000001/step-000000010/manifest.json"
    path.write_bytes(manifest)
    for record in (folder / "commits").iterdir():
        record.unlink()
    log = CommitLog(FileStorage(folder))
    log.append_open(1, lambda: {"job": "job"})
    named = {"manifest": str(path.relative_to(folder)), "manifest_xxh3": checksum(manifest)}
    log.append_commit(1, 10, {"job": "job", "world_size": 2, **named, **fields})
    return path


def changed(values: Values, **fields: Any) -> Values:
    return {**values, **fields}


def without(values: Values, name: str) -> Values:
    return {key: value for key, value in values.items() if key != name}


def deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def in_file(values: Values, **fields: Any) -> Values:
    first, *others = values["files"]
    return {**values, "files": [{**first, **fields}, *others]}


MANIFESTS: dict[str, tuple[Callable[[Values], Values], str]] = {
    "a field more": (lambda v: changed(v, further=1), "has the unknown field further"),
    "no layout": (lambda v: without(v, "layout"), "layout is missing"),
    "files of text": (lambda v: changed(v, files="abc"), "files is 'abc' where a list"),
    "files of numbers": (lambda v: changed(v, files=[1]), "files[0] is 1 where an object"),
    "a file's field more": (lambda v: in_file(v, further=1), "unknown field files[0].further"),
    "a file without a size": (lambda v: in_file(v, size_bytes=None), "files[0].size_bytes is None"),
    "a file elsewhere": (lambda v: in_file(v, path="../other"), "does not stay below"),
    "a file twice": (lambda v: in_file(v, path=v["files"][1]["path"]), "names one file twice"),
    "a rank twice": (lambda v: in_file(v, rank=1), "it names files of 1 rank"),
    "no number as step": (lambda v: changed(v, step=float("nan")), "step is nan where a whole"),
    "true as step": (lambda v: changed(v, step=True), "step is True where a whole number"),
    "ranks without end": (lambda v: changed(v, world_size=2**40), "world_size is 1099511627776"),
    "a layout of none": (lambda v: changed(v, layout={"tp": 0}), "layout is {'tp': 0} where"),
    "a layout of others": (
        lambda v: changed(v, layout={"tp": 4, "cp": 1, "dp": 1, "pp": 1}),
        "layout is of 4 ranks, and world_size is 2",
    ),
    "text as state": (lambda v: changed(v, small_state="abc"), "small_state is 'abc' where"),
    "a rank's state of text": (lambda v: changed(v, rank_small_states={"0": 1}), "where an object"),
    "the state of no rank": (lambda v: changed(v, rank_small_states={"7": {}}), "names rank '7'"),
    "deep nesting": (lambda v: changed(v, small_state={"a": deep(100)}), "nested deeper than 64"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_without_meaning_is_damaged_and_named(tmp_path: Path, name: str) -> None:
    change, problem = MANIFESTS[name]
    uri = Path(write_checkpoint(tmp_path, LAYOUTS, VALUES))
    values = {k: v for k, v in json.loads(uri.read_bytes()).items() if k != "xxh3"}
    path = committed_again(tmp_path, dump_record(change(values)))
    verified = command("checkpoint", "verify", tmp_path)
    assert verified.status == FAILED and f"{path}: " in verified.stdout
    assert problem in verified.stdout
    for verb in (("show",), ("export", "--to", tmp_path / "out", "--format", "dcp")):
        answer = command("checkpoint", verb[0], tmp_path, *verb[1:])
        assert answer.status == FAILED and f"{path}: " in answer.stderr
        assert problem in answer.stderr
    with pytest.raises(UnusableError, match=r"manifest\.json"):
        decision(tmp_path)
    with pytest.raises(DamagedError):
        read(str(path), 1)


def test_a_manifest_that_is_nested_without_end_is_damaged(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    path = committed_again(tmp_path, b"[" * 200_000 + b"]" * 200_000)
    verified = command("checkpoint", "verify", tmp_path)
    assert verified.status == FAILED and f"{path}: is JSON nested deeper" in verified.stdout


def test_a_manifest_of_another_commit_is_found_by_verify(tmp_path: Path) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES)
    committed_again(tmp_path, Path(uri).read_bytes(), world_size=3, size_bytes=1)
    verified = command("checkpoint", "verify", tmp_path)
    assert verified.status == FAILED
    assert "world_size is 2, and 3 was committed" in verified.stdout
    assert "size_bytes is" in verified.stdout and "and 1 was committed" in verified.stdout


RECORDS: dict[str, tuple[Values, str]] = {
    "deep nesting": ({"kind": "COMMIT", "further": deep(66)}, "nested deeper than 64"),
    "no manifest": ({"kind": "COMMIT", "step": 10}, "manifest is missing"),
    "a manifest elsewhere": (
        {"kind": "COMMIT", "step": 10, "manifest": "../other/manifest.json", "manifest_xxh3": ""},
        "where the path of a manifest below attempts/ is needed",
    ),
    "text as step": ({"kind": "COMMIT", **COMMIT, "step": "ten"}, "step is 'ten' where"),
    "text as time": ({"kind": "COMMIT", **COMMIT, "step": 1, "time": "then"}, "where a time such"),
    "a kind that is a list": ({"kind": ["OPEN"]}, "is not record 3"),
    "an epoch of text": ({"kind": "OPEN", "epoch": "ab"}, "epoch is 'ab' where a list"),
    "ranks without end": ({"kind": "OPEN", "held": {"n1": [[0, 2**40]]}}, "held is"),
    "rules of text": ({"kind": "OPEN", "retention": {"keep_latest": "all"}}, "keep_latest is"),
    "an unknown source": ({"kind": "OPEN", "restored_from": {"source": "moon"}}, "source is"),
    "half of a plan": (
        {"kind": "OPEN", "restored_from": {"older": [{"step": 1}]}},
        "restored_from.older[0].source is missing",
    ),
    "no end of a fence": ({"kind": "REPAIR", "stands_for": "", "fence": 1}, "fence is 1 where"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_without_meaning_is_damaged_and_named(tmp_path: Path, name: str) -> None:
    values, problem = RECORDS[name]
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    previous = (tmp_path / records.path_of(2)).read_bytes()
    values = {"time": "2026-01-01T00:00:00.000+00:00", "job": "job", **values}
    data = records.encode(values, 3, 1, checksum(previous))
    (tmp_path / records.path_of(3)).write_bytes(data)
    for verb in ("list", "verify", "show"):
        answer = command("checkpoint", verb, tmp_path)
        assert answer.status == OK, "what stands before it is whole"
        assert f"{records.path_of(3)}: " in answer.stderr and problem in answer.stderr
    repaired = command("checkpoint", "repair", tmp_path)
    assert repaired.status == FAILED and problem in repaired.stdout
    assert command("checkpoint", "repair", tmp_path, "--yes").status == OK
    assert "damaged" not in command("checkpoint", "list", tmp_path).stderr


@pytest.mark.parametrize("data", [b"[" * 200_000 + b"]" * 200_000, b'{"a":' * 90_000])
def test_a_record_that_is_nested_without_end_is_damaged(tmp_path: Path, data: bytes) -> None:
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    (tmp_path / records.path_of(3)).write_bytes(data)
    answer = command("checkpoint", "verify", tmp_path)
    assert f"{records.path_of(3)}: is JSON nested deeper" in answer.stderr
    assert command("checkpoint", "repair", tmp_path).status == FAILED


@pytest.mark.parametrize(
    ("name", "value"),
    [("opens", [[1, "abc"]]), ("live", "abc"), ("last", [1]), ("pins", [[1, 2]]), ("jobs", None)],
)
def test_a_snapshot_of_the_log_without_meaning_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr("megascale_checkpoint.commit.commit_log.SNAPSHOT_EVERY", 2)
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    [path] = (tmp_path / "snapshots").iterdir()
    values = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "xxh3"}
    path.write_bytes(dump_record({**values, name: value}))
    log = CommitLog(FileStorage(tmp_path))
    log.refresh()
    assert [record.step for record in log.commits()] == [10] and not log.damaged


def with_header(folder: Path, header: bytes, length: int | None = None) -> Path:
    """Give the file of rank 1 another header, with a manifest and a log to which it belongs."""
    path = folder / FILE
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data[end:])
    uri = path.with_name("manifest.json")
    values = {k: v for k, v in json.loads(uri.read_bytes()).items() if k != "xxh3"}
    values["files"][1]["size_bytes"] = path.stat().st_size
    values["files"][1]["xxh3"] = checksum(path.read_bytes())
    committed_again(folder, dump_record(values))
    return path


def header_of(folder: Path) -> Values:
    data = (folder / FILE).read_bytes()
    found: Values = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def sealed(header: Values) -> bytes:
    """A header with its own checksum."""
    metadata = {k: v for k, v in header["__metadata__"].items() if k != "xxh3"}
    record = json.loads(dump_record({**header, "__metadata__": metadata}))
    return json.dumps({**header, "__metadata__": {**metadata, "xxh3": record["xxh3"]}}).encode()


KEY = "matrix/master/0"


def with_entry(header: Values, **fields: Any) -> Values:
    return {**header, KEY: {**header[KEY], **fields}}


def with_metadata(header: Values, **fields: Any) -> Values:
    return {**header, "__metadata__": {**header["__metadata__"], **fields}}


def with_piece(header: Values, **fields: Any) -> Values:
    values = {**json.loads(header["__metadata__"][KEY]), **fields}
    return with_metadata(header, **{KEY: json.dumps(values)})


HEADERS: dict[str, tuple[Callable[[Values], Values], str]] = {
    "an unknown type": (lambda h: with_entry(h, dtype="U8"), "dtype is 'U8' where one of F32"),
    "no metadata": (
        lambda h: changed(h, __metadata__=without(h["__metadata__"], KEY)),
        f"{KEY} is missing",
    ),
    "metadata of numbers": (lambda h: with_metadata(h, **{KEY: 1}), f"{KEY} is 1 where text"),
    "metadata of a list": (lambda h: with_metadata(h, **{KEY: "[1]"}), "is not a JSON object"),
    "metadata that is deep": (
        lambda h: with_metadata(h, **{KEY: "[" * 100_000}),
        "is JSON nested deeper",
    ),
    "an entry of text": (lambda h: changed(h, **{KEY: "abc"}), f"{KEY} is not an object"),
    "text as shape": (lambda h: with_entry(h, shape="ab"), "shape is 'ab' where a list"),
    "another shape": (lambda h: with_entry(h, shape=[31]), "contradicts itself"),
    "other bytes": (lambda h: with_entry(h, data_offsets=[0, 4]), "contradicts itself"),
    "bytes backwards": (lambda h: with_entry(h, data_offsets=[120, 0]), "contradicts itself"),
    "bytes behind the end": (
        lambda h: with_entry(h, data_offsets=[1 << 40, (1 << 40) + 120]),
        "describes",
    ),
    "a huge parameter": (
        lambda h: with_piece(h, global_shape=[2**62, 2**62]),
        "contradicts itself",
    ),
    "too many dimensions": (lambda h: with_piece(h, global_shape=[1] * 100_000), "where a list"),
    "a box outside": (lambda h: with_piece(h, stop=[7, 10]), "piece is outside its parameter"),
    "another box": (lambda h: with_piece(h, start=[0]), "zip()"),
    "no range": (lambda h: with_piece(h, flat=[0]), "flat is [0] where a list of length 2"),
    "no checksum": (lambda h: with_piece(h, xxh3="abc"), "xxh3 is 'abc' where an xxh3-128"),
    "chunks that are none": (lambda h: with_piece(h, chunks=["0" * 32] * 3), "contradicts itself"),
    "chunks of text": (lambda h: with_piece(h, chunks="abc"), "chunks is 'abc' where a list"),
    "an odd state": (lambda h: with_piece(h, state="../x"), "is not the name of an optimizer"),
    "an origin of text": (lambda h: with_metadata(h, origin="abc"), "is not JSON"),
    "no origin": (
        lambda h: changed(h, __metadata__=without(h["__metadata__"], "origin")),
        "origin is missing",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_without_meaning_is_damaged_and_named(tmp_path: Path, name: str) -> None:
    change, problem = HEADERS[name]
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    path = with_header(tmp_path, sealed(change(header_of(tmp_path))))
    refused_by_name(tmp_path, path, problem)


def refused_by_name(folder: Path, path: Path, problem: str) -> None:
    """By the commands, and by a daemon that restores the file."""
    verified = command("checkpoint", "verify", folder)
    assert verified.status == FAILED and f"{path}: " in verified.stdout
    assert problem in verified.stdout
    exported = command("checkpoint", "export", folder, "--to", folder / "out", "--format", "dcp")
    assert exported.status == FAILED and f"{path}: " in exported.stderr
    assert problem in exported.stderr
    with pytest.raises(DamagedError) as caught:
        read(str(path.with_name("manifest.json")), 1)
    assert caught.value.file == str(path)


def test_a_header_that_is_nested_without_end_is_damaged(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    path = with_header(tmp_path, b"[" * 200_000 + b"]" * 200_000)
    refused_by_name(tmp_path, path, "is JSON nested deeper")


def test_a_header_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """90 MB of JSON would take 40 s and 3 GiB."""
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    path = with_header(tmp_path, b"", length=MAX_HEADER_BYTES + 1)
    with path.open("ab") as file:
        file.truncate(90 << 20)
    values = json.loads(path.with_name("manifest.json").read_bytes())
    values["files"][1]["size_bytes"] = 90 << 20
    committed_again(tmp_path, dump_record({k: v for k, v in values.items() if k != "xxh3"}))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="header of 16777217 bytes, and the limit is"):
            read(str(path.with_name("manifest.json")), 1)
        assert tracemalloc.get_traced_memory()[1] < MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


SPARSE_BYTES = 1 << 30  # of zeros that take no room on the disk


@contextmanager
def little_memory() -> Iterator[None]:
    """What is done within takes some KiB, whatever a file holds."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES)
    with open(uri, "ab") as file:
        file.truncate(SPARSE_BYTES)
    limit = f"{uri}: has {SPARSE_BYTES} bytes, and such a file has {MAX_MANIFEST_BYTES} at most"
    with little_memory(), pytest.raises(DamagedError, match=re.escape(limit)):
        manifests.load(uri)
    for verb, status in (("verify", FAILED), ("show", FAILED)):
        answer = command("checkpoint", verb, tmp_path)
        assert answer.status == status and limit in answer.text, answer.text


@pytest.mark.parametrize("folder", ["commits", "snapshots"])
def test_a_record_larger_than_any_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr("megascale_checkpoint.commit.commit_log.SNAPSHOT_EVERY", 2)
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    path = tmp_path / folder / records.name_of(2)
    with path.open("ab") as file:
        file.truncate(SPARSE_BYTES)
    log = CommitLog(FileStorage(tmp_path))
    with little_memory():
        log.refresh(whole=folder == "commits")
    if folder == "snapshots":  # which only saves time
        assert [record.step for record in log.commits()] == [10] and not log.damaged
        return
    [damage] = log.damaged
    assert str(damage).startswith(f"commits/{records.name_of(2)}: has {SPARSE_BYTES} bytes, and")
    answer = command("checkpoint", "repair", tmp_path)
    assert answer.status == USAGE and "move it elsewhere, and repeat" in answer.stderr
    path.rename(tmp_path / "elsewhere")
    assert command("checkpoint", "repair", tmp_path, "--yes").status == OK
    assert not CommitLog(FileStorage(tmp_path)).damaged


def test_a_manifest_and_records_of_the_largest_job_are_read(tmp_path: Path) -> None:
    entries = tuple(
        manifests.File(manifests.rank_file(rank, 8), 10**12, "0" * 32, rank, "0" * 64)
        for rank in range(MAX_WORLD_SIZE)
    )
    layout = {"tp": 8, "cp": 1, "dp": MAX_WORLD_SIZE // 8, "pp": 1}
    time = manifests.now()
    largest = manifests.Manifest("job", 1, 1, len(entries), layout, entries, {}, {}, time)
    assert len(manifests.encode(largest)) < MAX_MANIFEST_BYTES // 2
    held = {f"{rank:0>63}": [[rank, rank]] for rank in range(MAX_WORLD_SIZE)}
    assert records.encode({"kind": "OPEN", "held": held}, 1, 1, "")


def test_what_no_reader_would_take_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES)
    storage, whole = manifests.load(uri)
    large = msgspec.structs.replace(whole, small_state={"x": "x" * MAX_MANIFEST_BYTES})
    with pytest.raises(DamagedError, match=r"other\.json: has 6\d{7} bytes, and manifests have"):
        manifests.write(storage, "other.json", large)
    log = CommitLog(FileStorage(tmp_path))
    with pytest.raises(RequestError, match=r"commits/000000000003.json would have 1.* bytes"):
        log.append_open(2, lambda: {"job": "job", "load_uri": "x" * records.MAX_RECORD_BYTES})
    assert log.append_open(2, lambda: {"job": "job"}).seq == 3
    monkeypatch.setattr("megascale_checkpoint.commit.commit_log.SNAPSHOT_EVERY", 1)
    monkeypatch.setattr(records, "MAX_SNAPSHOT_BYTES", 100)
    log.append_open(3, lambda: {"job": "job"})
    assert log.state.attempt == 3 and not (tmp_path / "snapshots").exists()


def test_a_header_that_no_reader_would_take_is_not_written() -> None:
    piece = LAYOUTS[0].pieces[0]
    long = replace(piece, name="x" * MAX_HEADER_BYTES)
    with pytest.raises(RequestError, match="divide the model over more ranks"):
        encode_header(Origin("job", 1, 1, 0), [(long, "0" * 32)])


def test_a_parameter_that_is_not_whole_is_found_by_verify(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS, VALUES)
    header = header_of(tmp_path)
    gone = "matrix/exp_avg/1"
    header["__metadata__"].pop(gone)
    with_header(tmp_path, sealed({k: v for k, v in header.items() if k != gone}))
    verified = command("checkpoint", "verify", tmp_path)
    assert verified.status == FAILED
    assert "matrix (exp_avg) of shape [6, 10] is stored with 30 values" in verified.stdout
