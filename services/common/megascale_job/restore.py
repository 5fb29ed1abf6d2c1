"""The restore plan of all ranks of an attempt. The committer decides it once.

The driver keeps it in etcd, the agent passes it to the workers as JSON, the checkpoint daemon
writes it to the commit log; none of them changes it. The protobuf form is in
:mod:`megascale_job.wire.restore`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


class RestoreSource(enum.StrEnum):
    """Source of the state. NONE is a start from initial values."""

    NONE = "none"
    MEMORY = "memory"
    STORAGE = "storage"

    @classmethod
    def _missing_(cls, value: object) -> RestoreSource | None:
        # Version 0.1.0 of the driver wrote the names in capitals, and etcd can still have them.
        lower = str(value).lower()
        return cls(lower) if lower != value and lower in cls._value2member_map_ else None


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """``step`` as attempt ``written_by_attempt`` wrote it; attempt 0 if another job wrote it.

    At step 0 only the parameters are taken, from a checkpoint of any step of another job.

    ``manifest_uri`` is the manifest of a step on storage; a step in memory may have none. If it has
    one, ranks without the step in memory read storage. ``manifest_xxh3`` is the manifest's hash in
    the COMMIT record, "" if unknown (a plan of an earlier version).

    ``older`` are committed checkpoints, newest first, to which the attempt falls back if the state
    turns out to be damaged. The committer has not checked their files (``checked``).
    """

    source: RestoreSource = RestoreSource.NONE
    step: int = 0
    written_by_attempt: int = 0
    manifest_uri: str = ""
    manifest_xxh3: str = ""
    older: tuple[RestorePlan, ...] = ()
    checked: bool = True

    def candidates(self) -> tuple[RestorePlan, ...]:
        """This plan, then the older ones, each with those after it as its older ones."""
        return tuple(
            replace(plan, older=self.older[number:])
            for number, plan in enumerate((self, *self.older))
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": self.source.value,
            "step": self.step,
            "written_by_attempt": self.written_by_attempt,
            "manifest_uri": self.manifest_uri,
            "manifest_xxh3": self.manifest_xxh3,
            "older": [plan.to_mapping() for plan in self.older],
            "checked": self.checked,
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RestorePlan:
        """The inverse of :meth:`to_mapping`.

        Raises:
            ValueError: a value is missing or has another type; names the field.
        """
        try:
            source = RestoreSource(values["source"])
            step, attempt = values["step"], values["written_by_attempt"]
            manifest_uri = values["manifest_uri"]
        except (KeyError, ValueError) as error:
            raise ValueError(f"restore plan {dict(values)!r}: {error}") from error
        if not (isinstance(step, int) and isinstance(attempt, int)):
            raise ValueError(f"restore plan {dict(values)!r}: step and attempt are whole numbers")
        manifest_xxh3 = str(values.get("manifest_xxh3", ""))
        # Absent in plans of earlier builds.
        older = tuple(cls.from_mapping(plan) for plan in values.get("older", ()))
        checked = bool(values.get("checked", True))
        return cls(source, step, attempt, str(manifest_uri), manifest_xxh3, older, checked)
