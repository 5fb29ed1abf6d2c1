"""A worker's registration for its rank, checked field by field."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint.storage import open_storage
from megascale_common.node import messages
from megascale_common.node.framing import PROTOCOL_VERSION
from megascale_common.node.messages import PIECES_IN_A_FRAME, Pieces, RankTerms, Register, kind_of
from megascale_common.service.errors import RequestError
from megascale_job.names import is_dns_label
from megascale_job.sizes.checkpoint_layout import ShardLayout, layout_from_dict
from megascale_job.sizes.memory import (
    HELD_FOR_REPLICAS,
    KEPT_SLOTS,
    LEAST_SLOTS,
    MOST_SLOTS,
    REPLICA_SLOTS,
)
from megascale_job.visible import agreed, counted

MOST_PIECES = 1 << 20  # of one rank: some thousand layers, a few hundred MiB of memory
MOST_IN_FLIGHT = 4
MOST_LOCAL_RANKS = 64


@dataclass(frozen=True, slots=True)
class RegisteredRank(RankTerms):
    """One rank of one attempt, as its worker registered it.

    Attributes:
        layout: layout of the rank's slots.
        digest: digest of the layout.
        layout_info: sizes of tp, cp, dp and pp, and of ep above 1, for the manifest.
        replica_target: host:port of the node that keeps this rank's replicas; empty: none.
        replica_source: host:port of the node whose replica of this rank is restored; empty: none.
        replica_bytes_per_s: limit for all ranks of the node together; 0: no limit.
    """

    layout: ShardLayout = dataclasses.field(kw_only=True)
    digest: str = dataclasses.field(kw_only=True)
    layout_info: dict[str, int] = dataclasses.field(kw_only=True)
    replica_target: str = ""
    replica_source: str = ""
    replica_bytes_per_s: int = 0

    @property
    def wanted_slots(self) -> int:
        """Number of slots with which no snapshot is skipped, if there is memory for them."""
        held = HELD_FOR_REPLICAS if self.replica_target else 0
        return self.in_flight + KEPT_SLOTS + held

    @property
    def replica_bytes(self) -> int:
        """Memory for the replicas of a rank of another node, as large as any of the job."""
        slots = REPLICA_SLOTS if self.replica_target else 0
        return slots * max(self.layout.slot_bytes, self.largest_slot_bytes)


class RegistrationFrames:
    """Joins a Register message with the Pieces that follow it."""

    def __init__(self) -> None:
        self._register: Register | None = None
        self._pieces: list[Any] = []
        self._missing = 0

    def feed(self, message: object) -> Register | None:
        """Take one message; return the Register once it has all its pieces, else None.

        Raises:
            RequestError: another kind of message, or more pieces than were announced.
        """
        if self._register is None:
            if not isinstance(message, Register):
                raise RequestError(f"the first message is {kind_of(message)!r}; register first")
            self._missing = message.further_pieces
            if not 0 <= self._missing <= MOST_PIECES:
                raise RequestError(
                    f"register.further_pieces is {self._missing!r}; give 0 to {MOST_PIECES}"
                )
            # The list is extended in place by the Pieces that follow, so that at the end the
            # message holds the whole layout.
            pieces = message.layout.get("pieces")
            if not isinstance(pieces, list):
                raise RequestError(f"register.layout.pieces is {pieces!r}; it must be of type list")
            self._pieces = pieces
            self._register = message
        else:
            if not isinstance(message, Pieces):
                raise RequestError(
                    f"{counted(self._missing, 'piece')} of the layout "
                    f"{agreed(self._missing, 'are')} missing before {kind_of(message)!r}"
                )
            if not 0 < len(message.pieces) <= min(self._missing, PIECES_IN_A_FRAME):
                raise RequestError(
                    f"pieces.pieces has {counted(len(message.pieces), 'entry')}; "
                    f"{self._missing} {agreed(self._missing, 'are')} missing, and a message "
                    f"takes {PIECES_IN_A_FRAME}"
                )
            self._pieces += message.pieces
            self._missing -= len(message.pieces)
        return None if self._missing else self._register


def parse(message: Register) -> RegisteredRank:
    """The registration in a Register message.

    Raises:
        RequestError: a value is wrong.
    """
    if message.version != PROTOCOL_VERSION:
        raise RequestError(
            f"register.version is {message.version}; this daemon supports {PROTOCOL_VERSION}: "
            "run trainer and daemon from one build"
        )
    layout = _layout(message.layout)
    orders = message.replicas
    if orders.bytes_per_s < 0:
        raise RequestError(
            f"register.replicas is {orders!r}; give target and source (host:port or empty) and "
            "bytes_per_s of 0 or more"
        )
    registration = RegisteredRank(
        **messages.rank_values(message),
        layout=layout,
        digest=layout.digest(),
        layout_info=message.layout_info,
        replica_target=orders.target,
        replica_source=orders.source,
        replica_bytes_per_s=orders.bytes_per_s,
    )
    _check(registration)
    return registration


def _layout(values: dict[str, Any]) -> ShardLayout:
    try:
        return layout_from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"register.layout is not a layout: {error}") from error


def _check(given: RegisteredRank) -> None:
    if not is_dns_label(given.job):
        raise RequestError(f"register.job {given.job!r} is not a DNS-1123 label")
    if not 0 <= given.max_write_mib_per_s < math.inf:
        raise RequestError(
            f"register.max_write_mib_per_s is {given.max_write_mib_per_s}; give 0 or more"
        )
    if not 0 <= given.max_step_slowdown <= 1:
        raise RequestError(f"register.max_step_slowdown is {given.max_step_slowdown}; give 0 to 1")
    if given.attempt < 1:
        raise RequestError(f"register.attempt is {given.attempt}; attempts count from 1")
    if not 0 <= given.rank < given.world_size:
        raise RequestError(
            f"register.rank is {given.rank}; it must lie below world_size {given.world_size}"
        )
    if given.slots != 0 and not LEAST_SLOTS <= given.slots <= MOST_SLOTS:
        raise RequestError(
            f"register.slots is {given.slots}; "
            f"give {LEAST_SLOTS} to {MOST_SLOTS}, or 0 for the default"
        )
    if not 1 <= given.in_flight <= MOST_IN_FLIGHT:
        raise RequestError(f"register.in_flight is {given.in_flight}; give 1 to {MOST_IN_FLIGHT}")
    if not 1 <= given.local_ranks <= MOST_LOCAL_RANKS:
        raise RequestError(
            f"register.local_ranks is {given.local_ranks}; give 1 to {MOST_LOCAL_RANKS}"
        )
    if given.largest_slot_bytes < 0:
        raise RequestError(
            f"register.largest_slot_bytes is {given.largest_slot_bytes}; give 0 or more"
        )
    if given.uri:
        open_storage(given.uri)  # no I/O: refuses a scheme that this node cannot use
        if not given.committer_endpoint:
            raise RequestError(
                "register.committer_endpoint is empty; a checkpoint uri requires a committer"
            )
