"""An optimizer that has a live job's steps take longer for one cause, while a test says so.

Installed for the workers of a test's cluster, as :mod:`tests.harness.paced` is: by the extension
point for optimizers, so no part of the product knows of causes. The cause is a file beside the
installed module; each rank reads its name once a step, so a cause begins on all within a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tests.harness.installed_package import install

Cause = Literal["slow_host", "garbage_collection", "network_wait", "checkpoint"]

OPTIMIZER = "caused-adamw"
PACE_S = 0.020  # what each step takes at least
CAUSED_S = 0.030  # what a cause adds to a step
COPY_S = (
    0.400  # of a snapshot: longer than the forward and backward beside it, also on a busy machine
)
HEAP_OBJECTS = 400_000  # whose collection takes about as long
_CAUSE = "cause"

_CODE = f"""
import gc
import time
from pathlib import Path

from torch import distributed

from megascale_trainer import compat
from megascale_trainer.save.host_copy import HostCopies
from megascale_trainer.optimizer.adamw import AdamW

FILE = Path(__file__).with_name({_CAUSE!r})
cause, heap = "", []


def late(run, name, by_s):
    # Inside of what is measured: where a slow link or a busy host memory would take its time.
    def slow(*arguments):
        if cause == name:
            time.sleep(by_s)
        return run(*arguments)
    return slow


class Late:
    # A gather under way that arrives so much later.
    def __init__(self, work):
        self._work, self.is_completed = work, work.is_completed

    def wait(self):
        time.sleep({CAUSED_S})
        return self._work.wait()


gather = compat.start_all_gather
compat.start_all_gather = lambda *arguments: (
    Late(gather(*arguments)) if cause == "network_wait" else gather(*arguments)
)
start = HostCopies.start
HostCopies.start = lambda copies, copy: start(copies, late(copy, "checkpoint", {COPY_S}))


class CausedAdamW(AdamW):
    def __init__(self, setup):
        super().__init__(setup)
        self._rank = setup.config.options["rank"]

    def update(self, gradients, parameters, control, learning_rate, number):
        global cause
        cause = FILE.read_text() if FILE.exists() else ""
        time.sleep({PACE_S})
        if distributed.get_rank() == self._rank:
            if cause == "slow_host":
                time.sleep({CAUSED_S})
            if cause == "garbage_collection":
                if not heap:
                    heap.extend([] for _ in range({HEAP_OBJECTS}))
                gc.collect()
        super().update(gradients, parameters, control, learning_rate, number)
"""


def caused(rank: int) -> dict[str, Any]:
    """The section ``optimizer`` of a job; causes of one rank are on ``rank``."""
    return {"name": OPTIMIZER, "options": {"rank": rank}}


def add_to(site: Path) -> None:
    """Install the optimizer in ``site``."""
    install(site, OPTIMIZER, _CODE, {OPTIMIZER: "CausedAdamW"}, group="megascale.optimizers")


@contextmanager
def injected(site: Path, cause: Cause) -> Iterator[None]:
    """While the body runs, the cause is there."""
    fresh = site / f".{_CAUSE}"
    fresh.write_text(cause)
    fresh.replace(site / _CAUSE)
    try:
        yield
    finally:
        (site / _CAUSE).unlink()
