"""A worker's registration for its rank, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megascale_checkpoint.staging import LEAST_SLOTS, MOST_SLOTS
from megascale_checkpoint.storage import open_storage
from megascale_common.job.names import is_dns_label
from megascale_common.node.framing import PROTOCOL_VERSION
from megascale_common.service.errors import RequestError
from megascale_common.sizes.checkpoint_layout import ShardLayout, layout_from_dict

T = TypeVar("T")


def field(message: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A field of a message.

    Raises:
        RequestError: the field is absent or has another type.
    """
    value = message.get(name)
    # In JSON true is no number, but in Python bool is an int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(
            f"{message.get('kind')}.{name} is {value!r}; it must be of type {kind.__name__}"
        )
    return value


@dataclass(frozen=True, slots=True)
class RegisteredRank:
    """One rank of one attempt.

    Attributes:
        uri: the job's checkpoint folder; empty keeps snapshots in memory only.
        committer_endpoint: host:port of the attempt's committer.
        slots: how many slots the rank gets; 0 lets the daemon choose.
        layout: what the rank's slots hold.
        digest: the layout's digest.
        layout_info: the sizes of tp, cp, dp and pp, for the manifest.
    """

    job: str
    attempt: int
    rank: int
    world_size: int
    uri: str
    committer_endpoint: str
    slots: int
    layout: ShardLayout
    digest: str
    layout_info: dict[str, int]


def parse(message: Mapping[str, Any]) -> RegisteredRank:
    """The registration in a Register message of megascale_common.node.messages.

    Raises:
        RequestError: a field is absent or wrong.
    """
    version = message.get("version")
    if version != PROTOCOL_VERSION:
        raise RequestError(
            f"register.version is {version}; this daemon supports {PROTOCOL_VERSION}: "
            "run trainer and daemon from one build"
        )
    layout = _layout(field(message, "layout", dict))
    registration = RegisteredRank(
        job=field(message, "job", str),
        attempt=field(message, "attempt", int),
        rank=field(message, "rank", int),
        world_size=field(message, "world_size", int),
        uri=field(message, "uri", str),
        committer_endpoint=field(message, "committer_endpoint", str),
        slots=field(message, "slots", int),
        layout=layout,
        digest=layout.digest(),
        layout_info=field(message, "layout_info", dict),
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
    if given.uri:
        open_storage(given.uri)
        if not given.committer_endpoint:
            raise RequestError(
                "register.committer_endpoint is empty; a checkpoint uri requires a committer"
            )
