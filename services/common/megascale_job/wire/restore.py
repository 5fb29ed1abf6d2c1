"""Converts a restore plan to and from its wire form, ``megascale.v1.RestorePlan``."""

from __future__ import annotations

from dataclasses import replace

from megascale.v1 import link_pb2, types_pb2
from megascale_job.restore import RestorePlan, RestoreSource

_PREFIX = "RESTORE_SOURCE_"


def source_to_proto(source: RestoreSource) -> types_pb2.RestoreSource.ValueType:
    """The enum value of ``source``."""
    return types_pb2.RestoreSource.Value(f"{_PREFIX}{source.name}")


def from_proto(plan: link_pb2.RestorePlan) -> RestorePlan:
    """The plan in ``plan``; a source that is not set is NONE.

    Raises:
        ValueError: this version does not know the source.
    """
    source = RestoreSource.NONE
    if plan.source:
        source = RestoreSource[types_pb2.RestoreSource.Name(plan.source).removeprefix(_PREFIX)]
    return RestorePlan(
        source,
        plan.step,
        plan.written_by_attempt,
        plan.manifest_uri,
        plan.manifest_xxh3,
        older=tuple(replace(from_proto(older), checked=False) for older in plan.older),
    )


def to_proto(plan: RestorePlan) -> link_pb2.RestorePlan:
    """The wire form of ``plan``."""
    return link_pb2.RestorePlan(
        source=source_to_proto(plan.source),
        step=plan.step,
        written_by_attempt=plan.written_by_attempt,
        manifest_uri=plan.manifest_uri,
        manifest_xxh3=plan.manifest_xxh3,
        older=map(to_proto, plan.older),
    )
