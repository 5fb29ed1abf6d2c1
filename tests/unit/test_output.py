"""What a process prints never fails it: full disks, closed and slow readers, the flush at exit."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale_common.node.output import PATIENCE_S, SteadyStream, steady
from megascale_common.service import start

_FULL = Path("/dev/full")


def run(code: str, output: Path) -> subprocess.CompletedProcess[bytes]:
    """A Python process with ``output`` as stdout and stderr."""
    with output.open("ab") as stream:
        return subprocess.run(
            [sys.executable, "-c", code], stdout=stream, stderr=stream, check=False
        )


def test_a_process_whose_log_disk_is_full_ends_well() -> None:
    code = (
        "from megascale_common.service import logs\n"
        "import sys\n"
        "logs.configure('test')\n"
        "logs.get('part').error('no link', why='x' * 100_000)\n"
        "print('a line'); print('another', file=sys.stderr); sys.stdout.flush()\n"
    )
    assert run(code, _FULL).returncode == 0


def test_the_flush_at_exit_does_not_change_the_status() -> None:
    # By Python's own streams it does.
    print_only = "print('a line')"
    assert run(print_only, _FULL).returncode != 0
    steady_first = "from megascale_common.node.output import steady_streams as s; s();"
    assert run(steady_first + print_only, _FULL).returncode == 0


def test_dropped_lines_are_counted_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    stream = steady(path.open("a"))
    print("before", file=stream)
    kept = os.dup(stream.fileno())
    with _FULL.open("w") as full:
        os.dup2(full.fileno(), stream.fileno())
    for number in range(3):
        print("lost", number, file=stream)
    os.dup2(kept, stream.fileno())
    os.close(kept)
    print("after", file=stream)
    assert path.read_text().splitlines() == [
        "before",
        "[3 lines were dropped here: No space left on device]",
        "after",
    ]


def test_a_line_that_was_cut_is_completed_first(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from megascale_common.node.output import steady_streams\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "steady_streams()\n"
        "_, most = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (15, most))\n"
        "print('0123456789')\n"
        "print('abcdefghij')\n"
        "print('lost')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "print('after')\n"
    )
    path = tmp_path / "log"
    assert run(code, path).returncode == 0
    assert path.read_text().splitlines() == [
        "0123456789",
        "abcdefghij",
        "[1 line was dropped here: File too large]",
        "after",
    ]


def test_a_log_reports_dropped_lines_in_its_own_form(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from megascale_common.service import logs\n"
        "logs.configure('test')\n"
        "kept = os.dup(2)\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
        "logs.get('part').info('lost')\n"
        "os.dup2(kept, 2)\n"
        "logs.get('part').info('after')\n"
    )
    path = tmp_path / "log"
    assert run(code, path).returncode == 0
    dropped, after = map(json.loads, path.read_text().splitlines())
    assert (dropped["event"], dropped["count"]) == ("log lines were dropped", 1)
    assert (dropped["service"], dropped["reason"]) == ("test", "No space left on device")
    assert after["event"] == "after"


def test_a_reader_that_does_not_read_is_waited_for_once() -> None:
    read, write = os.pipe()
    stream = steady(os.fdopen(write, "w"))
    line = "x" * 1000
    started_s = time.monotonic()
    for _ in range(1000):
        print(line, file=stream)
    assert time.monotonic() - started_s < 10 * PATIENCE_S
    assert set(os.read(read, 1 << 20).decode().split()) == {line}
    print("after", file=stream)
    seen = os.read(read, 1 << 20).decode().splitlines()
    assert seen[-1] == "after"
    assert "lines were dropped here: the reader of this output does not read]" in seen[-2]
    os.close(read)
    print("to nobody", file=stream)  # a closed pipe
    stream.flush()


def test_a_signal_handler_may_print_while_its_thread_prints(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "from megascale_common.node.output import steady_streams\n"
        "steady_streams()\n"
        "signal.signal(signal.SIGALRM, lambda *_: print('handler'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "end = time.monotonic() + 0.5\n"
        "while time.monotonic() < end: print('thread')\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    path = tmp_path / "log"
    assert run(code, path).returncode == 0
    assert "handler" in path.read_text()


def test_streams_without_a_descriptor_and_closed_ones() -> None:
    memory = io.StringIO()
    stream = SteadyStream(memory)
    stream.write("kept in memory\n")
    assert memory.getvalue() == "kept in memory\n"
    memory.close()
    stream.write("lost\n")
    stream.flush()


def test_bytes_are_refused_as_by_any_text_stream() -> None:
    with pytest.raises(TypeError, match="bytes"):
        SteadyStream(io.StringIO()).write(b"")  # type: ignore[arg-type]


def test_what_a_stream_cannot_encode_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        steady(file).write("a\udcffb \N{SNOWMAN}\n")
    assert (tmp_path / "log").read_text() == "a\\udcffb \\u2603\n"


@pytest.mark.parametrize("module", ["megascale_driver", "megascale_checkpoint"])
def test_a_service_that_cannot_report_why_it_does_not_start_keeps_its_status(module: str) -> None:
    options = ["--token-file", "/nowhere", "--cluster", "c"]
    options += {
        "megascale_driver": ["--etcd", "127.0.0.1:1"],
        "megascale_checkpoint": ["--node", "n", "--incarnation", "i", "--socket", "/nowhere/s"],
    }[module]
    with _FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", module, *options],
            stdout=full, stderr=full, check=False,
            env={**os.environ, "MEGASCALE_PARENT_PID": str(os.getpid())},
        )  # fmt: skip
    assert ended.returncode == 2, signal.Signals(-ended.returncode) if ended.returncode < 0 else ""


def test_a_start_on_a_full_disk_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 would keep a supervisor from it (deploy/systemd)."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(start, "replace_file", full)
    with pytest.raises(SystemExit) as ended, start.ends_with_a_sentence("the driver"):
        start.write_address("--address-file", tmp_path / "address", "127.0.0.1:1")
    assert ended.value.code == start.UNAVAILABLE
    assert "make room on the disk" in capsys.readouterr().err
