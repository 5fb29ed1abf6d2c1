"""Measures how fast shuffled samples are read from a corpus of many documents.

    python benchmarks/data_reading.py --documents 1e5,1e6,1e7,1e8     # 2 GB in --folder

It writes a corpus of documents of 500 tokens for each number (the tokens themselves are a hole in
the file) and reads it in a process of its own: the time to open the corpus, the time until the
first sample, the time of further samples at random positions, and the process's own memory. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.data.indexed import HEADER, MAGIC, VERSION, bin_path, idx_path
from megascale_trainer.data.packing import SampleStream

_TOKENS, _ITEM_BYTES, _CHUNK = 500, 2, 1 << 20
_SAMPLES = 2000
_SEQUENCE = 2048


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--documents", default="1e4,1e5")
    parser.add_argument("--shuffle", default="samples,documents")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_read_alone(str(options.folder), options.shuffle)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        counts = [int(float(count)) for count in options.documents.split(",")]
        found = [
            {"documents": count, **row}
            for count in counts
            for row in _index(Path(folder) / f"{count}", count, options.shuffle.split(","))
        ]
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
        command = [sys.executable, __file__, "--one", "--folder", str(prefix), "--shuffle", shuffle]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1] if done.returncode == 0 else ""
        problem = {"problem": f"exit status {done.returncode}: {done.stderr[-200:]}"}
        rows.append({"shuffle": shuffle, **(json.loads(last) if last else problem)})
    for path in (bin_path(prefix), idx_path(prefix)):
        path.unlink()
    return rows


def _read_alone(prefix: str, shuffle: str) -> dict[str, Any]:
    """Times of reading, and the anonymous memory that it took; in a process of its own."""
    before = _status_kib("RssAnon")
    begin = time.perf_counter()
    stream = SampleStream.open(_job(prefix, shuffle))
    opened = time.perf_counter()
    stream.sample(0)
    first = time.perf_counter()
    # The first epoch alone: each epoch makes its own order of documents.
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


if __name__ == "__main__":
    sys.exit(main())
