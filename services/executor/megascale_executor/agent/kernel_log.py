"""The kernel's log as a stream: records of /dev/kmsg, or the lines of a recorded file.

Each read of /dev/kmsg returns one record: ``priority,sequence,microseconds,flags;text`` (Linux,
Documentation/ABI/testing/dev-kmsg), with the time since boot. Only records written after the start
are read, because the checks find older faults. A recorded file is read from its beginning.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from megascale_executor.diagnostics.finding import Finding

KERNEL_LOG = Path("/dev/kmsg")
KERNEL_LOG_VARIABLE = "MEGASCALE_KERNEL_LOG"
MAX_RECORDS = 20_000  # per call; the rest waits in the kernel's own ring
_RECORD_BYTES = 8192
_FILE_BYTES = 262_144


class KernelLog:
    """Reads the lines that the kernel has written since the last call; opens the source at once.

    ``problem`` says why nothing can be read; "" if the source is readable.
    """

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self._path = path
        self._descriptor = -1
        self._records = False
        self.problem = ""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._records = stat.S_ISCHR(os.fstat(self._descriptor).st_mode)
            if self._records:
                os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self._fail(error)

    def finding(self) -> Finding:
        """Whether the log is read, as a check of the node: PASS, or SKIPPED with the reason."""
        if self.problem:
            return Finding("kernel_log", str(self._path), "SKIPPED", self.problem)
        return Finding("kernel_log", str(self._path), "PASS", "hardware faults are read")

    def read(self) -> list[tuple[float, bytes]]:
        """New lines, oldest first: (Unix seconds, text that ends with a line break)."""
        if self._descriptor < 0:
            return []
        try:
            return self._read_records() if self._records else self._read_file()
        except OSError as error:
            self._fail(error)
            return []

    def close(self) -> None:
        """Close the source."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fail(self, error: OSError) -> None:
        self.problem = (
            f"{error.strerror or error}: faults that only the kernel reports are not seen; "
            "give the agent CAP_SYSLOG"
        )
        self.close()

    def _read_records(self) -> list[tuple[float, bytes]]:
        boot_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        found: list[tuple[float, bytes]] = []
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next one follows
            head, _, text = record.partition(b";")
            fields = head.split(b",")
            line = text.partition(b"\n")[0]
            if len(fields) > 2 and fields[2].isdigit():
                found.append((boot_s + int(fields[2]) / 1e6, line + b"\n"))
        return found

    def _read_file(self) -> list[tuple[float, bytes]]:
        data = os.read(self._descriptor, _FILE_BYTES)
        return [(os.fstat(self._descriptor).st_mtime, data)] if data else []
