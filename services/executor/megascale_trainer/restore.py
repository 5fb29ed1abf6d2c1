"""A restore, the trainer's side: each rank's own memory first, then storage.

The daemon verifies the rank's sealed slot. If every rank has the planned state in memory, that is
all. What is damaged or lost on any rank is read from storage by all ranks together
(:mod:`megascale_trainer.stored_state`), where the plan names a stored copy. A rank alone has its
daemon fill a slot from either. Where that is damaged, too, all ranks take the next older checkpoint
that the plan names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from megascale_common.job.restore import RestorePlan, RestoreSource
from megascale_common.node.messages import Refused, Release, Restore, Restored
from megascale_common.node.restore_messages import LookInMemory, MemoryState
from megascale_trainer.daemon_link import START_TIMEOUT_S, DaemonLink
from megascale_trainer.parallel.groups import Group
from megascale_trainer.restore_votes import RestoreRefused, Votes
from megascale_trainer.stored_state import RestoredInto, StoredStateReader
from megascale_trainer.telemetry.timeline import Timeline

PINNED_WITHIN_S = 30.0  # else the copy is made from what is there

__all__ = ["RestoreRefused", "RestoredState", "restore"]


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a rank has restored.

    ``small_state`` was sealed with the state, ``source`` is where this rank's part came from, and
    ``read_bytes`` are what it read from storage, for itself and for others. ``damage`` is what is
    wrong with its memory, where that was to have the state. ``plan`` is the one that was carried
    out, and ``passed_over`` what is wrong with the newer ones before it.
    """

    small_state: dict[str, Any]
    source: RestoreSource
    read_bytes: int
    timeline: Timeline
    damage: str = ""
    plan: RestorePlan = field(default_factory=RestorePlan)
    passed_over: tuple[str, ...] = ()


def restore(
    link: DaemonLink,
    plan: RestorePlan,
    state: RestoredInto,
    device: torch.device,
    world: Group | None = None,
) -> RestoredState:
    """Load the planned state; all ranks of ``world`` call it together (None: a rank alone).

    Raises:
        RestoreRefused: the daemon cannot give it (damaged or missing file, lost memory), or another
            rank's cannot.
        OSError: the daemon is gone.
    """
    first: RestoreRefused | None = None
    passed_over: list[str] = []
    for candidate in plan.candidates():
        try:
            found = _restore(link, candidate, state, device, world)
        except RestoreRefused as refused:
            # The first one's refusal is the one that the plan's step is refused for.
            first = first or refused
            if not refused.damage or not link.connected:
                break
            passed_over.append(f"step {candidate.step}: {refused.damage}")
            continue
        return replace(found, plan=candidate, passed_over=tuple(passed_over))
    assert first is not None
    raise first


def _restore(
    link: DaemonLink,
    plan: RestorePlan,
    state: RestoredInto,
    device: torch.device,
    world: Group | None,
) -> RestoredState:
    """One of the planned states; raises as :func:`restore`."""
    if world is None or world.size == 1:
        return _alone(link, plan, state, device)
    timeline, votes = Timeline(), Votes(world, device)
    with timeline.part("memory"):
        request = LookInMemory(kind="restore_memory", plan=plan.to_mapping())
        found = cast(MemoryState, link.ask(request, START_TIMEOUT_S))
        held = found["slot"] >= 0
        if held:
            _load(link, found["slot"], state, device)
        in_memory = [bool(row[0]) for row in votes.numbers(held)]
    if all(in_memory):
        return RestoredState(found["small_state"], RestoreSource.MEMORY, 0, timeline)
    if not plan.manifest_uri:
        votes.agree(None if held else _not_in_memory(found))
    reader = StoredStateReader(link, state, device, world, timeline)
    small_state = reader.read(plan, in_memory)
    read_bytes = reader.read_bytes
    if held:
        return RestoredState(found["small_state"], RestoreSource.MEMORY, read_bytes, timeline)
    damage = found["problem"] if found["file"] else ""
    return RestoredState(small_state, RestoreSource.STORAGE, read_bytes, timeline, damage)


def _alone(
    link: DaemonLink, plan: RestorePlan, state: RestoredInto, device: torch.device
) -> RestoredState:
    timeline = Timeline()
    with timeline.part("restore"):
        request = Restore(kind="restore", plan=plan.to_mapping())
        answer = cast(Restored | Refused, link.ask(request, START_TIMEOUT_S))
        if answer["kind"] == "refused":
            kind, error = answer["error_kind"], answer["error"]
            damage = error if kind == "CHECKPOINT_CORRUPT" else ""
            raise RestoreRefused(kind, error, answer["file"], damage)
        _load(link, answer["slot"], state, device)
    source = RestoreSource(answer["source"])
    return RestoredState(answer["small_state"], source, answer["bytes_read"], timeline)


def _load(link: DaemonLink, slot: int, state: RestoredInto, device: torch.device) -> None:
    if device.type == "cuda":
        link.prepare_next(slot, PINNED_WITHIN_S)  # from pinned memory the copy is six times as fast
    state.load_from(link.slot(slot))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the copy must end before the slot is released
    link.ask(Release(kind="release", slot=slot))


def _not_in_memory(found: MemoryState) -> RestoreRefused:
    """A state that only memory had is damaged, which refuses the step, or lost with its daemon."""
    if found["file"]:
        return RestoreRefused("CHECKPOINT_CORRUPT", found["problem"], found["file"])
    return RestoreRefused("OTHER", found["problem"], "")
