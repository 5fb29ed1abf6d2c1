"""Faults for live_faults.py: a GPU with a competitor, and a rank whose host loop stands still.

The trainer has no part in either. The hang is an optimizer of an installed package, the extension
point that anybody has: on one rank it waits in Python while a file exists, so the rank does not
enter the collective behind the update, and its process could still answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.harness.installed_package import install

from megascale_cli.demo.cluster import RUN_S, DemoFailed, slowed

OPTIMIZER = "hanging-adamw"
HANG_FRAME = "stands_still"  # the function that a stack of the rank shows
STOPPED_SHARE = 0.5  # of a step, on CPUs: a stop has to stand out beside other processes
_FILE = "hang"
_CODE = f"""
import time
from pathlib import Path

from torch import distributed

from megascale_trainer.optimizer.adamw import AdamW

FILE = Path(__file__).with_name({_FILE!r})


def {HANG_FRAME}():
    while FILE.exists():
        time.sleep(0.05)


class HangingAdamW(AdamW):
    def __init__(self, setup):
        super().__init__(setup)
        self._hangs = distributed.get_rank() == setup.config.options["rank"]

    def update(self, *arguments):
        if self._hangs:
            {HANG_FRAME}()
        super().update(*arguments)
"""


class HangingRank:
    """The optimizer, installed in ``site`` for processes that are started from now on."""

    def __init__(self, site: Path) -> None:
        self._file = site / _FILE
        site.mkdir(parents=True)
        install(site, OPTIMIZER, _CODE, {OPTIMIZER: "HangingAdamW"}, group="megascale.optimizers")
        paths = (str(site), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    @staticmethod
    def section(rank: int) -> dict[str, Any]:
        """The section ``optimizer`` of a job in which ``rank`` can hang."""
        return {"name": OPTIMIZER, "options": {"rank": rank}}

    def begin(self) -> None:
        """The rank hangs in its next update."""
        self._file.touch()

    def end(self) -> None:
        """No rank of a later attempt hangs."""
        self._file.unlink(missing_ok=True)


class Competitor:
    """`competing_gemms.py` on one GPU; it is there from :meth:`start` on and idle at first."""

    def __init__(self, device: int, duty: float, log: Path) -> None:
        self._device, self._duty, self._log = device, duty, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Wait until it has warmed up. Raises DemoFailed if it ends."""
        program = str(Path(__file__).with_name("competing_gemms.py"))
        given = ("--device", str(self._device), "--duty", f"{self._duty:g}")
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, program, *given, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        await self._says("ready")

    async def begin(self) -> None:
        """Have it compute."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        await self._says("running")

    async def stop(self) -> None:
        """End it."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await self._process.wait()

    async def _says(self, word: str) -> None:
        assert self._process is not None and self._process.stdout is not None
        if (await self._process.stdout.readline()).strip() != word.encode():
            raise DemoFailed(f"the competitor did not say {word!r}; see {self._log}")


@contextlib.asynccontextmanager
async def slow_device(competitor: Competitor | None, pid: int, pace_s: float) -> AsyncIterator[str]:
    """While the body runs, a rank's device is slow; yields by what. On CPUs its process stops."""
    if competitor is None:
        stopped_s = STOPPED_SHARE * pace_s
        with slowed(pid, stopped_s):
            yield f"it runs {RUN_S * 1e3:.0f} ms, then is stopped for {stopped_s * 1e3:.0f} ms"
        return
    await competitor.begin()
    try:
        yield "another process multiplies matrices on its GPU"
    finally:
        await competitor.stop()


def device_of(log: Path) -> int:
    """The GPU that a rank's log names. Raises DemoFailed."""
    found = re.search(r" on cuda:(\d+),", log.read_text(errors="replace"))
    if found is None:
        raise DemoFailed(f"{log} names no GPU")
    return int(found[1])
