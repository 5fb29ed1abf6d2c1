"""Write the table of events in docs/operations.md, from the records of the driver's core.

python -m docs.generate_events [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from docs import pages
from megascale_driver.core import machine
from megascale_driver.core.values.reasons import REASONS

PAGE = pages.DOCS / "operations.md"


def text() -> str:
    """One row for each reason; loading the state machine has loaded every detector."""
    assert callable(machine.step)
    rows = ((f"`{one.name}`", one.meaning, one.remedy) for one in REASONS.values())
    return "\n".join(pages.table(("reason", "meaning", "what to do"), rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; with --check only compare it."""
    return pages.run(PAGE, text, arguments)


if __name__ == "__main__":
    sys.exit(main())
