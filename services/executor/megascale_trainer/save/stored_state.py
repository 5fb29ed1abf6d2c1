"""The planned state from storage, read by all ranks together, each byte once.

Every rank reads the index of its share of the checkpoint's files. The ranks exchange these indices
and what each of them needs, and all compute the same plan (:mod:`megascale_job.sizes.read_plan`).
Then each rank reads its windows and sends on what others need of them, in rounds; its daemon reads
the next window meanwhile. A rank whose source fails takes part in the exchanges until the next
vote, in which all ranks stop together.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from megascale_common.node.messages import (
    MOST_READS,
    DaemonAnswer,
    DaemonRequest,
    DidRead,
    ErrorKind,
    OpenStored,
    ReadIndex,
    ReadStored,
    Refused,
    Release,
    StoredIndex,
    StoredState,
)
from megascale_job.restore import RestorePlan
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.read_plan import (
    IN_MEMORY,
    DoesNotFit,
    Read,
    Round,
    Rounds,
    Runs,
    check_placed,
    decode,
    encode,
    join,
    plan_reads,
    runs_of,
)
from megascale_trainer.parallel.groups import Group
from megascale_trainer.save.daemon_link import START_TIMEOUT_S, DaemonLink, checked
from megascale_trainer.telemetry.timer import Timeline


class RestoreRefused(Exception):
    """The planned state cannot be had: ``kind`` is why, ``file`` which file is damaged.

    ``damage``: all ranks know by now that nothing else is wrong than this, on whichever rank, so
    that they may take an older checkpoint together; "" where they may not.
    """

    def __init__(self, kind: ErrorKind, problem: str, file: str, damage: str = "") -> None:
        super().__init__(problem)
        self.kind = kind
        self.file = file
        self.damage = damage


_DAMAGED, _OTHER = 1, 2
MAX_DAMAGE_CHARS = 1000


class Votes:
    """Small exchanges of all ranks; every rank calls each of them together."""

    def __init__(self, world: Group, device: torch.device) -> None:
        self._world = world
        self._device = device

    def numbers(self, *mine: int) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        source = torch.tensor(mine, dtype=torch.int64, device=self._device)
        output = torch.empty(self._world.size * len(mine), dtype=torch.int64, device=self._device)
        self._world.all_gather(output, source)
        return [[int(n) for n in row] for row in output.view(self._world.size, -1).tolist()]

    def gather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        sizes = [row[0] for row in self.numbers(len(mine))]
        longest = max(1, *sizes)
        source = torch.zeros(longest, dtype=torch.uint8)
        source[: len(mine)] = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
        output = torch.empty(self._world.size * longest, dtype=torch.uint8, device=self._device)
        self._world.all_gather(output, source.to(self._device))
        rows = output.view(self._world.size, longest).cpu().numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, problem: RestoreRefused | None) -> None:
        """Go on only if no rank has a problem.

        Raises:
            RestoreRefused: the own problem; or COLLECTIVE, a symptom, for that of another rank.
        """
        mine = 0
        if problem is not None:
            mine = _DAMAGED if problem.kind == "CHECKPOINT_CORRUPT" else _OTHER
        broken = torch.tensor([mine], dtype=torch.int64, device=self._device)
        self._world.all_reduce_max(broken)
        worst = int(broken.item())
        if not worst:
            return
        damage = ""
        if worst == _DAMAGED:
            texts = self.gather(str(problem or "")[:MAX_DAMAGE_CHARS].encode())
            damage = next(text for text in texts if text).decode(errors="replace")
        if problem is not None:
            problem.damage = damage
            raise problem
        text = "another rank cannot restore; its log has the reason"
        raise RestoreRefused("COLLECTIVE", text, "", damage)


A = TypeVar("A")
# Largest window; a slot holds two. The exchange needs at most eight of them beside it.
WINDOW_BYTES = 16 << 20
VOTE_ROUNDS = 16  # rounds between two votes on whether all sources still answer


class RestoredInto(Protocol):
    """What a restore needs of a trainer."""

    def shard_layout(self) -> ShardLayout:
        """How this rank's state lies in a slot."""

    def state_image(self) -> torch.Tensor:
        """The state itself as it lies in a slot, uint8 on the device."""

    def load_from(self, slot: torch.Tensor, ready: Callable[[int], object] = ...) -> None:
        """Take the state from ``slot`` (uint8, host); ``ready`` waits for its bytes up to one."""


class StoredStateReader:
    """Reads one checkpoint; every rank makes one and calls :meth:`read` together.

    Attributes:
        read_bytes: what the daemon has read from storage for this rank, for itself and for others.
    """

    def __init__(
        self,
        link: DaemonLink,
        state: RestoredInto,
        device: torch.device,
        world: Group,
        timeline: Timeline,
    ) -> None:
        self._link = link
        self._state = state
        self._device = device
        self._world = world
        self._timeline = timeline
        self._votes = Votes(world, device)
        self._rank = world.index
        self._problem: RestoreRefused | None = None
        self._slot = -1
        self.read_bytes = 0

    def read(self, restored: RestorePlan, in_memory: Sequence[bool]) -> dict[str, Any]:
        """Fill the state of every rank that is not ``in_memory``; returns the small state.

        Raises:
            RestoreRefused: a file is damaged, or the checkpoint is of another model.
        """
        try:
            with self._timeline.part("open"):
                opened = self._open(restored)
                self._votes.agree(self._problem)
            assert opened is not None
            rounds = self._plan(restored, opened.files, in_memory)
            if not in_memory[self._rank]:
                self._state.state_image().zero_()
            self._run(rounds)
        finally:
            self._close()
        return opened.small_state

    def _open(self, restored: RestorePlan) -> StoredState | None:
        opened = self._ask(OpenStored(plan=restored.to_mapping()), StoredState)
        if opened is not None:
            self._slot = opened.slot
            self._link.prepare_next(self._slot)
        return opened

    def _plan(self, restored: RestorePlan, files: int, in_memory: Sequence[bool]) -> Rounds:
        with self._timeline.part("index"):
            mine = [self._index(number) for number in range(self._rank, files, self._world.size)]
            self._votes.agree(self._problem)
        layout = self._state.shard_layout()
        wanted = runs_of(layout.pieces, self._rank)
        with self._timeline.part("exchange of indices"):
            stored = join([decode(each) for each in self._votes.gather(encode(join(mine)))])
            needs = join([decode(each) for each in self._votes.gather(encode(wanted))])
            smallest = min(row[0] for row in self._votes.numbers(layout.slot_bytes))
        with self._timeline.part("plan"):
            try:
                # At step 0 the parameters alone are taken.
                check_placed(stored, needs, weights_alone=restored.step == 0)
                reads = plan_reads(stored, needs, in_memory)
            except DoesNotFit as error:
                uri = restored.manifest_uri.rpartition("/")[0]
                raise RestoreRefused("BAD_JOB", error.refusal(uri), "") from error
            return Rounds(reads, max(1, min(WINDOW_BYTES, smallest // 2)))

    def _index(self, number: int) -> Runs:
        tables, following = [], 0
        while following >= 0:
            answer = self._ask(ReadIndex(file=number, first=following), StoredIndex)
            if answer is None:
                break
            tables.append(decode(base64.b64decode(answer.runs)))
            following = answer.following
        return join(tables)

    def _run(self, rounds: Rounds) -> None:
        program = iter(rounds.of_rank(self._rank))
        current, number = next(program, None), 0
        if current is not None:
            self._post(current, 0)
        while current is not None:
            begin = number % 2 * rounds.window_bytes
            with self._timeline.part("read"):
                self._collect()
            following, number = next(program, None), number + 1
            if following is not None:
                self._post(following, number % 2 * rounds.window_bytes)
            with self._timeline.part("exchange"):
                self._exchange(current, begin, rounds.window_bytes)
                if number % VOTE_ROUNDS == 0:
                    self._votes.agree(self._problem)
            current = following
        self._votes.agree(self._problem)

    def _post(self, part: Round, begin: int) -> None:
        """Have the daemon read a window; its answer is awaited in :meth:`_collect`."""
        reads = [read for read in part.reads if read.file != IN_MEMORY]
        asked = [reads[i : i + MOST_READS] for i in range(0, len(reads), MOST_READS)]
        for number, some in enumerate(asked):
            request = ReadStored(at=begin, reads=[_fields(r) for r in some])
            if number + 1 < len(asked):
                self._add(self._ask(request, DidRead))
            elif self._problem is None:
                try:
                    self._link.post(request, self._took)
                except OSError as error:
                    self._failed(error)

    def _collect(self) -> None:
        """Wait for the window that was posted, if one was."""
        if self._problem is not None:
            return
        try:
            if not self._link.read_answers(START_TIMEOUT_S):
                self._failed(TimeoutError(f"no answer to a read in {START_TIMEOUT_S:g} s"))
        except OSError as error:
            self._failed(error)

    def _exchange(self, part: Round, begin: int, window_bytes: int) -> None:
        """Put what this rank needs of its window into its state, send the rest, and receive."""
        image = self._state.state_image()
        window = self._link.slot(self._slot)[begin : begin + window_bytes]
        for read in part.reads:
            if read.file == IN_MEMORY:
                size, first = read.stop - read.start, read.first + read.start
                window[read.at : read.at + size].copy_(image[first : first + size])
        for at, target, size in part.kept.tolist():
            image[target : target + size].copy_(window[at : at + size], non_blocking=True)
        if part.exchanged:
            sent = torch.empty(int(part.sent[:, 1].sum()), dtype=torch.uint8, device=self._device)
            end = 0
            for at, size in part.sent.tolist():
                sent[end : end + size].copy_(window[at : at + size], non_blocking=True)
                end += size
            sizes = part.receive_bytes.tolist()
            received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self._world.all_to_all(received, sent, sizes, part.send_bytes.tolist())
            end = 0
            for target, size in part.received.tolist():
                image[target : target + size].copy_(received[end : end + size])
                end += size
        if self._device.type == "cuda":
            # The daemon fills this half of the slot again in the round after the next.
            torch.cuda.current_stream(self._device).synchronize()

    def _ask(self, request: DaemonRequest, kind: type[A]) -> A | None:
        """The answer to a request, None after a failure, which is kept for the next vote."""
        if self._problem is not None:
            return None
        try:
            return self._checked(self._link.ask(request, START_TIMEOUT_S), kind)
        except OSError as error:
            self._failed(error)
            return None

    def _checked(self, answer: DaemonAnswer, kind: type[A]) -> A | None:
        if not isinstance(answer, Refused):
            return checked(answer, kind)
        self._problem = RestoreRefused(answer.error_kind, answer.error, answer.file)
        return None

    def _took(self, answer: DaemonAnswer) -> None:
        """Take in that a window, or a part of it, was read."""
        self._add(self._checked(answer, DidRead))

    def _add(self, answer: DidRead | None) -> None:
        if answer is not None:
            self.read_bytes += answer.bytes_read

    def _failed(self, error: OSError) -> None:
        self._problem = RestoreRefused("OTHER", f"the checkpoint daemon: {error}", "")

    def _close(self) -> None:
        if self._slot < 0 or not self._link.connected:
            return
        try:
            self._link.ask(Release(slot=self._slot))
        except OSError:
            pass  # the daemon releases what a lost connection held
        self._slot = -1


def _fields(read: Read) -> list[int | str]:
    sizes = (read.file, read.first, read.size_bytes)
    return [*sizes, read.checksum, read.start, read.stop, read.at]
