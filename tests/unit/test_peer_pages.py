"""The pages for those who come from other trainers name fields of a job that exist."""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest
from docs.pages import REPOSITORY

from megascale_job.config import TRAINER_SECTIONS, JobConfig

pytestmark = pytest.mark.check


def exists(path: str) -> bool:
    """Whether a job file has the field ``path``, such as trainer.model.layers."""
    first, *rest = path.split(".")
    if (rest[0] if first == "trainer" else "") not in (*TRAINER_SECTIONS, ""):
        return False
    kind: typing.Any = JobConfig
    for name in rest if first == "trainer" else (first, *rest):
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in hints:
            return False
        kind = hints[name]
    return True


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_every_field_on_our_side_of_the_tables_exists(name: str) -> None:
    page = (REPOSITORY / "docs" / f"coming-from-{name}.md").read_text()
    rows = [line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| ")]
    found = re.findall(r"`((?:trainer|checkpoint|recovery)\.[a-z_.]+)`", "\n".join(rows))
    assert len(found) > 25
    assert [path for path in found if not exists(path)] == []
    assert not exists("trainer.model.sequence_lengths") and not exists("trainer.checkpoint.uri")
