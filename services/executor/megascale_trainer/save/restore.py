"""A restore, the trainer's side: each rank's own memory first, then storage.

The daemon verifies the rank's sealed slot while the rank copies it, and nothing is used before the
verdict. If every rank has the planned state in memory, the restore is done. What is damaged or lost
on any rank is read from storage by all ranks together (:mod:`megascale_trainer.save.stored_state`),
if the plan names a stored copy. A rank alone has its daemon fill a slot from either. If the stored
copy is damaged too, all ranks take the next older checkpoint that the plan names.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megascale_common.node.messages import (
    DaemonAnswer,
    LookInMemory,
    MemoryState,
    Refused,
    Release,
    Restore,
    Restored,
    Verified,
    Verify,
)
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_trainer.parallel.groups import Group
from megascale_trainer.save.daemon_link import START_TIMEOUT_S, DaemonLink, checked
from megascale_trainer.save.stored_state import (
    RestoredInto,
    RestoreRefused,
    StoredStateReader,
    Votes,
)
from megascale_trainer.telemetry.timer import Timeline

PINNED_WITHIN_S = 30.0  # else the copy is made from what is there

__all__ = ["MemoryLook", "RestoreRefused", "RestoredState", "restore"]


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a rank has restored.

    ``small_state`` was sealed with the state, ``source`` is where this rank's part came from,
    ``held_bytes`` are what it found in its own node's memory, ``fetched_bytes`` what its daemon
    fetched from a peer's, and ``read_bytes`` what it read from storage, for itself and for others.
    ``damage`` is what is wrong with its memory, where that was to have the state. ``plan`` is the
    one that was carried out, and ``passed_over`` what is wrong with the newer ones before it.
    """

    small_state: dict[str, Any]
    source: RestoreSource
    read_bytes: int
    timeline: Timeline
    held_bytes: int = 0
    fetched_bytes: int = 0
    damage: str = ""
    plan: RestorePlan = field(default_factory=RestorePlan)
    passed_over: tuple[str, ...] = ()

    @property
    def sources(self) -> str:
        """How many bytes came from where, in words."""
        return (
            f"{self.held_bytes} bytes from memory, {self.fetched_bytes} bytes from peer, "
            f"{self.read_bytes} bytes from storage"
        )


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What came from memory: ``held_bytes`` of the own node's, or ``fetched_bytes`` of a peer's.

    Without bytes ``problem`` is why, and ``file`` names the slot that is damaged, if one is.
    """

    small_state: dict[str, Any]
    held_bytes: int
    fetched_bytes: int
    problem: str = ""
    file: str = ""

    @property
    def held(self) -> bool:
        """Whether memory had the state."""
        return not self.problem


class MemoryLook:
    """The state of a plan in the daemon's memory, asked for before it is needed.

    The daemon compares it with its checksums, and this process maps and pins its slot, while the
    worker meets the others and builds its trainer. What is loaded before the verdict is used only
    after it.
    """

    def __init__(self, link: DaemonLink, plan: RestorePlan) -> None:
        self.plan = plan
        self._link = link
        self._state: MemoryState | None = None
        request = LookInMemory(plan=plan.to_mapping(), verified_later=True)
        link.post(request, self._found)

    def poll(self, wait_s: float = 0.0) -> None:
        """Take the answer if it is there by now.

        Raises:
            OSError: the daemon is gone.
        """
        if self._state is None:
            self._link.read_answers(wait_s)

    def load(self, state: RestoredInto, device: torch.device, timeline: Timeline) -> LoadedState:
        """Load the state where memory has it whole.

        Raises:
            OSError: the daemon is gone.
        """
        with timeline.part("look"):
            self.poll(START_TIMEOUT_S)
        found = self._state
        if found is None:
            raise TimeoutError(f"the checkpoint daemon has not looked in {START_TIMEOUT_S:g} s")
        slot = found.slot
        if slot < 0:
            return LoadedState({}, 0, 0, found.problem, found.file)
        verdicts: list[DaemonAnswer] = []
        self._link.post(Verify(), verdicts.append)
        if found.arriving:
            # Nothing is in the slot yet; it is mapped and pinned meanwhile.
            with timeline.part("fetch"):
                verdict = self._verdict(verdicts)
            if not verdict.problem:
                with timeline.part("load"):
                    _load(self._link, slot, state, device)
        else:
            with timeline.part("load"):
                _load(self._link, slot, state, device)
            with timeline.part("verify"):
                verdict = self._verdict(verdicts)
        if verdict.problem:
            return LoadedState({}, 0, 0, verdict.problem, verdict.file)
        fetched_bytes = verdict.fetched_bytes
        held_bytes = 0 if fetched_bytes else self._link.slot(slot).numel()
        self._link.ask(Release(slot=slot))
        small_state = verdict.small_state or found.small_state
        return LoadedState(small_state, held_bytes, fetched_bytes)

    def _verdict(self, verdicts: list[DaemonAnswer]) -> Verified:
        if not self._link.read_answers(START_TIMEOUT_S):
            raise TimeoutError(f"no verdict on the state in memory in {START_TIMEOUT_S:g} s")
        return checked(verdicts[0], Verified)

    def _found(self, answer: DaemonAnswer) -> None:
        self._state = checked(answer, MemoryState)
        if self._state.slot >= 0:
            self._link.prepare_next(self._state.slot)


def restore(
    link: DaemonLink,
    plan: RestorePlan,
    state: RestoredInto,
    device: torch.device,
    world: Group | None = None,
    look: MemoryLook | None = None,
) -> RestoredState:
    """Load the planned state; all ranks of ``world`` call it together (None: a rank alone).

    ``look`` has asked for the first of the planned states already.

    Raises:
        RestoreRefused: the daemon cannot give it (damaged or missing file, lost memory), or another
            rank's cannot.
        OSError: the daemon is gone.
    """
    first: RestoreRefused | None = None
    passed_over: list[str] = []
    for candidate in plan.candidates():
        if look is None or look.plan != candidate:
            look = MemoryLook(link, candidate)
        try:
            found = _restore(link, look, state, device, world)
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
    look: MemoryLook,
    state: RestoredInto,
    device: torch.device,
    world: Group | None,
) -> RestoredState:
    """One of the planned states; raises as :func:`restore`."""
    plan, timeline = look.plan, Timeline()
    found = look.load(state, device, timeline)

    def restored(read_bytes: int = 0) -> RestoredState:
        sizes = (read_bytes, timeline, found.held_bytes, found.fetched_bytes)
        return RestoredState(found.small_state, RestoreSource.MEMORY, *sizes)

    if world is None or world.size == 1:
        return restored() if found.held else _alone(link, plan, found, state, timeline)
    votes = Votes(world, device)
    with timeline.part("others"):
        in_memory = [bool(row[0]) for row in votes.numbers(found.held)]
    if all(in_memory):
        return restored()
    if not plan.manifest_uri:
        votes.agree(None if found.held else _not_in_memory(found))
    reader = StoredStateReader(link, state, device, world, timeline)
    small_state = reader.read(plan, in_memory)
    read_bytes = reader.read_bytes
    if found.held:
        return restored(read_bytes)
    damage = found.problem if found.file else ""
    return RestoredState(small_state, RestoreSource.STORAGE, read_bytes, timeline, damage=damage)


def _alone(
    link: DaemonLink,
    plan: RestorePlan,
    found: LoadedState,
    state: RestoredInto,
    timeline: Timeline,
) -> RestoredState:
    """A rank alone, whose memory does not have the state: from storage."""
    if not plan.manifest_uri:
        refused = _not_in_memory(found)
        refused.damage = found.problem if found.file else ""
        raise refused
    with timeline.part("restore"):
        answer = link.ask(Restore(plan=plan.to_mapping()), START_TIMEOUT_S)
        if isinstance(answer, Refused):
            kind, error = answer.error_kind, answer.error
            damage = error if kind == "CHECKPOINT_CORRUPT" else ""
            raise RestoreRefused(kind, error, answer.file, damage)
        restored = checked(answer, Restored)
        _load(link, restored.slot, state, state.state_image().device)
        link.ask(Release(slot=restored.slot))
    source = RestoreSource(restored.source)
    damage = found.problem if found.file else ""
    small_state, read_bytes = restored.small_state, restored.bytes_read
    return RestoredState(small_state, source, read_bytes, timeline, damage=damage)


def _load(link: DaemonLink, slot: int, state: RestoredInto, device: torch.device) -> None:
    """Copy a slot into the state, each part as soon as it is pinned, and wait for the copies."""
    if device.type != "cuda":
        state.load_from(link.slot(slot))
        return
    # From pinned memory the copy is six times as fast.
    link.prepare_next(slot)
    deadline_s = time.monotonic() + PINNED_WITHIN_S

    def ready(stop: int) -> None:
        link.wait_for_bytes(slot, stop, max(0.0, deadline_s - time.monotonic()))

    state.load_from(link.slot(slot), ready)
    torch.cuda.synchronize(device)  # the copy must end before the slot is released


def _not_in_memory(found: LoadedState) -> RestoreRefused:
    """A state that only memory had is damaged, which refuses the step, or lost with its daemon."""
    if found.file:
        return RestoreRefused("CHECKPOINT_CORRUPT", found.problem, found.file)
    return RestoreRefused("OTHER", found.problem, "")
