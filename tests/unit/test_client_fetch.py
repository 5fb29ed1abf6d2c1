"""Fetching a checkpoint: a verified copy, all or nothing; damage is reported by file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.harness.scripted_driver import TOKEN, ScriptedDriver, start_driver

from megascale.v1 import driver_pb2
from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.commit import manifest as manifests
from megascale_client import AsyncClient, DamagedCheckpoint, MegascaleError, NotFound, NotPossible
from megascale_client import fetch as fetching

FILES = {"rank-00000.safetensors": b"zero" * 70_000, "rank-00001.safetensors": b"one" * 50_000}


@pytest.fixture
async def client(driver: ScriptedDriver) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(driver.address, TOKEN) as connected:
        yield connected


@pytest.fixture
async def driver(stored: Path) -> AsyncIterator[ScriptedDriver]:
    """A driver whose job has checkpoints of steps 8 (on storage) and 4 (removed from there)."""
    scripted = await start_driver()
    for step, folder in ((8, stored), (4, stored.with_name("gone"))):
        uri = f"{folder}/manifest.json"
        scripted.checkpoints.append(
            driver_pb2.Checkpoint(job="a", step=step, attempt=1, manifest_uri=uri)
        )
    yield scripted
    await scripted.server.stop(0)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A checkpoint as the daemon writes it."""
    folder = tmp_path / "storage" / "step 8"
    folder.mkdir(parents=True)
    files = []
    for rank, (name, data) in enumerate(FILES.items()):
        (folder / name).write_bytes(data)
        files.append(manifests.File(name, len(data), checksum(data), rank, "digest"))
    layout = {"tp": 2, "cp": 1, "dp": 1, "pp": 1}
    manifest = manifests.Manifest("a", 1, 8, 2, layout, tuple(files), {}, {}, manifests.now())
    (folder / "manifest.json").write_bytes(manifests.encode(manifest))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_the_newest_checkpoint_is_copied_whole(
    client: AsyncClient, stored: Path, tmp_path: Path
) -> None:
    reported: list[tuple[int, int]] = []
    got = await client.fetch_checkpoint(
        "a", to=tmp_path / "new" / "copy", progress=lambda *size: reported.append(size)
    )
    assert content(got.folder) == content(stored)
    assert got.folder == tmp_path / "new" / "copy"
    total = sum(map(len, FILES.values()))
    assert (got.job, got.step, got.size_bytes, got.verified) == ("a", 8, total, "checksums")
    assert (reported[0], reported[-1]) == ((0, total), (total, total))
    assert reported == sorted(reported)
    # The copy is a checkpoint as the original is.
    storage, manifest = manifests.load(f"{got.folder}/manifest.json")
    manifests.check_sizes(storage, manifest)


async def test_a_file_uri_is_an_address_too(
    client: AsyncClient, driver: ScriptedDriver, stored: Path, tmp_path: Path
) -> None:
    driver.checkpoints[0].manifest_uri = (
        stored / "manifest.json"
    ).as_uri()  # the blank in it is escaped
    (tmp_path / "empty").mkdir()
    assert content(
        (await client.fetch_checkpoint("a", tmp_path / "empty", step=8)).folder
    ) == content(stored)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank-00001.safetensors", cut, "149999 bytes where 150000"),
        ("rank-00001.safetensors", flip, "fails its checksum"),
        ("rank-00000.safetensors", Path.unlink, "is missing"),
        ("manifest.json", flip, "manifest.json"),
        ("manifest.json", cut, "is not a manifest"),
    ],
)
async def test_damage_is_refused_by_name_and_leaves_nothing(
    client: AsyncClient,
    stored: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    damage(stored / name)
    with pytest.raises(DamagedCheckpoint, match=message) as refused:
        await client.fetch_checkpoint("a", to=tmp_path / "out" / "copy")
    assert name in str(refused.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


async def test_without_xxhash_sizes_are_compared_and_the_result_has_that(
    client: AsyncClient, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    flip(stored / "rank-00001.safetensors")
    assert (await client.fetch_checkpoint("a", to=tmp_path / "copy")).verified == "sizes"
    cut(stored / "rank-00001.safetensors")
    with pytest.raises(DamagedCheckpoint, match="149999 bytes"):
        await client.fetch_checkpoint("a", to=tmp_path / "other")


async def test_a_manifest_cannot_point_outside_its_folder(
    client: AsyncClient, stored: Path, tmp_path: Path
) -> None:
    file = manifests.File("../secret", 1, checksum(b"x"), 0, "digest")
    manifest = manifests.Manifest("a", 1, 8, 1, {}, (file,), {}, {}, manifests.now())
    (stored / "manifest.json").write_bytes(manifests.encode(manifest))
    with pytest.raises(DamagedCheckpoint, match="outside"):
        await client.fetch_checkpoint("a", to=tmp_path / "copy")


async def test_what_cannot_be_fetched_has_a_reason(
    client: AsyncClient, driver: ScriptedDriver, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    cases: list[tuple[int | None, Path, type[MegascaleError], str]] = [
        (5, tmp_path / "copy", NotFound, "has those of steps 8, 4"),
        (4, tmp_path / "copy", NotPossible, "machine that sees it"),
        (8, tmp_path / "taken", NotPossible, "taken"),
        (8, Path("/proc/nowhere/copy"), NotPossible, "can write to"),
    ]
    for step, to, kind, message in cases:
        with pytest.raises(kind, match=message):
            await client.fetch_checkpoint("a", to, step=step)
    driver.checkpoints[0].manifest_uri = "s3://bucket/manifest.json"
    with pytest.raises(NotPossible, match="reads folders only"):
        await client.fetch_checkpoint("a", to=tmp_path / "copy")
    driver.checkpoints.clear()
    with pytest.raises(NotFound, match="no complete checkpoint yet"):
        await client.fetch_checkpoint("a", to=tmp_path / "copy")


async def test_a_cancelled_fetch_stops_and_leaves_nothing(
    client: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "CHUNK_BYTES", 1)
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def progress(done_bytes: int, total_bytes: int) -> None:
        loop.call_soon_threadsafe(started.set)

    fetch = asyncio.create_task(
        client.fetch_checkpoint("a", to=tmp_path / "out" / "copy", progress=progress)
    )
    await started.wait()
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"xxh3": "", "schema_version": 1, "files": "abc"}',
        b'{"xxh3": "", "schema_version": 1, "files": [{"path": 1, "size_bytes": 1, "xxh3": ""}]}',
        b'{"xxh3": "", "schema_version": 1, "files": [{"path": "a", "size_bytes": "", "xxh3": 1}]}',
    ],
)
async def test_a_manifest_without_meaning_is_damaged(
    client: AsyncClient, stored: Path, tmp_path: Path, data: bytes
) -> None:
    (stored / "manifest.json").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        await client.fetch_checkpoint("a", tmp_path / "copy")


async def test_a_manifest_larger_than_any_is_refused(
    client: AsyncClient, stored: Path, tmp_path: Path
) -> None:
    with (stored / "manifest.json").open("ab") as file:
        file.truncate(1 << 34)  # zeros that take no room on the disk
    limit = f"manifest.json: is no manifest: manifests have {fetching.MAX_MANIFEST_BYTES} bytes"
    with pytest.raises(DamagedCheckpoint, match=limit):
        await client.fetch_checkpoint("a", tmp_path / "copy")
    assert fetching.MAX_MANIFEST_BYTES == manifests.MAX_MANIFEST_BYTES


async def test_nothing_is_fetched_through_a_link(
    client: AsyncClient, driver: ScriptedDriver, stored: Path, tmp_path: Path
) -> None:
    inside = tmp_path / "job" / "attempts" / "attempt-000001"
    inside.mkdir(parents=True)
    (inside / "step-000000008").symlink_to(stored)
    driver.checkpoints[0].manifest_uri = f"{inside}/step-000000008/manifest.json"
    with pytest.raises(NotPossible, match="a symbolic link"):
        await client.fetch_checkpoint("a", tmp_path / "copy")
    (stored / "rank-00000.safetensors").rename(tmp_path / "moved")
    (stored / "rank-00000.safetensors").symlink_to(tmp_path / "moved")
    driver.checkpoints[0].manifest_uri = f"{stored}/manifest.json"
    with pytest.raises(NotPossible, match="a symbolic link"):
        await client.fetch_checkpoint("a", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
