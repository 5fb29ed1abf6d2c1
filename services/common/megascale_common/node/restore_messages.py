"""Messages of a restore between a worker and the checkpoint daemon of its node.

They are part of :mod:`megascale_common.node.messages`. A worker asks for its own memory first. What
is not there is read from storage by all ranks together: each opens the checkpoint, reads the index
of its share of the files, and then its windows, as
:mod:`megascale_job.sizes.read_plan` has planned for all.

    LookInMemory -> MemoryState, Verify -> Verified, OpenStored -> StoredState | Refused,
    ReadIndex -> StoredIndex | Refused, ReadStored -> DidRead | Refused.
    Release ends the use of a slot that MemoryState or StoredState named.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

INDEX_UNITS = 4000  # that one StoredIndex describes: below 1 MiB
MOST_READS = 4000  # that one ReadStored asks for


class LookInMemory(TypedDict):
    """Worker to daemon: is the state of ``plan`` sealed in a slot of this rank, and undamaged?

    With ``verified_later`` (default false) the answer does not wait for the checksums: the worker
    may copy what is in the slot meanwhile, and asks for the verdict before it uses it.
    """

    kind: Literal["restore_memory"]
    plan: dict[str, Any]
    verified_later: NotRequired[bool]


class MemoryState(TypedDict):
    """Daemon to worker: the slot that holds the state, -1 if none does; ``problem`` is why.

    ``file`` names the slot where one did, and is damaged. ``arriving``: the state comes from a
    peer's memory; nothing in the slot counts, and ``small_state`` is empty, before Verified.
    """

    kind: Literal["memory_state"]
    slot: int
    small_state: dict[str, Any]
    problem: str
    file: str
    arriving: NotRequired[bool]


class Verify(TypedDict):
    """Worker to daemon, after LookInMemory with ``verified_later``: is the state undamaged?"""

    kind: Literal["restore_verify"]


class Verified(TypedDict):
    """Daemon to worker: ``problem`` is "" or what is wrong with the slot that ``file`` names.

    A damaged slot is no longer the worker's to release, nor is one whose state has not arrived. Of
    one that has, ``small_state`` is its own, and ``fetched_bytes`` its size.
    """

    kind: Literal["verified"]
    problem: str
    file: str
    small_state: NotRequired[dict[str, Any]]
    fetched_bytes: NotRequired[int]


class OpenStored(TypedDict):
    """Worker to daemon: open the checkpoint of ``plan`` on storage."""

    kind: Literal["restore_open"]
    plan: dict[str, Any]


class StoredState(TypedDict):
    """Daemon to worker: it has ``files`` files, and windows are read into ``slot``."""

    kind: Literal["stored_state"]
    files: int
    slot: int
    small_state: dict[str, Any]


class ReadIndex(TypedDict):
    """Worker to daemon: which pieces a file of the open checkpoint holds, from piece ``first``."""

    kind: Literal["restore_index"]
    file: int
    first: int


class StoredIndex(TypedDict):
    """Daemon to worker: :func:`megascale_job.sizes.piece_runs.encode` of them, in base64.

    ``following`` is the next piece to ask for, -1 after the last.
    """

    kind: Literal["stored_index"]
    runs: str
    following: int


class ReadStored(TypedDict):
    """Worker to daemon: fill a window, from byte ``at`` of the slot on.

    ``reads`` are the fields of :class:`megascale_job.sizes.read_rounds.Read`, in their order.
    """

    kind: Literal["restore_read"]
    at: int
    reads: list[list[int | str]]


class DidRead(TypedDict):
    """Daemon to worker: the window holds the bytes; units that are complete are verified."""

    kind: Literal["did_read"]
    bytes_read: int


RestoreRequest: TypeAlias = LookInMemory | Verify | OpenStored | ReadIndex | ReadStored
RestoreAnswer: TypeAlias = MemoryState | Verified | StoredState | StoredIndex | DidRead
