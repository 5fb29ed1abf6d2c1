"""A distribution as pip leaves it: modules and a dist-info folder with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path,
    package: str,
    code: str,
    entry_points: Mapping[str, str],
    group: str = "megascale.diagnostics",
) -> None:
    """Put ``package`` into ``folder``, which belongs on ``sys.path``.

    Args:
        code: text of its one module, which is named after the package.
        entry_points: what it adds to ``group`` by name, each as ``Class`` of that module.
    """
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {module}:{value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
