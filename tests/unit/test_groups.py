"""What a group writes on the status page when its device lags behind the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.harness.training import tiny_job

from megascale_common.node.status_page import StatusPageWriter, read_status_page
from megascale_job.layout import GROUP_NAMES
from megascale_job.loading import from_accepted
from megascale_trainer.parallel import groups
from megascale_trainer.parallel.groups import Edges, Group, Groups
from megascale_trainer.process import worker
from megascale_trainer.telemetry.timer import Timeline


class _Device:
    """Events in the place of CUDA's: ``reached`` of them have ended."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0
        self.lost = False

    def event(self, *, enable_timing: bool = False) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.recorded += 1
                self._number = device.recorded

            def query(self) -> bool:
                if device.lost:
                    raise torch.AcceleratorError("CUDA error: unspecified launch failure")
                return self._number <= device.reached

        return Event()


def test_each_operation_is_counted_when_the_device_has_done_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _Device()
    monkeypatch.setattr(groups.torch.cuda, "Event", device.event)
    page = StatusPageWriter(tmp_path / "page", rank=0, attempt=1)
    group = Group("tp", (0, 1), 0, cast(torch.distributed.ProcessGroup, object()), page)
    on_cuda = cast(torch.Tensor, type("Tensor", (), {"is_cuda": True}))

    def row() -> tuple[int, int]:
        found = read_status_page(tmp_path / "page")
        assert found is not None
        row = found.rows[0]
        assert (row.since_ns == 0) == (row.entered == row.completed)
        return row.entered, row.completed

    for _ in range(5):
        with group.operation(on_cuda):
            pass
    assert row() == (5, 0)
    device.reached = 2
    group.poll()
    assert row() == (5, 2), "the others are still in progress"
    device.reached = 4
    with group.operation(on_cuda):
        pass
    assert row() == (6, 4)
    device.reached = 6
    group.poll()
    assert row() == (6, 6)


@pytest.mark.parametrize("lost", [False, True], ids=["error of its own", "lost device"])
def test_a_rank_that_fails_leaves_on_the_page_what_its_device_was_doing(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations that have ended since the last poll leave the page, unless the device is lost."""
    device = _Device()
    monkeypatch.setattr(groups.torch.cuda, "Event", device.event)
    page = StatusPageWriter(tmp_path / "page", rank=0, attempt=1)
    tp = Group("tp", (0, 1), 0, cast(torch.distributed.ProcessGroup, object()), page)

    class Failing(worker._Worker):
        def __init__(self) -> None:
            self._start, self._look = Timeline(), None
            self._config = from_accepted(tiny_job())

        def _say_hello(self) -> None:
            pass

        def _meet(self) -> Groups:
            return Groups(dict.fromkeys(GROUP_NAMES, tp), Edges(None, None, None, None))

        def _work(self) -> None:
            with tp.operation(cast(torch.Tensor, type("Tensor", (), {"is_cuda": True}))):
                pass
            device.reached, device.lost = 1, lost
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        Failing().run()
    found = read_status_page(tmp_path / "page")
    assert found is not None
    assert (found.rows[0].since_ns > 0) == lost
