"""The loader as a process: shared rings, resume, and every way in which a side can end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import program_start
from tests.harness.corpus import data_job, random_documents, write_corpus
from tests.harness.processes import cpu_ticks, until_gone
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale_common.node import framing
from megascale_common.node.process import child_environment
from megascale_job.config import DataSource, EvaluationConfig, JobConfig, TokenizerConfig
from megascale_job.corpus_record import CorpusRecord, record_path
from megascale_job.loading import to_json
from megascale_trainer.data.client import LoaderClient, MicroBatchArrays, RingRequest
from megascale_trainer.data.indexed import CorpusError, DataError, identity
from megascale_trainer.data.packing import SampleStream, sample_numbers

LOADER = "megascale_trainer.data.loader"
RING = "memfd:megascale-data"
TIMEOUT_S = CALL_TIMEOUT_S
GLOBAL_BATCH = 8


@dataclass
class Loader:
    """A running loader and what its clients need."""

    process: subprocess.Popen[str]
    socket_path: Path
    job: JobConfig

    def client(
        self,
        dp_rank: int = 0,
        reader: int = 0,
        readers: int = 1,
        first_sample: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> LoaderClient:
        ring = RingRequest(dp_rank, reader, readers, first_sample)
        return LoaderClient(self.socket_path, self.job, ring, timeout_s)

    def held_out(self, dp_rank: int = 0) -> LoaderClient:
        ring = RingRequest(dp_rank, 0, 1, 0, stream="evaluation")
        return LoaderClient(self.socket_path, self.job, ring, TIMEOUT_S)

    def rings(self) -> int:
        """How many rings the loader holds: memfds that it maps or has open, seen from outside."""
        process = Path(f"/proc/{self.process.pid}")
        maps = (process / "maps").read_text().splitlines()
        inodes = {int(line.split()[4]) for line in maps if RING in line}
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if RING in str(entry.readlink()):
                    inodes.add(entry.stat().st_ino)
        return len(inodes)


StartLoader = Callable[[JobConfig], Loader]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartLoader]:
    """Starts loaders; ends them, and checks that each ended in time and removed its socket."""
    running: list[Loader] = []

    def begin(job: JobConfig) -> Loader:
        config, socket_path = tmp_path / "job.json", tmp_path / f"data{len(running)}.sock"
        config.write_text(to_json(job))
        command = [
            sys.executable,
            "-m",
            LOADER,
            "--socket",
            str(socket_path),
            "--config",
            str(config),
        ]
        process = program_start.start(
            command, env=child_environment(), stderr=subprocess.PIPE, text=True
        )
        running.append(Loader(process, socket_path, job))
        return running[-1]

    yield begin
    for loader in running:
        killed = loader.process.poll() is not None
        loader.process.terminate()
        _, errors = loader.process.communicate(timeout=CALL_TIMEOUT_S)
        if not killed:
            assert (loader.process.returncode, errors) == (0, "")
            assert not loader.socket_path.exists()


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    """Two sources, two data-parallel ranks, two micro-batches of two samples."""
    sources = [
        DataSource(
            prefix=str(write_corpus(tmp_path / name, random_documents(seed, 50, 40))),
            weight=float(seed),
        )
        for seed, name in ((1, "code"), (2, "prose"))
    ]
    return data_job(sources, global_batch_size=GLOBAL_BATCH, micro_batch_size=2, dp=2)


def expected_step(job: JobConfig, dp_rank: int, first_sample: int) -> list[MicroBatchArrays]:
    """The step at ``first_sample`` straight from the pure packing."""
    stream = SampleStream.open(job)
    numbers = sample_numbers(
        first_sample, job.micro_batches, job.training.micro_batch_size, job.parallelism.dp, dp_rank
    )
    rows = [[stream.sample(int(number)) for number in micro_batch] for micro_batch in numbers]
    return [{name: np.stack([row[name] for row in batch]) for name in batch[0]} for batch in rows]


def assert_same(left: list[MicroBatchArrays], right: list[MicroBatchArrays]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert np.array_equal(one[name], other[name]), name


def test_all_readers_of_a_rank_get_the_same_packed_batches(
    start: StartLoader, job: JobConfig
) -> None:
    """Two ranks of two readers, far more steps than slots, each reader at its own pace."""
    loader = start(job)
    steps = 12

    def read(dp_rank: int, reader: int) -> list[list[MicroBatchArrays]]:
        with loader.client(dp_rank, reader, readers=2) as client:
            batches = []
            for _ in range(steps):
                batches.append(client.next_step())
                time.sleep(0.003 * reader)
            assert client.consumed_samples == steps * GLOBAL_BATCH
            together.wait(timeout=TIMEOUT_S)  # now the others have opened theirs
            assert loader.rings() == 2
            together.wait(timeout=TIMEOUT_S)
            return batches

    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        futures = {
            (rank, reader): pool.submit(read, rank, reader) for rank in (0, 1) for reader in (0, 1)
        }
        seen = {key: future.result(timeout=CALL_TIMEOUT_S) for key, future in futures.items()}
    for rank in (0, 1):
        for step in range(steps):
            expected = expected_step(job, rank, step * GLOBAL_BATCH)
            assert_same(seen[rank, 0][step], expected)
            assert_same(seen[rank, 1][step], expected)
    until(lambda: loader.rings() == 0, "a ring is given back when its last reader leaves")


def test_a_reader_is_never_overtaken_by_the_loader(start: StartLoader, job: JobConfig) -> None:
    """The loader runs ahead only as far as the ring is deep: slow readers still find steps."""
    loader = start(job)
    with loader.client(0, 0, readers=2) as fast, loader.client(0, 1, readers=2) as slow:
        ahead = [fast.next_step() for _ in range(3)]
        fast._timeout_s = 0.2
        with pytest.raises(DataError, match=r"nothing ready within 0\.2 s"):
            fast.next_step()
        for step, batches in enumerate(ahead):
            assert_same(slow.next_step(), batches)
            assert_same(batches, expected_step(job, 0, step * GLOBAL_BATCH))


def test_resume_continues_the_stream_also_with_another_dp(
    start: StartLoader, job: JobConfig
) -> None:
    loader = start(job)
    position = 5 * GLOBAL_BATCH
    with loader.client(dp_rank=1, first_sample=position) as client:
        assert_same(client.next_step(), expected_step(job, 1, position))
        assert_same(client.next_step(), expected_step(job, 1, position + GLOBAL_BATCH))
    alone = data_job(job.data.sources, global_batch_size=GLOBAL_BATCH, micro_batch_size=2, dp=1)
    with start(alone).client(first_sample=position) as client:
        whole = client.next_step()
    halves = [expected_step(job, rank, position) for rank in (0, 1)]
    assert_same(whole, [halves[0][0], halves[1][0], halves[0][1], halves[1][1]])


def test_a_killed_loader_is_an_error_in_bounded_time(start: StartLoader, job: JobConfig) -> None:
    loader = start(job)
    with loader.client() as client:
        first = client.next_step()
        loader.process.kill()
        loader.process.wait(timeout=CALL_TIMEOUT_S)
        began = time.monotonic()
        with pytest.raises(DataError, match="data loader has stopped"):
            for _ in range(9):  # what was announced before may still be read
                client.next_step()
        assert time.monotonic() - began < TIMEOUT_S / 2, "its end is seen, not waited for"
        assert_same(first, expected_step(job, 0, 0))


def test_a_stopped_loader_is_an_error_after_the_timeout(start: StartLoader, job: JobConfig) -> None:
    loader = start(job)
    with loader.client() as client:  # which waits for its start and its answer, however long
        client._timeout_s = 1.5
        loader.process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(DataError, match=r"nothing ready within 1\.5 s"):
                for _ in range(9):
                    client.next_step()
            assert time.monotonic() - began < TIMEOUT_S / 2
        finally:
            loader.process.send_signal(signal.SIGCONT)


def test_after_a_reader_died_the_others_read_on_and_a_new_ring_can_open(
    start: StartLoader, job: JobConfig
) -> None:
    """The workers of a new attempt come while one of the old attempt is still there."""
    loader = start(job)
    with loader.client(0, 0, readers=2) as old:
        program = (
            "import sys, os, signal\n"
            "from pathlib import Path\n"
            "from megascale_job.loading import from_json\n"
            "from megascale_trainer.data.client import LoaderClient, RingRequest\n"
            "job = from_json(Path(sys.argv[2]).read_text())\n"
            "client = LoaderClient(sys.argv[1], job, RingRequest(0, 1, 2, 0), 120.0)\n"
            "client.next_step()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        config = loader.socket_path.with_name("job.json")
        dead = subprocess.run(
            [sys.executable, "-c", program, str(loader.socket_path), str(config)], check=False
        )
        assert dead.returncode == -signal.SIGKILL
        for step in range(6):
            assert_same(old.next_step(), expected_step(job, 0, step * GLOBAL_BATCH))
        with loader.client(0, 0, readers=2, first_sample=GLOBAL_BATCH) as new:
            assert_same(new.next_step(), expected_step(job, 0, GLOBAL_BATCH))
            assert loader.rings() == 2
    until(lambda: loader.rings() == 0, "the rings are given back")


def test_readers_that_disagree_are_refused(start: StartLoader, job: JobConfig) -> None:
    loader = start(job)
    with loader.client(0, 0, readers=2, first_sample=8):
        with pytest.raises(DataError, match=r"asked for sample 0 with 2 readers, but .* sample 8"):
            loader.client(0, 1, readers=2, first_sample=0)
        with pytest.raises(DataError, match="reader 0 of dp rank 0 is connected already"):
            loader.client(0, 0, readers=2, first_sample=8)
        with pytest.raises(DataError, match="dp_rank=2"):
            loader.client(2)
        longer = data_job(job.data.sources, sequence_length=32, micro_batch_size=2, dp=2)
        with pytest.raises(DataError, match="different jobs"):
            LoaderClient(loader.socket_path, longer, RingRequest(1, 0, 1, 0), TIMEOUT_S)


@pytest.mark.parametrize(
    "data",
    [
        framing.encode({"kind": "release"}),
        framing.encode({"nothing": "known"}),
        framing.encode({"kind": "open", "version": 99}),
        framing.encode(
            {
                "kind": "open",
                "version": 1,
                "geometry": {},
                "dp_rank": "x",
                "reader": [],
                "readers": None,
            }
        ),
        (3).to_bytes(4, "little") + b"{{{",
    ],
    ids=["release first", "no kind", "other version", "wrong types", "not JSON"],
)
def test_a_peer_that_sends_nonsense_is_refused_and_the_others_are_served(
    start: StartLoader, job: JobConfig, data: bytes
) -> None:
    loader = start(job)
    with loader.client() as client:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(TIMEOUT_S)
            stranger.connect(str(loader.socket_path))
            stranger.sendall(data)
            answer = framing.receive(stranger)
            assert answer is None or answer[0]["kind"] == "error"
        assert_same(client.next_step(), expected_step(job, 0, 0))


def test_a_reader_that_releases_too_much_is_put_out(start: StartLoader, job: JobConfig) -> None:
    """Releasing a step that was never announced would let the loader overwrite what others read."""
    loader = start(job)
    with loader.client() as client:
        with contextlib.suppress(BrokenPipeError):  # it may be put out before the last of them
            for _ in range(20):
                framing.send(client._sock, {"kind": "release"})
        with pytest.raises(DataError, match="release of a step that was not announced"):
            for _ in range(30):
                client.next_step()


def test_a_truncated_file_is_refused_by_name(start: StartLoader, job: JobConfig) -> None:
    path = Path(job.data.sources[1].prefix + ".bin")
    path.write_bytes(path.read_bytes()[:-2])
    loader = start(job)
    with pytest.raises(CorpusError, match=r"sources\[\d\]\.prefix: .*prose\.bin: truncated"):
        loader.client()
    assert loader.rings() == 0


def test_a_token_outside_the_vocabulary_reaches_the_worker(
    start: StartLoader, tmp_path: Path
) -> None:
    prefix = write_corpus(tmp_path / "wide", [[1, 2, 3, 400] * 10], vocab_size=500)
    loader = start(data_job([DataSource(prefix=str(prefix))], vocab_size=300))
    with pytest.raises(CorpusError, match=r"model\.vocab_size: 300 .*wide has token id 400"):
        loader.client()
    until(lambda: loader.rings() == 0, "the rings are given back")


def record(prefix: Path, tokenizer: str = "", **changes: Any) -> None:
    """Write a record beside a corpus: made by bytes, or by the tokenizer file of that digest."""
    made = CorpusRecord(
        tokenizer_kind="bpe" if tokenizer else "bytes", tokenizer_sha256=tokenizer,
        end_token_id=0, vocab_size=20, highest_token_id=19, documents=30, tokens=0,
        identity=identity(prefix),
    )  # fmt: skip
    record_path(prefix).write_text(replace(made, **changes).to_json())


OURS, THEIRS = (hashlib.sha256(name.encode()).hexdigest() for name in ("ours", "theirs"))


def _missing(folder: Path) -> None:
    (folder / "held.bin").unlink()


def _wide(folder: Path) -> None:
    write_corpus(folder / "held", [[1, 300] * 40], vocab_size=400)


def _recorded_wide(folder: Path) -> None:
    record(folder / "held", OURS, highest_token_id=300, vocab_size=301)


def _other_tokenizer(folder: Path) -> None:
    record(folder / "held", THEIRS)


def _no_tokenizer(folder: Path) -> None:
    record(folder / "held")


def _other_corpus(folder: Path) -> None:
    record(folder / "held", OURS, identity="0" * 32)


def _damaged_record(folder: Path) -> None:
    record_path(folder / "held").write_text("{")


def _no_file(folder: Path) -> None:
    (folder / "t.json").unlink()


def _other_file(folder: Path) -> None:
    (folder / "t.json").write_text("theirs")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_missing, r"trainer\.evaluation\.sources\[0\]\.prefix: .*held\.bin: cannot be read"),
        (_wide, r"trainer\.model\.vocab_size: 257 is too small: .*held has token id 300"),
        (_recorded_wide, r"vocab_size: 257 is too small: .*held .* has token id 300"),
        (
            _other_tokenizer,
            rf"evaluation\.sources\[0\]\.prefix: .*{THEIRS[:12]}.*t\.json of SHA-256 {OURS[:12]}",
        ),
        (_no_tokenizer, r"evaluation\.sources\[0\]\.prefix: .* made by the tokenizer bytes"),
        (_other_corpus, r"held\.corpus\.json: is the record of another corpus"),
        (_damaged_record, r"held\.corpus\.json: is damaged"),
        (_no_file, r"trainer\.data\.tokenizer\.path: there is no file .*t\.json"),
        (_other_file, rf"trainer\.data\.tokenizer\.sha256: is {OURS}, and .* has {THEIRS}"),
    ],
)
def test_what_is_wrong_with_any_data_is_found_before_the_first_step(
    start: StartLoader, tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    for name in ("train", "held"):
        write_corpus(tmp_path / name, random_documents(1, 30, 40, vocab_size=20))
        record(tmp_path / name, OURS)
    (tmp_path / "t.json").write_text("ours")
    tokenizer = TokenizerConfig(kind="bpe", path=str(tmp_path / "t.json"), sha256=OURS)
    job = data_job([DataSource(prefix=str(tmp_path / "train"))])
    job = replace(
        job,
        data=replace(job.data, tokenizer=tokenizer),
        evaluation=EvaluationConfig(
            sources=(DataSource(prefix=str(tmp_path / "held")),), interval_steps=5
        ),
    )
    sound = start(job)
    sound.client().close()
    sound.held_out(dp_rank=0).close()
    spoil(tmp_path)
    spoilt = start(job)
    with pytest.raises(CorpusError, match=complaint):
        spoilt.client().close()
        spoilt.held_out(dp_rank=0).close()


def test_which_data_it_is_comes_with_the_ring(start: StartLoader, tmp_path: Path) -> None:
    prefixes = [
        write_corpus(tmp_path / f"{n}", random_documents(n, 30, 40, vocab_size=20))
        for n in range(2)
    ]
    sources = [DataSource(prefix=str(prefix), weight=1.00001) for prefix in prefixes]
    with start(data_job(sources)).client() as client:
        assert client.identities == tuple(map(identity, prefixes))
        assert client.blend_scheme == 1
    sources[0] = replace(sources[0], weight=3.00004)
    with start(data_job(sources)).client() as client:
        assert client.blend_scheme == 2
    grown = write_corpus(tmp_path / "grown", random_documents(0, 31, 40, vocab_size=20))
    edited = write_corpus(tmp_path / "edited", random_documents(9, 30, 40, vocab_size=20))
    assert len({*map(identity, [*prefixes, grown, edited])}) == 4


def test_the_socket_is_private_and_a_missing_loader_is_an_error_in_time(
    start: StartLoader, job: JobConfig
) -> None:
    loader = start(job)
    loader.client().close()
    assert stat.S_IMODE(loader.socket_path.stat().st_mode) == 0o600
    began = time.monotonic()
    with pytest.raises(DataError, match="no data loader is listening"):
        absent = loader.socket_path.with_name("absent.sock")
        LoaderClient(absent, job, RingRequest(0, 0, 1, 0), timeout_s=0.2)
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_an_idle_loader_sleeps(start: StartLoader, job: JobConfig) -> None:
    """A full ring must not cost the trainer's cores anything."""
    loader = start(job)
    with loader.client() as client:
        client.next_step()

        def sleeps() -> bool:
            before = cpu_ticks([loader.process.pid])
            time.sleep(0.5)
            return cpu_ticks([loader.process.pid]) - before <= 1

        until(sleeps, "the loader at rest")


def test_the_loader_imports_neither_torch_nor_services(job: JobConfig) -> None:
    program = (
        f"import sys, {LOADER}; absent = ('torch', 'grpc', 'google.protobuf', 'asyncio'); "
        "print([module for module in absent if module in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]"


def test_a_job_that_does_not_divide_is_refused_at_the_start(
    start: StartLoader, job: JobConfig
) -> None:
    odd = data_job(job.data.sources, global_batch_size=7, micro_batch_size=2, dp=2)
    loader = start(odd)
    _, errors = loader.process.communicate(timeout=CALL_TIMEOUT_S)
    assert loader.process.returncode == 2
    assert "trainer.training.global_batch_size=7 is not a multiple" in errors
    assert "Traceback" not in errors


def test_a_loader_replaces_a_dead_socket_but_not_a_live_one(
    start: StartLoader, job: JobConfig, tmp_path: Path
) -> None:
    loader = start(job)
    loader.client().close()
    command = [sys.executable, "-m", LOADER, "--config", str(tmp_path / "job.json"), "--socket"]
    command.append(str(loader.socket_path))
    second = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert "another loader listens on" in second.stderr
    loader.process.kill()
    loader.process.wait(timeout=CALL_TIMEOUT_S)
    assert loader.socket_path.exists()
    loader.process = subprocess.Popen(
        command, env=child_environment(), stderr=subprocess.PIPE, text=True
    )
    with loader.client() as client:
        assert_same(client.next_step(), expected_step(job, 0, 0))


def test_the_loader_dies_with_its_parent_and_leaves_no_memory(
    job: JobConfig, tmp_path: Path
) -> None:
    config, socket_path = tmp_path / "job.json", tmp_path / "data.sock"
    config.write_text(to_json(job))
    program = (
        "import subprocess, sys, time\n"
        "from megascale_common.node.process import child_environment\n"
        "arguments = ['--socket', sys.argv[1], '--config', sys.argv[2]]\n"
        f"command = [sys.executable, '-m', '{LOADER}', *arguments]\n"
        "print(subprocess.Popen(command, env=child_environment()).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(socket_path), str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        loader_pid = int(parent.stdout.readline())
        with LoaderClient(socket_path, job, RingRequest(0, 0, 1, 0), TIMEOUT_S) as client:
            client.next_step()
            parent.kill()
            deadline = time.monotonic() + TIMEOUT_S
            with pytest.raises(DataError, match="data loader has stopped"):
                while (
                    time.monotonic() < deadline
                ):  # it may serve on for the moment that its death takes
                    client.next_step()
    try:
        until_gone([loader_pid], "the loader")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(loader_pid, signal.SIGKILL)
    assert RING not in Path("/proc/self/maps").read_text(), "the last mapping of the ring is gone"


def test_held_out_data_is_another_stream_and_the_same_at_every_evaluation(
    start: StartLoader, job: JobConfig, tmp_path: Path
) -> None:
    held_out = DataSource(
        prefix=str(write_corpus(tmp_path / "held-out", random_documents(9, 50, 40)))
    )
    loader = start(
        replace(job, evaluation=EvaluationConfig(sources=(held_out,), interval_steps=5, batches=2))
    )
    expected = [
        expected_step(replace(job, data=replace(job.data, sources=(held_out,))), 1, first)
        for first in (0, GLOBAL_BATCH)
    ]
    with (
        loader.client(dp_rank=1, first_sample=GLOBAL_BATCH) as training,
        loader.held_out(dp_rank=1) as evaluation,
    ):
        for _ in range(3):
            for step in expected:
                assert_same(evaluation.next_step(), step)
        assert_same(training.next_step(), expected_step(job, 1, GLOBAL_BATCH))


def test_held_out_data_is_refused_where_the_job_has_none(
    start: StartLoader, job: JobConfig
) -> None:
    loader = start(job)
    with pytest.raises(DataError, match="the job has no evaluation data"):
        loader.held_out()
    with loader.client() as training:
        assert_same(training.next_step(), expected_step(job, 0, 0))
