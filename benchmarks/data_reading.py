"""What data costs a node: an index of many documents, and one loader beside one for each rank.

    python benchmarks/data_reading.py index --documents 1e5,1e6,1e7,1e8     # 2 GB in --folder
    python benchmarks/data_reading.py loaders --ranks 8 --steps 50

``index`` writes corpora of so many documents of 500 tokens (the tokens themselves are a hole in the
file), each read in a process of its own: the time to open it and to the first sample, the time of
further samples at random positions, and the process's own memory. ``loaders`` runs the node's
loader with R readers of one data-parallel rank (tensor and pipeline ranks), then R loaders with one
reader each: bytes of the corpus that are copied into batches, bytes that came from storage, memory
that is not shared, processor time. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megascale_common.node.process import child_environment
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted, to_json
from megascale_trainer.data.client import LoaderClient, RingRequest
from megascale_trainer.data.indexed import HEADER, MAGIC, VERSION, bin_path, idx_path
from megascale_trainer.data.packing import SampleStream

_TOKENS, _ITEM_BYTES, _CHUNK = 500, 2, 1 << 20
_SAMPLES = 2000
_SEQUENCE = 2048
_WAIT_S = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("index", "loaders", "one"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--documents", default="1e4,1e5")
    parser.add_argument("--shuffle", default="samples,documents")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.what == "one":
        print(json.dumps(_read_alone(str(options.folder), options.shuffle)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.what == "index":
            counts = [int(float(count)) for count in options.documents.split(",")]
            found = [
                {"documents": count, **row}
                for count in counts
                for row in _index(Path(folder) / f"{count}", count, options.shuffle.split(","))
            ]
        else:
            found = _loaders(Path(folder), options.ranks, options.steps)
    for row in found:
        print(json.dumps(row), file=sys.stderr)
    print(json.dumps({"rows": found}))
    return 0


def _write(prefix: Path, documents: int) -> None:
    """An index, chunk by chunk, and tokens that are all 0."""
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for part in (_chunks(documents, "<i4", 0, _TOKENS), _chunks(documents, "<i8", 1000, 0)):
            for chunk in part:
                chunk.tofile(file)
        for chunk in _chunks(documents + 1, "<i8", 1, 0):
            chunk.tofile(file)
    with bin_path(prefix).open("wb") as file:
        file.truncate(documents * _TOKENS * _ITEM_BYTES)


def _chunks(count: int, dtype: str, slope: int, constant: int) -> Any:
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        yield (np.arange(start, stop, dtype=np.int64) * slope + constant).astype(dtype)


def _job(prefix: str, shuffle: str = "samples") -> JobConfig:
    return from_accepted(
        {
            "name": "data",
            "model": {
                "layers": 1,
                "hidden_size": 64,
                "heads": 1,
                "vocab_size": 65_536,
                "sequence_length": _SEQUENCE,
            },
            "training": {"steps": 1000, "global_batch_size": 32},
            "data": {"sources": [{"prefix": prefix}], "shuffle": shuffle},
        }
    )


def _index(prefix: Path, documents: int, shuffles: list[str]) -> list[dict[str, Any]]:
    _write(prefix, documents)
    rows = []
    for shuffle in shuffles:
        command = [sys.executable, __file__, "one", "--folder", str(prefix), "--shuffle", shuffle]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1] if done.returncode == 0 else ""
        problem = {"problem": f"exit status {done.returncode}: {done.stderr[-200:]}"}
        rows.append({"shuffle": shuffle, **(json.loads(last) if last else problem)})
    for path in (bin_path(prefix), idx_path(prefix)):
        path.unlink()
    return rows


def _read_alone(prefix: str, shuffle: str) -> dict[str, Any]:
    """In a process of its own: times, and anonymous memory beside that at the start."""
    before = _status_kib("RssAnon")
    begin = time.perf_counter()
    stream = SampleStream.open(_job(prefix, shuffle))
    opened = time.perf_counter()
    stream.sample(0)
    first = time.perf_counter()
    # Of the first epoch: another order of documents would be made for each epoch.
    epoch = bin_path(prefix).stat().st_size // _ITEM_BYTES // _SEQUENCE
    numbers = np.random.default_rng(1).integers(0, epoch, _SAMPLES).tolist()
    times = []
    for number in numbers:
        start = time.perf_counter()
        stream.sample(number)
        times.append(time.perf_counter() - start)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "open_s": round(opened - begin, 4),
        "first_sample_s": round(first - opened, 4),
        "sample_us_median": round(1e6 * float(np.median(times)), 1),
        "sample_us_p99": round(1e6 * float(np.quantile(times, 0.99)), 1),
        "own_memory_mib": round((_status_kib("RssAnon") - before) / 1024, 1),
        "peak_rss_mib": round(peak_kib / 1024, 1),
    }


def _status_kib(name: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _loaders(folder: Path, ranks: int, steps: int) -> list[dict[str, Any]]:
    """One loader with ``ranks`` readers, and ``ranks`` loaders with one, of equal data."""
    prefix = folder / "corpus"
    _write(prefix, 100_000)
    tokens = np.random.default_rng(2).integers(0, 60_000, 100_000 * _TOKENS, dtype=np.uint16)
    tokens.tofile(bin_path(prefix))
    rows = []
    for loaders in (1, ranks):
        _forget_cache(bin_path(prefix))
        rows.append({"loaders": loaders, "readers": ranks, **_run(folder, loaders, ranks, steps)})
    return rows


def _forget_cache(path: Path) -> None:
    """Have the kernel drop the file's pages, so that reads come from storage again."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(folder: Path, loaders: int, ranks: int, steps: int) -> dict[str, Any]:
    job = _job(str(folder / "corpus"))
    (folder / "job.json").write_text(to_json(job))
    processes, sockets = [], [folder / f"{loaders}-{number}.sock" for number in range(loaders)]
    for socket in sockets:
        command = [sys.executable, "-m", "megascale_trainer.data.loader", "--socket", str(socket)]
        command += ["--config", str(folder / "job.json")]
        processes.append(subprocess.Popen(command, env=child_environment()))
    each = ranks // loaders

    def read(rank: int) -> None:
        ring = RingRequest(0, rank % each, each, 0)
        with LoaderClient(sockets[rank // each], job, ring, _WAIT_S) as client:
            for _ in range(steps):
                client.next_step()
            client_done.append(rank)
            while len(client_done) < ranks:  # rings stay open until all is measured
                time.sleep(0.01)

    client_done: list[int] = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(read, range(ranks)))
    wall_s = time.perf_counter() - begin
    used = [_used(process.pid) for process in processes]
    for process in processes:
        process.terminate()
        process.wait()
    per_ring = (_SEQUENCE + 1) * _ITEM_BYTES * job.training.global_batch_size * steps
    return {
        "copied_mib": round(per_ring * loaders / 2**20, 1),
        **{name: round(sum(row[name] for row in used), 2) for name in used[0]},
        "wall_s": round(wall_s, 2),
    }


def _used(pid: int) -> dict[str, float]:
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_kib = _status_kib("RssAnon", pid) + _status_kib("RssShmem", pid)
    return {
        "from_storage_mib": int(io["read_bytes"]) / 2**20,
        "own_memory_mib": own_kib / 1024,
        "processor_s": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    }


if __name__ == "__main__":
    sys.exit(main())
