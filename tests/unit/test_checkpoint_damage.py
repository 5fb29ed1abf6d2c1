"""Damaged files are refused by name (flipped bits, missing bytes) and an older state is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tests.harness.checkpoint_files import image_of, slot_bytes, write_checkpoint
from tests.harness.properties import examples
from typer.testing import CliRunner

from megascale_checkpoint import restore
from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.commands import app
from megascale_checkpoint.commit_log import CommitLog
from megascale_checkpoint.restore_decision import RestoreDecision, SealedStep, decide
from megascale_checkpoint.storage import FileStorage
from megascale_common.service.errors import DamagedError, NotFoundError, RequestError, UnusableError
from megascale_common.sizes.checkpoint_layout import ShardLayout, ShardPiece

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
    restore.fill(uri, 10, rank, LAYOUTS[rank], memoryview(image))
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
    with pytest.raises(OSError, match="symbolic links"):
        read(uri, 1)
    with pytest.raises(OSError, match="symbolic links"):
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
        restore.fill(uri, 10, rank, LAYOUTS[rank], memoryview(bytearray(LAYOUTS[rank].slot_bytes)))
        for rank in (0, 1)
    ]
    assert [filled.small_state for filled in found] == states
