"""A restore, the trainer's side: the daemon brings the planned state into a slot; load it."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch

from megascale_common.job.restore import RestorePlan
from megascale_common.node.messages import ErrorKind, Refused, Release, Restore, Restored
from megascale_trainer.daemon_link import START_TIMEOUT_S, DaemonLink


class RestoreRefused(Exception):
    """The daemon cannot give the planned state: ``kind`` is why, ``file`` which file is damaged."""

    def __init__(self, kind: ErrorKind, problem: str, file: str) -> None:
        super().__init__(problem)
        self.kind = kind
        self.file = file


class LoadedState(Protocol):
    """What a restore needs of a trainer."""

    def load_from(self, slot: torch.Tensor) -> None:
        """Take the state from ``slot`` (uint8, host)."""


def restore(
    link: DaemonLink, plan: RestorePlan, state: LoadedState, device: torch.device
) -> dict[str, Any]:
    """Load the planned state; returns the small state that was sealed with it.

    Raises:
        RestoreRefused: the daemon cannot give it (damaged or missing file, lost memory).
        OSError: the daemon is gone.
    """
    request = Restore(kind="restore", plan=plan.to_mapping())
    answer = cast(Restored | Refused, link.ask(request, START_TIMEOUT_S))
    if answer["kind"] == "refused":
        raise RestoreRefused(answer["error_kind"], answer["error"], answer["file"])
    state.load_from(link.slot(answer["slot"]))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the copy must end before the slot is released
    link.ask(Release(kind="release", slot=answer["slot"]))
    return answer["small_state"]
