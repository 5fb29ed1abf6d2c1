"""Facts of a job's fields, as metadata of the dataclasses' fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Marks a field that earlier builds do not know. It is stored only where it is not at its default. A
# stored job takes the default of the build that reads it: that of such a field changes only where
# the numbers of a run do not change with it.
ADDED: Mapping[str, Any] = {"added": True}
WIDE: Mapping[str, Any] = {"bits": 64}  # of a whole number; the others have 32
