"""One contract for every storage: a file system, an S3 server, an HDFS; each of them real.

The package of docs/how-to/add-a-storage-backend.md keeps it, too. S3 is moto's server, in a process
of its own (``make test-s3``; also part of ``make test``), and Ceph's radosgw (``make test-rgw``);
HDFS is a NameNode and a DataNode (``make test-hdfs``).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.harness import hdfs_server, rados_gateway
from tests.harness.checkpoint_node import TOKEN, DaemonProcess, WorkerClient
from tests.harness.command_line import command
from tests.harness.hdfs_server import HdfsServer
from tests.harness.installed_package import install
from tests.harness.rados_gateway import RadosGateway
from tests.harness.s3_server import BUCKET, S3Server
from tests.harness.scripted_driver import TOKEN as DRIVER_TOKEN
from tests.harness.scripted_driver import start_driver
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc, driver_pb2, types_pb2
from megascale_checkpoint import storage as storages
from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.save.write_limit import MIB
from megascale_checkpoint.storage import Storage, join, open_storage, settle
from megascale_client import AsyncClient, DamagedCheckpoint
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import RequestError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-storage-backend.md"
S3 = pytest.param("s3", marks=pytest.mark.s3)
RGW = pytest.param("rgw", marks=pytest.mark.rgw)
HDFS = pytest.param("hdfs", marks=pytest.mark.hdfs)
LIMIT_S = 30.0  # for an error about a server that does not answer


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("boto3")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rgw_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    pytest.importorskip("boto3")
    if reason := rados_gateway.missing():
        pytest.skip(reason)
    server = RadosGateway(tmp_path_factory.mktemp("rgw"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsServer]:
    pytest.importorskip("hdfs_native")
    if reason := hdfs_server.missing():
        pytest.skip(reason)
    server = HdfsServer(tmp_path_factory.mktemp("hdfs"))
    yield server
    server.stop()


@pytest.fixture
def s3_settings(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages, on the import path of this process and of those that it starts."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    for name in ("acme_storage", "other_storage"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def install_example(site: Path) -> None:
    """Install the package of the page."""
    text = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (name,) = re.findall(r"^sqlite = \"acme_storage:(\w+)\"$", text, re.MULTILINE)
    install(site, "acme-storage", code, {"sqlite": name}, storages.GROUP)


@pytest.fixture(params=["file", "page", S3, RGW, HDFS])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty root."""
    name = uuid.uuid4().hex
    if request.param == "file":
        return f"file://{tmp_path}/{name}"
    if request.param == "page":
        install_example(request.getfixturevalue("site"))
        return f"sqlite://{tmp_path}/{name}.db/job"
    if request.param == "s3":
        request.getfixturevalue("s3_settings")
        # A real server takes parts of 5 MiB and more.
        monkeypatch.setattr("megascale_checkpoint.storage.s3.PART_BYTES", 5 * MIB)
        return f"s3://{BUCKET}/{name}/job"
    if request.param == "rgw":
        gateway: RadosGateway = request.getfixturevalue("rgw_server")
        for key, value in gateway.environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("megascale_checkpoint.storage.s3.PART_BYTES", 5 * MIB)
        return f"s3://{BUCKET}/{name}/job"
    server: HdfsServer = request.getfixturevalue("hdfs")
    return f"{server.uri}/{name}/job"


@pytest.fixture
def storage(uri: str) -> Storage:
    return open_storage(uri)


def large(size_bytes: int) -> Iterator[bytes]:
    """Chunks of odd sizes, of which the last is short."""
    chunk = bytes(range(256)) * 4099
    for offset in range(0, size_bytes, len(chunk)):
        yield chunk[: size_bytes - offset]


def test_files_are_read_as_they_were_written(storage: Storage) -> None:
    assert storage.names("") == [] and storage.names("a") == []
    assert storage.write("a/one", [b"whole", memoryview(b" thing")]) == 11
    assert storage.write("a/empty", []) == 0
    assert storage.create("a/b/two", b"2") and storage.create("three", b"3")
    assert storage.read("a/one") == b"whole thing" and storage.read("a/empty") == b""
    assert [storage.size(path) for path in ("a/one", "a/empty", "a/none")] == [11, 0, None]
    assert storage.names("") == ["a", "three"]
    assert storage.names("a") == ["b", "empty", "one"]
    assert storage.names("a", after="b") == ["empty", "one"] and storage.names("a", "one") == []
    with pytest.raises(FileNotFoundError):
        storage.read("a/none")


def test_large_files_are_written_in_pieces(storage: Storage) -> None:
    size = 12 * MIB + 345
    assert storage.write("large", large(size)) == size == storage.size("large")
    assert storage.read("large") == b"".join(large(size))
    with pytest.raises(FileExistsError):
        storage.write("large", large(11 * MIB))
    assert storage.size("large") == size
    storage.create("small", b"1")
    with pytest.raises(FileExistsError):
        storage.write("small", large(11 * MIB))
    assert storage.read("small") == b"1" and storage.names("") == ["large", "small"]


def test_parts_are_read_into_memory(storage: Storage) -> None:
    storage.create("file", b"0123456789")
    target = memoryview(bytearray(4))
    assert storage.read_into("file", 3, target) == 4 and bytes(target) == b"3456"
    assert storage.read_into("file", 8, target) == 2 and bytes(target) == b"8956"
    assert storage.read_into("file", 10, target) == 0 == storage.read_into("file", 99, target)
    with pytest.raises(FileNotFoundError):
        storage.read_into("none", 0, target)


def test_exactly_one_creator_wins(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: storage.create("log/1", b"%d" % number), range(24)))
    assert won.count(True) == 1
    assert storage.read("log/1") == b"%d" % won.index(True)
    with pytest.raises(FileExistsError):
        storage.write("log/1", [b"other"])
    assert storage.names("log") == ["1"]


def test_exactly_one_writer_of_a_large_file_wins(storage: Storage) -> None:
    def write(number: int) -> bool:
        try:
            storage.write("a/file", [bytes([number]) * (6 * MIB)])
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(write, range(4)))
    assert won.count(True) == 1
    assert storage.read("a/file") == bytes([won.index(True)]) * (6 * MIB)
    assert storage.names("a") == ["file"]


def test_a_failed_write_leaves_the_name_free(storage: Storage) -> None:
    def chunks(size_bytes: int) -> Iterator[bytes]:
        yield from large(size_bytes)
        raise RuntimeError("the worker is gone")

    for size in (4, 11 * MIB):
        with pytest.raises(RuntimeError, match="worker is gone"):
            storage.write("a/file", chunks(size))
    assert storage.names("a") == [] and storage.size("a/file") is None
    assert storage.remove_unfinished("a") == 0
    assert storage.create("a/file", b"whole")


def test_a_writer_whose_files_are_removed_fails(storage: Storage) -> None:
    begun, removed = Event(), Event()

    def chunks() -> Iterator[bytes]:
        yield from large(6 * MIB)
        begun.set()
        assert removed.wait(CALL_TIMEOUT_S)
        yield from large(6 * MIB)

    storage.create("a/whole", b"1")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(storage.write, "a/file", chunks())
        assert begun.wait(CALL_TIMEOUT_S)
        assert storage.names("a") == ["whole"]
        assert storage.remove_unfinished("a") == 1
        removed.set()
        with pytest.raises(OSError):
            writing.result()
    assert storage.names("a") == ["whole"] and storage.remove_unfinished("a") == 0
    assert storage.remove_unfinished("none") == 0


def test_what_is_deleted_is_gone(storage: Storage) -> None:
    storage.create("a/b/file", b"1")
    with pytest.raises(OSError):
        storage.delete("a")
    with pytest.raises(OSError):
        storage.delete("a/b")
    assert storage.delete("a/b/file") and not storage.delete("a/b/file")
    assert storage.size("a/b/file") is None and storage.names("a/b") == []
    storage.delete("a/b")
    assert storage.names("a") == []
    assert storage.create("a/b/file", b"2") and storage.read("a/b/file") == b"2"


def test_an_unknown_outcome_is_settled(storage: Storage) -> None:
    assert not storage.confirm("record", b"mine")
    assert settle(storage, "record", b"mine") and settle(storage, "record", b"mine")
    assert storage.confirm("record", b"mine") and not storage.confirm("record", b"other")
    assert not settle(storage, "record", b"other") and storage.read("record") == b"mine"


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", "a//b", "."])
def test_paths_stay_below_the_root(storage: Storage, path: str) -> None:
    for verb in (storage.read, storage.size, storage.delete):
        with pytest.raises(RequestError, match="does not stay below"):
            verb(path)


def test_a_check_leaves_nothing(storage: Storage) -> None:
    storage.check()
    assert storage.names("") == []
    storage.create("x", b"1")
    storage.check()
    assert storage.names("") == ["x"]


def test_an_address_below_the_root_is_a_root(uri: str, storage: Storage) -> None:
    storage.create("a/b c/file", b"1")
    below = open_storage(join(storage.uri, "a"))
    assert below.read("b c/file") == b"1"
    assert open_storage(below.uri).names("") == ["b c"]
    assert open_storage(f"{uri}/").names("") == ["a"]


async def test_a_job_commits_and_another_node_restores(uri: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(DaemonProcess(tmp_path, "n0"))
        await open_attempt(first, uri, 1)
        worker = stack.enter_context(WorkerClient(first))
        worker.register(uri=uri, committer=first.address)
        for step in (10, 20):
            assert worker.write(step)["kind"] == "sealed"
            assert worker.drain(step) == {"kind": "drained", "committed_step": step}
        second = stack.enter_context(DaemonProcess(tmp_path, "n1"))
        opened = await open_attempt(second, uri, 2)
        assert (opened.restore.step, opened.restore.written_by_attempt) == (20, 1)
        other = stack.enter_context(WorkerClient(second))
        other.register(uri=uri, committer=second.address, attempt=2)
        answer = other.restore("storage", 20, 1, opened.restore.manifest_uri)
        assert answer["kind"] == "restored" and other.holds(answer["slot"], 20)
    done = command("checkpoint", "verify", uri)
    assert done.status == 0, done.text
    assert "step 20 of attempt 1: whole" in done.stdout


async def test_a_job_keeps_what_its_rules_say(uri: str, tmp_path: Path) -> None:
    storage = open_storage(uri)
    storage.create("attempts/attempt-000001/step-000000005/rank-00001.safetensors", b"given up")
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
        await open_attempt(daemon, uri, 1, keep_latest=2)
        worker = stack.enter_context(WorkerClient(daemon))
        worker.register(uri=uri, committer=daemon.address)
        for step in (10, 20, 30, 40):
            assert worker.write(step)["kind"] == "sealed"
            assert worker.drain(step)["committed_step"] == step
            if step == 10:
                done = command("checkpoint", "pin", uri, "--step", "10", "--reason", "the first")
                assert done.status == 0, done.text
        kept = [f"step-{step:09d}" for step in (10, 30, 40)]
        folder = "attempts/attempt-000001"
        await eventually(lambda: storage.names(folder) == kept, f"the rest of {kept} to go")
    listed = command("checkpoint", "list", uri, "--json").objects
    assert [(each["step"], each["pin"]) for each in listed] == [
        (40, ""),
        (30, ""),
        (10, "the first"),
    ]
    assert command("checkpoint", "verify", uri).status == 0
    shown = command("checkpoint", "gc", uri, "--keep-latest", "1")
    assert "step 30 of attempt 1" in shown.stdout and "step 10" not in shown.stdout, shown.text
    assert command("checkpoint", "gc", uri, "--keep-latest", "1", "--yes").status == 0
    assert storage.names(folder) == [f"step-{step:09d}" for step in (10, 40)]


async def test_a_checkpoint_is_fetched_from_any_storage(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megascale_client.fetch.CHUNK_BYTES", MIB)
    files = {f"rank-{rank:05d}.safetensors": os.urandom(2 * MIB + rank) for rank in range(2)}
    listed = []
    for rank, (name, data) in enumerate(files.items()):
        storage.write(f"step/{name}", [data])
        listed.append(manifests.File(name, len(data), checksum(data), rank, "digest"))
    manifest = manifests.Manifest("a", 1, 8, 2, {}, tuple(listed), {}, {}, manifests.now())
    files["manifest.json"] = manifests.encode(manifest)
    assert storage.create("step/manifest.json", files["manifest.json"])
    driver = await start_driver()
    uri = f"{storage.uri}/step/manifest.json"
    driver.checkpoints.append(driver_pb2.Checkpoint(job="a", step=8, attempt=1, manifest_uri=uri))
    try:
        async with AsyncClient(driver.address, DRIVER_TOKEN) as client:
            fetch = functools.partial(client.fetch_checkpoint, "a", open_source=open_storage)
            got = await fetch(to=tmp_path / "copy")
            assert (got.verified, got.size_bytes) == ("checksums", 4 * MIB + 1)
            found = {path.name: path.read_bytes() for path in got.folder.iterdir()}
            assert found == files
            storage.delete("step/rank-00001.safetensors")
            with pytest.raises(DamagedCheckpoint, match=r"rank-00001\.safetensors: is missing"):
                await fetch(to=tmp_path / "other")
            assert not (tmp_path / "other").exists()
    finally:
        await driver.server.stop(0)


async def open_attempt(
    daemon: DaemonProcess, uri: str, attempt: int, keep_latest: int = 0
) -> checkpoint_pb2.OpenAttemptResponse:
    request = checkpoint_pb2.OpenAttemptRequest(
        job="job",
        uri=uri,
        attempt=attempt,
        world_size=1,
        epoch=types_pb2.Epoch(create_revision=1),
        keep_latest=keep_latest,
    )
    async with open_channel(daemon.address, TOKEN) as channel:
        stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        return await stub.OpenAttempt(request, timeout=CALL_TIMEOUT_S)


def refusal(uri: str) -> tuple[BaseException, float]:
    """What check() raises for a URI, and how long it takes."""
    begun_s = time.monotonic()
    with pytest.raises((OSError, RequestError)) as caught:
        open_storage(uri).check()
    return caught.value, time.monotonic() - begun_s


def test_an_unknown_scheme_is_refused_with_those_that_are_known(site: Path) -> None:
    install_example(site)
    error, _ = refusal("gs://bucket/x")
    assert isinstance(error, RequestError) and error.fields[0][0] == "checkpoint.uri"
    assert "(known: file, hdfs, s3, sqlite)" in str(error) and storages.GROUP in str(error)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(3)", "cannot be imported (SystemExit: 3)"),
        ("class Other: ...", "cannot be imported (AttributeError"),
        ("class Store:\n    def __init__(self, uri): ...", "lacks check, write"),
        (
            "from megascale_checkpoint.storage.file import FileStorage\n"
            "class Store(FileStorage):\n    def __init__(self, uri): 1 / 0",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_named_with_a_remedy(
    site: Path, code: str, words: str
) -> None:
    install(site, "other-storage", code, {"other": "Store"}, storages.GROUP)
    error, _ = refusal("other://x/y")
    assert isinstance(error, RequestError) and words in str(error)
    assert ("package other-storage" in str(error) and "repair" in str(error)) or "class" in str(
        error
    )


def test_of_two_packages_with_one_scheme_none_is_used_and_ours_cannot_be_replaced(
    site: Path,
) -> None:
    for package in ("other-storage", "second-storage"):
        install(
            site, package, "class Store: ...", {"other": "Store", "s3": "Store"}, storages.GROUP
        )
    error, _ = refusal("other://x/y")
    assert "other_storage:Store, second_storage:Store" in str(error)
    assert storages.find("s3").__module__ == "megascale_checkpoint.storage.s3"


@pytest.mark.parametrize("scheme", ["s3", "hdfs"])
def test_an_absent_package_names_the_extra(scheme: str) -> None:
    code = (
        "import sys\n"
        "sys.modules['boto3'] = sys.modules['hdfs_native'] = None\n"
        "from megascale_checkpoint.storage import open_storage\n"
        "from megascale_common.service.errors import RequestError\n"
        f"try: open_storage('{scheme}://bucket/x')\n"
        "except RequestError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'megascale[{scheme}]'" in done.stdout
    assert "checkpoint.uri" in done.stdout


async def test_a_job_writes_no_faster_than_its_limit(tmp_path: Path) -> None:
    values = 512 * 1024  # of 4 bytes
    piece = ShardPiece(
        "large", "master", "float32", (values,), (0,), (values,), 0, values, 0, primary=True
    )
    uri, layout = str(tmp_path / "checkpoints"), ShardLayout((piece,), values * 4)
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
        await open_attempt(daemon, uri, 1)
        worker = stack.enter_context(WorkerClient(daemon))
        limit: dict[str, Any] = {"uri": uri, "committer": daemon.address, "layout": layout}
        refused = worker.register(**limit, max_write_mib_per_s=-1.0)
        assert "register.max_write_mib_per_s is -1.0" in refused["error"]
        worker = stack.enter_context(WorkerClient(daemon))
        worker.register(**limit, max_write_mib_per_s=4.0)
        begun_s = time.monotonic()
        worker.write(1)
        assert worker.drain(1)["committed_step"] == 1
        # 2 MiB at 4 MiB/s, less what may come at once; a busy machine takes longer.
        assert time.monotonic() - begun_s >= 0.25


async def test_a_daemon_writes_slower_while_steps_are_slow_beside_it(tmp_path: Path) -> None:
    """A worker reports steps that are slow beside writes, then some that are not any more."""
    values = 12 << 20  # of 4 bytes
    piece = ShardPiece(
        "large", "master", "float32", (values,), (0,), (values,), 0, values, 0, primary=True
    )
    uri, layout = str(tmp_path / "checkpoints"), ShardLayout((piece,), values * 4)
    metrics = ("--metrics-bind", "127.0.0.1:0", "--metrics-address-file", str(tmp_path / "metrics"))
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(tmp_path, "n0", arguments=metrics))
        await open_attempt(daemon, uri, 1)
        worker = stack.enter_context(WorkerClient(daemon))
        settings: dict[str, Any] = {"uri": uri, "committer": daemon.address, "layout": layout}
        worker.register(**settings, max_write_mib_per_s=16.0, max_step_slowdown=0.05)
        steps = itertools.count(1)

        def limit() -> float:
            url = f"http://{(tmp_path / 'metrics').read_text().strip()}/metrics"
            text = urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S).read().decode()
            found = re.search(r'write_limit_bytes_per_second{job="job"} (\S+)', text)
            return float(found[1]) if found else 0.0

        async def report(time_s: float) -> bool:
            await asyncio.sleep(0.02)
            pace = worker.ask("step_time", step=next(steps), time_s=time_s)
            assert pace["kind"] == "pace"
            return bool(pace["persisting"])

        def written(step: int) -> int:
            """The state that is written now: the next one, where the machine stood still for so
            long that this one is complete."""
            complete = worker.drain(step, timeout_s=0.0)["committed_step"] == step
            begun = complete and worker.write(step + 1)["kind"] == "sealed"
            return step + 1 if begun else step

        for _ in range(6):
            assert not await report(0.01)
        await eventually(lambda: worker.write(1)["kind"] == "sealed", "a slot for the state")
        state, persisting, reported_s = 1, False, time.monotonic()
        for _ in range(500):
            # On a busy machine as long as it was: what was written is divided by it. So long that
            # what the bucket gives at once (BURST_S) is a small part of a window.
            took_s = time.monotonic() - reported_s
            persisting = await report(max(0.2 if persisting else 0.01, took_s))
            reported_s = time.monotonic()
            if lowered := limit():
                break
            state = written(state)
        assert persisting and 0 < lowered < 16 * MIB
        for _ in range(500):
            persisting = await report(0.01)
            if not limit():
                break
            state = written(state)
        assert persisting and not limit(), "raised again, while a file is written"
        assert worker.drain(state)["committed_step"] == state
        refused = worker.ask("step_time", step=0, time_s=1.0)
        assert "step_time.step is 0" in refused["error"]


async def asked(daemon: DaemonProcess, uri: str) -> str:
    """Reason and text of what CheckStorage answers; "" where the storage can be used."""
    async with open_channel(daemon.address, TOKEN) as channel:
        stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        try:
            request = checkpoint_pb2.CheckStorageRequest(uri=uri)
            await stub.CheckStorage(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
    return ""


@pytest.mark.s3
class TestS3:
    async def test_a_storage_is_tried_before_a_job_trains(
        self, s3_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a node's daemon, for the driver; when an attempt opens; and in `megascale plan`."""
        job = tmp_path / "job.yaml"
        text = (
            "name: a\ntrainer:\n  model: {layers: 2, hidden_size: 64, heads: 4, vocab_size: 259}\n"
        )

        def plan(uri: str, *options: str) -> str:
            job.write_text(f"{text}checkpoint: {{uri: '{uri}'}}\n")
            return command("plan", job, *options).stdout

        absent = "checkpoint.uri: there is no bucket other-bucket"
        assert f"refused {absent}" in plan("s3://other-bucket/x")
        assert absent not in plan("s3://other-bucket/x", "--offline")
        assert "checkpoint.uri" not in plan(f"s3://{BUCKET}/x")
        assert "--offline" in plan("hdfs://127.0.0.1:1/x")
        with DaemonProcess(tmp_path, "n0") as daemon:
            assert await asked(daemon, f"s3://{BUCKET}/x") == ""
            assert (await asked(daemon, "s3://other-bucket/x")).startswith(
                f"INVALID_ARGUMENT {absent}"
            )
            assert (await asked(daemon, "gs://x/y")).startswith("INVALID_ARGUMENT checkpoint.uri")
            with pytest.raises(grpc.aio.AioRpcError, match=absent):
                await open_attempt(daemon, "s3://other-bucket/x", 1)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        with DaemonProcess(tmp_path, "n1") as daemon:
            answer = await asked(daemon, f"s3://{BUCKET}/x")
            assert answer.startswith("PERMISSION_DENIED") and "AWS_ACCESS_KEY_ID" in answer

    async def test_a_server_without_conditional_writes_is_refused_before_a_job_trains(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = S3Server(tmp_path, unconditional=("PUT", "POST"))
        try:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            uri = f"s3://{BUCKET}/x"
            error, _ = refusal(uri)
            assert isinstance(error, RequestError) and "ignores If-None-Match" in str(error)
            assert open_storage(uri).names("") == []
            with DaemonProcess(tmp_path, "n0") as daemon:
                with pytest.raises(grpc.aio.AioRpcError, match="ignores If-None-Match"):
                    await open_attempt(daemon, uri, 1)
        finally:
            server.stop()

    def test_uploads_that_would_complete_over_an_object_take_its_name_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server such as Ceph's: its conditions are for single objects alone."""
        s3 = importlib.import_module("megascale_checkpoint.storage.s3")
        monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
        server = S3Server(tmp_path, unconditional=("POST",))
        try:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            storage = open_storage(f"s3://{BUCKET}/x")
            storage.check()
            assert storage.create("taken", b"first")
            with pytest.raises(FileExistsError):
                storage.write("taken", large(6 * MIB))
            assert storage.read("taken") == b"first"
            assert storage.write("large", large(6 * MIB)) == 6 * MIB
            with pytest.raises(FileExistsError):
                storage.write("large", large(11 * MIB))
            assert storage.size("large") == 6 * MIB
            # An upload that fails at its end gives the name back.
            complete = s3.S3Storage._complete

            def broken(self: object, key: str, upload: str, parts: list[dict[str, Any]]) -> None:
                complete(self, key, upload, [{"PartNumber": 9, "ETag": "none"}])

            monkeypatch.setattr(s3.S3Storage, "_complete", broken)
            with pytest.raises(OSError):
                storage.write("failed", large(6 * MIB))
            assert storage.size("failed") is None and storage.names("") == ["large", "taken"]
        finally:
            server.stop()

    def test_a_server_that_is_down_is_a_matter_of_time(
        self, s3_settings: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        error, duration_s = refusal("s3://bucket/x")
        assert isinstance(error, OSError) and not isinstance(error, PermissionError)
        assert "s3://bucket/x" in str(error) and "AWS_ENDPOINT_URL" in str(error)
        assert duration_s < LIMIT_S

    def test_a_bucket_that_is_not_there_is_named_with_its_field(self, s3_settings: None) -> None:
        error, _ = refusal("s3://other-bucket/x")
        assert isinstance(error, RequestError)
        assert "checkpoint.uri: there is no bucket other-bucket" in str(error)
        assert "create it" in str(error) and error.fields[0][0] == "checkpoint.uri"

    def test_without_credentials_the_remedy_names_them(
        self, s3_settings: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        error, _ = refusal(f"s3://{BUCKET}/x")
        assert isinstance(error, PermissionError) and "AWS_ACCESS_KEY_ID" in str(error)

    def test_without_rights_the_remedy_names_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = S3Server(tmp_path, checks_rights=True)
        try:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            error, _ = refusal(f"s3://{BUCKET}/x")
        finally:
            server.stop()
        assert isinstance(error, PermissionError) and "s3:PutObject" in str(error)

    def test_credentials_of_a_file_are_used(
        self, s3_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        file = tmp_path / "credentials"
        file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        open_storage(f"s3://{BUCKET}/of-a-file").check()

    def test_the_server_encrypts_by_setting(
        self, s3_server: S3Server, s3_settings: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MEGASCALE_S3_SSE", "aws:kms")
        monkeypatch.setenv("MEGASCALE_S3_SSE_KMS_KEY_ID", "a-key")
        monkeypatch.setattr("megascale_checkpoint.storage.s3.PART_BYTES", 5 * MIB)
        storage = open_storage(f"s3://{BUCKET}/encrypted")
        storage.create("small", b"1")
        storage.write("large", large(6 * MIB))
        for name in ("small", "large"):
            head = s3_server.client().head_object(Bucket=BUCKET, Key=f"encrypted/{name}")
            assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "a-key")
        monkeypatch.setenv("MEGASCALE_S3_SSE", "rot13")
        with pytest.raises(RequestError, match="give AES256 or aws:kms"):
            open_storage(f"s3://{BUCKET}/encrypted")

    def test_parts_grow_so_that_a_file_reaches_the_limit_of_s3(self) -> None:
        s3 = importlib.import_module("megascale_checkpoint.storage.s3")
        sizes = [s3.part_bytes(number) for number in range(1, s3.MAX_PARTS + 1)]
        assert sum(sizes) >= 5 * 2**40, "the largest object that S3 takes"
        assert sizes[0] == 32 * MIB and max(sizes) <= 5 * 2**30, "S3 takes no larger part"
        # What is in memory: the parts on their way, and the one that is filled.
        file_bytes = 0
        for size in sizes:
            file_bytes += size
            held = (s3.parallel_parts(size) + 1) * size
            assert held <= max(160 * MIB, file_bytes / 100)

    def test_a_file_of_parts_that_grow_is_what_was_written(
        self, s3_server: S3Server, s3_settings: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("megascale_checkpoint.storage.s3.PART_BYTES", 5 * MIB)
        monkeypatch.setattr("megascale_checkpoint.storage.s3.PARTS_OF_A_SIZE", 2)
        name = uuid.uuid4().hex
        storage = open_storage(f"s3://{BUCKET}/{name}")
        written = b"".join(bytes(chunk) for chunk in large(33 * MIB))
        assert storage.write("large", iter([written])) == len(written)
        assert storage.read("large") == written
        etag = s3_server.client().head_object(Bucket=BUCKET, Key=f"{name}/large")["ETag"]
        assert etag.strip('"').endswith("-5"), "5, 5, 10, 10 and 3 MiB"

    def test_a_write_whose_reply_was_lost_is_known_as_ones_own(
        self, s3_settings: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server has carried out each request when the connection breaks; boto3 repeats it."""
        import botocore.httpsession
        from botocore.exceptions import ConnectionClosedError

        monkeypatch.setattr("megascale_checkpoint.storage.s3.PART_BYTES", 5 * MIB)
        storage = open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}")
        send = botocore.httpsession.URLLib3Session.send
        lost: set[str] = set()

        def lossy(self: object, request: object) -> object:
            answer = send(self, request)
            method, url = request.method, request.url  # type: ignore[attr-defined]
            final = method == "POST" and "uploadId=" in url
            if ((method == "PUT" and "partNumber" not in url) or final) and url not in lost:
                lost.add(url)
                raise ConnectionClosedError(endpoint_url=url)
            return answer

        monkeypatch.setattr(botocore.httpsession.URLLib3Session, "send", lossy)
        assert storage.create("record", b"mine")
        assert storage.write("large", large(6 * MIB)) == 6 * MIB
        assert len(lost) == 2
        assert not storage.create("record", b"other")


@pytest.mark.hdfs
class TestHdfs:
    def test_a_server_that_is_down_is_a_matter_of_time(self, hdfs: HdfsServer) -> None:
        error, duration_s = refusal("hdfs://127.0.0.1:1/x")
        assert isinstance(error, OSError) and not isinstance(error, PermissionError)
        assert "hdfs://127.0.0.1:1/x" in str(error) and "NameNode" in str(error)
        assert duration_s < LIMIT_S

    def test_a_server_that_hangs_is_a_matter_of_time(self, hdfs: HdfsServer) -> None:
        storage = open_storage(f"{hdfs.uri}/hangs")
        storage.create("file", b"1")
        with hdfs.stopped():
            begun_s = time.monotonic()
            with pytest.raises(TimeoutError, match="does not answer within"):
                storage.size("file")
            assert time.monotonic() - begun_s < LIMIT_S
        assert storage.size("file") == 1

    def test_without_rights_the_remedy_names_the_user(
        self, hdfs: HdfsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        open_storage(f"{hdfs.uri}/owned").create("file", b"1")
        monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
        error, _ = refusal(f"{hdfs.uri}/owned")
        assert isinstance(error, PermissionError) and "HADOOP_USER_NAME" in str(error)
        assert open_storage(f"{hdfs.uri}/owned").read("file") == b"1"

    def test_a_cluster_that_no_configuration_has_is_refused(self, hdfs: HdfsServer) -> None:
        error, _ = refusal("hdfs://nowhere/x")
        assert "HADOOP_CONF_DIR" in str(error) or "check host and port" in str(error)
