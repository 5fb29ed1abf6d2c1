"""A driver's telemetry: its options, and the parts that run while the driver serves.

Without the packages of the extra ``observability`` a driver keeps no spans; nothing else changes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascale_common.service import tasks
from megascale_common.service.errors import OptionError

if TYPE_CHECKING:
    from megascale_driver.shell.engine import Engine
    from megascale_driver.telemetry.intake import SpanIntake
    from megascale_driver.telemetry.views import SpanViews

PACKAGES = ("numpy", "pyarrow", "duckdb")
DAY_S = 86_400.0
MIB = 1 << 20
MAX_CALIBRATION_CHARACTERS = 1 << 20  # of a file; a calibration has a few thousand


def available() -> bool:
    """True if the packages that telemetry needs are installed."""
    return all(importlib.util.find_spec(name) is not None for name in PACKAGES)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--telemetry-folder``, its limits, and calibrations."""
    group = parser.add_argument_group("telemetry")
    group.add_argument(
        "--telemetry-folder",
        type=Path,
        metavar="FOLDER",
        help="keep the spans that ranks measure in this folder, as parquet files (extra "
        "observability); default: they are dropped",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file of `megascale plan calibrate`, from which the steps of running jobs are "
        "predicted; may be repeated; default: the planner's table of devices",
    )
    group.add_argument(
        "--telemetry-mib",
        type=_positive,
        default=4096,
        metavar="N",
        help="remove the oldest spans when the folder exceeds N MiB; default 4096",
    )
    group.add_argument(
        "--telemetry-days",
        type=_positive,
        default=14,
        metavar="N",
        help="remove spans that are older than N days; default 14",
    )


class Telemetry:
    """The running parts of a driver's telemetry; :meth:`close` ends them."""

    def __init__(
        self,
        intake: SpanIntake,
        views: SpanViews,
        engine: Engine,
        calibrations: Mapping[str, str],
    ) -> None:
        """``calibrations``: texts of calibration files, by device."""
        from megascale_driver.telemetry.watches import PlanWatch, StragglerWatch

        self.intake = intake
        self.views = views
        parts = views, lambda: engine.state, engine.clock.now_s, engine.post
        self.stragglers = StragglerWatch(*parts)
        self.plans = PlanWatch(*parts, calibrations)
        self._tasks = [
            tasks.repeated(intake.run, "spans"),
            tasks.repeated(self.stragglers.run, "stragglers"),
            tasks.repeated(self.plans.run, "plans"),
        ]

    async def close(self) -> None:
        """End the parts, and write the spans that are held to files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.intake.close()


def opened(options: argparse.Namespace, engine: Engine) -> Telemetry | None:
    """Start telemetry as the options say; None without a folder.

    Raises:
        OptionError: a package is missing, the folder cannot be made, or a calibration is invalid.
    """
    folder: Path | None = options.telemetry_folder
    if folder is None:
        if options.calibration:
            raise OptionError("--calibration: give --telemetry-folder too; plans need spans")
        return None
    if not available():
        raise OptionError(
            "--telemetry-folder needs numpy, pyarrow and duckdb: "
            "pip install 'megascale[observability]', or leave the option out"
        )
    from megascale_driver.analysis.spans.clocks import Exchange
    from megascale_driver.telemetry.intake import SpanIntake
    from megascale_driver.telemetry.store import SpanStore
    from megascale_driver.telemetry.views import SpanViews

    try:
        store = SpanStore(folder, options.telemetry_mib * MIB, options.telemetry_days * DAY_S)
    except OSError as error:
        raise OptionError(
            f"--telemetry-folder {folder}: {error.strerror}; give a folder that can be written"
        ) from None
    intake = SpanIntake(store)

    def exchanges() -> dict[str, list[Exchange]]:
        """Clock samples from the heartbeats of open links, by node."""
        return {
            link.node: [Exchange.of(*sample) for sample in link.clock.samples]
            for link in engine.links.all()
        }

    views = SpanViews(intake, store, exchanges)
    return Telemetry(intake, views, engine, _calibrations(options.calibration))


def _calibrations(files: Sequence[Path]) -> dict[str, str]:
    """The texts of the calibration files, by device."""
    from megascale_planner.devices import BadCalibration
    from megascale_planner.job_plan import by_device

    texts = {}
    try:
        for path in files:
            with path.open(encoding="utf-8") as file:
                texts[str(path)] = file.read(MAX_CALIBRATION_CHARACTERS)
        return by_device(texts)
    except OSError as error:
        raise OptionError(f"--calibration {error.filename}: {error.strerror}") from None
    except (UnicodeDecodeError, BadCalibration) as error:
        raise OptionError(f"--calibration {error}") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000000000")
    return int(text)
