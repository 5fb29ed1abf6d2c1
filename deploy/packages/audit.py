"""Ask a source of advisories about every pinned requirement: `make audit`.

With --installed also about what the running environment holds: what the pins bring with them.

The source speaks OSV's interface (https://google.github.io/osv.dev/post-v1-querybatch/), such as
api.osv.dev or a mirror. The last line of stdout is one JSON object. Exit status:

    0  the source answered about every pin, and knows no advisory that affects one
    1  it knows some
    2  it could not be reached, or its answer cannot be trusted: nothing is known about any pin

With the pins goes a release with a well-known advisory. A source that knows none about that one,
such as an empty mirror or a portal that answers anything with 200, is not believed.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from deploy.packages.pins import Pin, normalised, pins

SOURCE = "https://api.osv.dev"
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 16 << 20  # some 70 pins answer with a few KiB
# Unsafe loading by default, CVE-2020-1747 and CVE-2020-14343: in every database since 2021.
KNOWN_BAD = Pin("pyyaml", "5.3")


class NotCheckedError(Exception):
    """Nothing is known about the pins; the text says why."""


def advisories(found: Sequence[Pin], source: str, timeout_s: float = TIMEOUT_S) -> dict[Pin, Any]:
    """The ids of the advisories that affect each pin; pins without any are left out.

    Raises:
        NotCheckedError: the source cannot be reached, or gave no answer that can be trusted.
    """
    asked = [*found, KNOWN_BAD]
    answer = _post(f"{source.rstrip('/')}/v1/querybatch", _queries(asked), timeout_s)
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != len(asked):
        raise NotCheckedError(f"{source} did not answer each of the {len(asked)} questions")
    try:
        ids = [[each["id"] for each in result.get("vulns") or ()] for result in results]
    except (AttributeError, KeyError, TypeError):
        raise NotCheckedError(f"{source} does not answer in OSV's form") from None
    if not ids[-1]:
        raise NotCheckedError(
            f"{source} knows no advisory about {KNOWN_BAD.name} {KNOWN_BAD.version}, which has "
            "well-known ones: its answers about other packages prove nothing"
        )
    return {pin: affecting for pin, affecting in zip(found, ids, strict=False) if affecting}


def _queries(asked: Sequence[Pin]) -> dict[str, Any]:
    return {
        "queries": [
            # Of a local version (2.13.0+cpu) advisories name the public part.
            {
                "package": {"name": pin.name, "ecosystem": "PyPI"},
                "version": pin.version.partition("+")[0],
            }
            for pin in asked
        ]
    }


def _post(address: str, body: dict[str, Any], timeout_s: float) -> Any:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
        raise NotCheckedError(f"{address} cannot be reached: {error}") from error
    if len(text) > MAX_ANSWER_BYTES:
        raise NotCheckedError(f"{address} answered more than {MAX_ANSWER_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except ValueError:
        raise NotCheckedError(f"{address} did not answer with JSON") from None


def installed() -> set[Pin]:
    """What this environment holds, the project itself left out."""
    found = {
        Pin(normalised(each.metadata["Name"]), each.version) for each in metadata.distributions()
    }
    return {pin for pin in found if pin.name != "megascale"}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", default=SOURCE, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="default: %(default)s")
    parser.add_argument("--installed", action="store_true", help="and what is installed here")
    options = parser.parse_args(arguments)
    found = pins()
    if options.installed:
        known = {(pin.name, pin.version) for pin in found}
        found += sorted(pin for pin in installed() if (pin.name, pin.version) not in known)
    report: dict[str, Any] = {"source": options.source, "packages": len(found), "checked": False}
    try:
        affected = advisories(found, options.source, options.timeout_s)
    except NotCheckedError as error:
        print(f"NOT CHECKED: {error}", file=sys.stderr)
        print(
            "No pin was checked, which is no sign that they are free of advisories: run it where "
            "the source can be reached, or give a mirror by --source",
            file=sys.stderr,
        )
        print(json.dumps({**report, "problem": str(error)}))
        return 2
    for pin, ids in affected.items():
        print(f"{pin.name} {pin.version}: {', '.join(ids)}", file=sys.stderr)
    named = {f"{pin.name}=={pin.version}": ids for pin, ids in affected.items()}
    print(json.dumps({**report, "checked": True, "affected": named}))
    return 1 if affected else 0


if __name__ == "__main__":
    sys.exit(main())
