"""Write the table of clients/grpcurl/README.md from the protos and the scripts.

python -m docs.generate_grpcurl [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from docs import pages
from docs.api_examples import SCRIPTS, script
from docs.api_services import services

PAGE = SCRIPTS / "README.md"
_FIRST_SENTENCE = re.compile(r".+?\.(?= |$)")


def text() -> str:
    """One row per call: its script with the arguments, and the first sentence of its comment."""
    return "\n".join(pages.table(("Call", "Example", "Purpose"), _rows()))


def _rows() -> Iterator[tuple[str, str, str]]:
    for service in services():
        yield (f"**{service.name}**", "", "")
        for call in service.calls:
            found = script(service.name, call.name)
            path = found.path.relative_to(SCRIPTS)
            purpose = _FIRST_SENTENCE.match(found.purpose)
            if purpose is None:
                raise ValueError(f"{path}: begin it with a comment of whole sentences")
            yield (call.name, f"[{path}]({path}) {found.arguments}".rstrip(), purpose[0])


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
