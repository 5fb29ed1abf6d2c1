"""The logs of ranks and of the kernel, scanned: records per fingerprint, in bounded memory."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from megascale.v1 import link_pb2
from megascale_common.node.logs.signatures import SIGNATURES
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.kernel_log import KernelLog
from megascale_executor.agent.link.driver_link import MAX_HEARTBEAT_BYTES, fit
from megascale_executor.agent.reports import logs as reports_logs
from megascale_executor.agent.reports.logs import MAX_FINGERPRINTS, MAX_UNKNOWN, LogScanner

KEY = AttemptKey("demo", 3)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB.\n"
CLOSED = "host:1:2 [0] NCCL WARN socketProgress: Connection closed by remote peer h2<4>\n"
OFF_BUS = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("")
    return path


def scanner_of(kernel: Path, *ranks: int) -> tuple[LogScanner, dict[int, Path]]:
    logs = {rank: kernel.with_name(f"rank-{rank}.log") for rank in ranks}
    scanner = LogScanner(KernelLog(kernel), lambda: None)
    scanner.watch(KEY, logs)
    return scanner, logs


def by_category(scanner: LogScanner) -> dict[str, link_pb2.LogFingerprint]:
    return {one.category: one for one in scanner.collect()}


def test_lines_of_one_kind_are_one_record_with_its_times(kernel: Path) -> None:
    scanner, logs = scanner_of(kernel, 4, 5)
    assert not scanner.scan_now() and scanner.collect() == []  # no file yet
    logs[4].write_text("step 1 loss 3.2\n" + CLOSED + CLOSED)
    logs[5].write_text(CLOSED + OOM[:20])
    os.utime(logs[4], (1000.0, 1000.0))
    os.utime(logs[5], (2000.0, 2000.0))
    assert scanner.scan_now()
    (closed,) = scanner.collect()
    assert (closed.category, closed.role, closed.action) == (
        "peer_closed_secondary", "secondary", "none",
    )  # fmt: skip
    assert (closed.count, closed.first_rank, closed.sample_line) == (3, 4, CLOSED.strip())
    assert (closed.first_at.seconds, closed.last_at.seconds) == (1000, 2000)
    with logs[5].open("a") as log:
        log.write(OOM[20:])
    assert scanner.scan_now()
    oom = by_category(scanner)["cuda_oom"]
    assert (oom.count, oom.first_rank, oom.role, oom.action) == (1, 5, "root", "stop")
    assert not scanner.scan_now() and len(scanner.collect()) == 2  # they stay until the next


def test_the_kernel_log_is_read_beside_them(kernel: Path) -> None:
    scanner, _ = scanner_of(kernel)
    with kernel.open("a") as log:
        log.write("usb 1-1: new device\n" + OFF_BUS)
    assert scanner.scan_now()
    (found,) = scanner.collect()
    assert (found.category, found.action, found.first_rank, found.kernel) == (
        "gpu_fallen_off_bus", "evict_restart", -1, True,
    )  # fmt: skip
    assert abs(found.first_at.seconds - time.time()) < 60
    assert scanner.kernel.finding().verdict == "PASS"


def test_a_kernel_log_that_cannot_be_read_is_skipped_with_the_reason(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "missing")
    assert log.read() == []
    found = log.finding()
    assert found.verdict == "SKIPPED"
    assert "No such file" in found.detail and "CAP_SYSLOG" in found.detail


def test_a_new_attempt_begins_with_nothing(kernel: Path) -> None:
    scanner, logs = scanner_of(kernel, 0)
    logs[0].write_text(OOM)
    scanner.scan_now()
    assert scanner.key == KEY and len(scanner.collect()) == 1
    scanner.watch(AttemptKey("demo", 4), {})
    assert scanner.collect() == [] and scanner.key.attempt == 4


def test_the_last_line_of_a_process_that_was_killed_needs_no_end(kernel: Path) -> None:
    scanner, logs = scanner_of(kernel, 0)
    logs[0].write_text(OOM.strip())
    assert not scanner.scan_now()
    assert scanner.scan_now(last=True)


def test_unknown_lines_do_not_displace_known_ones_and_a_heartbeat_holds_all(kernel: Path) -> None:
    scanner, logs = scanner_of(kernel, 0)
    words = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(600)]
    with logs[0].open("w") as log:
        log.writelines(f"{word}Error: {word} {word[::-1]} broke {'y' * 600}\n" for word in words)
        for signature in SIGNATURES:
            log.writelines(f"x {literal} {'z' * 700}\n" for literal in signature.literals)
        log.write(OOM)
    scanner.scan_now()
    found = scanner.collect()
    assert len(found) == MAX_FINGERPRINTS
    assert sum(one.category == "unknown" for one in found) == MAX_UNKNOWN
    assert max(len(one.sample_line.encode()) for one in found) <= reports_logs.MAX_SAMPLE_BYTES
    workers = [link_pb2.WorkerStatus(rank=rank, error="e" * 1000) for rank in range(64)]
    beat = link_pb2.Heartbeat(logs=found, workers=workers)
    assert beat.ByteSize() > MAX_HEARTBEAT_BYTES
    short = fit(beat)
    assert short.ByteSize() <= MAX_HEARTBEAT_BYTES
    assert any(one.role == "root" for one in short.logs)


def test_a_line_of_fifty_megabytes_costs_bounded_memory(kernel: Path) -> None:
    scanner, logs = scanner_of(kernel, 0)
    with logs[0].open("wb") as log:
        for _ in range(50):
            log.write(b"\xff" * (1 << 20))
        log.write(b"\n" + OOM.encode())
    tracemalloc.start()
    scanner.scan_now()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert list(by_category(scanner)) == ["cuda_oom"]


def test_what_is_too_far_behind_is_skipped_and_counted(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_logs, "MAX_BEHIND_BYTES", 1000)
    scanner, logs = scanner_of(kernel, 0)
    logs[0].write_text("x" * 5000 + "\n" + OOM)
    scanner.scan_now()
    assert scanner.skipped_bytes == 5001 + len(OOM) - 1000
    assert list(by_category(scanner)) == ["cuda_oom"]
