"""An optimizer that sleeps at each step, installed for the workers of a test's cluster.

A job that only has to train while a test breaks something around it, or while it looks at it, then
costs little processor time. What it computes is AdamW's update, bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.harness import caused
from tests.harness.installed_package import install

OPTIMIZER = "paced-adamw"
# With its share of two small ranks a step then takes about 20 ms.
PACE_S = 0.012
# A step that waits for the test (``held_from_step``) ends after this time where no other is given:
# far below the time after which a job that stands still counts as hung.
HELD_S = 3.0
_RELEASED = "released"

_CODE = f"""
import time
from pathlib import Path

from torch import distributed

from megascale_trainer.optimizer.adamw import AdamW

RELEASED = Path(__file__).with_name({_RELEASED!r})


class PacedAdamW(AdamW):
    def __init__(self, setup):
        super().__init__(setup)
        options = setup.config.options
        self._pace_s = options.get("pace_s", {PACE_S})
        self._held_from_step = options.get("held_from_step", float("inf"))
        self._held_s = options.get("held_s", {HELD_S})
        self._slow_rank, self._slow_s = options.get("slow_rank", -1), options.get("slow_s", 0.0)

    def update(self, gradients, parameters, control, learning_rate, number):
        time.sleep(min(self._pace_s, {PACE_S}) if RELEASED.exists() else self._pace_s)
        if distributed.is_initialized() and distributed.get_rank() == self._slow_rank:
            time.sleep(self._slow_s)
        end_s = time.monotonic() + self._held_s
        while number >= self._held_from_step and not RELEASED.exists():
            if time.monotonic() > end_s:
                break
            time.sleep(0.01)
        super().update(gradients, parameters, control, learning_rate, number)
"""


def slow(rank: int, slow_s: float) -> dict[str, Any]:
    """The section ``optimizer`` of a job of which one rank sleeps ``slow_s`` more a step."""
    return {"name": OPTIMIZER, "options": {"slow_rank": rank, "slow_s": slow_s}}


def paced(
    pace_s: float = PACE_S, *, held_from_step: int | None = None, held_s: float = HELD_S
) -> dict[str, Any]:
    """The section ``optimizer`` of a job.

    Args:
        pace_s: how long each step sleeps; at most PACE_S after :func:`release`.
        held_from_step: from this step on, each waits for :func:`release`, for ``held_s`` at most.
    """
    held = {} if held_from_step is None else {"held_from_step": held_from_step, "held_s": held_s}
    return {"name": OPTIMIZER, "options": {"pace_s": pace_s, **held}}


def python_path(site: Path, code: str | None = None) -> str:
    """``site`` before ``code``, by default this process's ``PYTHONPATH``.

    Installs the optimizer in ``site`` once, and that of :mod:`tests.harness.caused`.
    """
    if not site.exists():
        site.mkdir()
        factory = {OPTIMIZER: "PacedAdamW"}
        install(site, OPTIMIZER, _CODE, factory, group="megascale.optimizers")
        caused.add_to(site)
    code = os.environ.get("PYTHONPATH") if code is None else code
    return os.pathsep.join(filter(None, (str(site), code)))


def release(site: Path) -> None:
    """Let the steps go on that wait."""
    (site / _RELEASED).touch()


def hold(site: Path) -> None:
    """Undo :func:`release`, for the next job of a cluster that tests share."""
    (site / _RELEASED).unlink(missing_ok=True)
