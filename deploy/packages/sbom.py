"""Write deploy/packages/sbom.cdx.json: the pinned requirements as a CycloneDX bill of materials.

Without serial number and time, so that the same pins give the same file. --check only compares.
From the repository's root:

python -m deploy.packages.sbom [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from deploy.packages.pins import REPOSITORY, Pin, pins

SBOM = Path(__file__).with_name("sbom.cdx.json")
_DEVELOPMENT = frozenset({"dev", "docs", "export"})


def sbom() -> dict[str, Any]:
    """The whole document (CycloneDX 1.5)."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    found = pins()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": [_component(pin) for pin in found],
        "dependencies": [
            {"ref": own, "dependsOn": [_purl(pin) for pin in found if pin.extras]},
        ],
    }


def _purl(pin: Pin) -> str:
    return f"pkg:pypi/{pin.name}@{pin.version}"


def _scope(pin: Pin) -> str:
    """required: base install; optional: an extra; excluded: tests and pages alone."""
    if "" in pin.extras:
        return "required"
    return "optional" if set(pin.extras) - _DEVELOPMENT else "excluded"


def _component(pin: Pin) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": _purl(pin),
        "name": pin.name,
        "version": pin.version,
        "purl": _purl(pin),
        "scope": _scope(pin),
        "properties": [
            {"name": "megascale:extra", "value": extra} for extra in pin.extras if extra
        ],
    }


def main() -> int:
    """Write or compare the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only; status 1 if it differs")
    options = parser.parse_args()
    text = json.dumps(sbom(), indent=2) + "\n"
    if not options.check:
        SBOM.write_text(text)
    elif not SBOM.exists() or SBOM.read_text() != text:
        print(f"{SBOM.relative_to(REPOSITORY)} is out of date: run `make sbom`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
