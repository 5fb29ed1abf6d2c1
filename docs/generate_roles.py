"""Write the table of RPCs and roles in docs/security.md, from the table that servers ask.

python -m docs.generate_roles [--check]
"""

from __future__ import annotations

import sys

from docs import pages
from megascale_common.service.identity.gate import ALLOWED
from megascale_common.service.identity.peers import Role

PAGE = pages.DOCS / "security.md"


def text() -> str:
    """One row for each RPC, one column for each role."""
    rows = []
    for method, roles in ALLOWED.items():
        service, _, name = method.strip("/").rpartition("/")
        marks = ["yes" if role in roles else "-" for role in Role]
        rows.append((service.rpartition(".")[2], f"`{name}`", *marks))
    return "\n".join(pages.table(("service", "RPC", *Role), rows))


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
