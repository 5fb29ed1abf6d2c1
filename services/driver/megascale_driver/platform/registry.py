"""Which platforms there are by name: those built in, and those of installed packages.

A package registers one under the entry-point group ``megascale.platforms``: what makes a
:class:`Platform` without an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import cast

from megascale_common.service.errors import OptionError
from megascale_driver.platform.interface import Platform

GROUP = "megascale.platforms"
# Imported when asked for: an installation may lack what one of them needs.
_ROOM = "megascale_driver.platform"
BUILT_IN = {
    "kubernetes": f"{_ROOM}.kubernetes.platform:KubernetesPlatform",
    "local": f"{_ROOM}.local_platform:LocalPlatform",
    "slurm": f"{_ROOM}.slurm:SlurmPlatform",
}


def known_platforms() -> dict[str, str]:
    """The names that :func:`open_platform` takes, each with the package that it comes from."""
    installed = metadata.entry_points(group=GROUP)
    found = {entry.name: entry.dist.name if entry.dist else "" for entry in installed}
    return found | dict.fromkeys(BUILT_IN, "megascale")


def open_platform(name: str) -> Platform:
    """Return the platform called ``name``; it asks nobody before its first verb.

    Raises:
        OptionError: there is none, two packages have one, or it cannot be imported.
    """
    if name in BUILT_IN:
        entries = [metadata.EntryPoint(name, BUILT_IN[name], GROUP)]
    else:
        entries = list(metadata.entry_points(group=GROUP, name=name))
    if len({entry.value for entry in entries}) != 1:
        known = ", ".join(sorted(known_platforms()))
        count = "several installed packages have" if entries else "there is no platform"
        raise OptionError(f"platform: {count} {name!r}; known: {known}")
    try:
        return cast("Callable[[], Platform]", entries[0].load())()
    except ImportError as error:
        extra = f"; try `pip install megascale[{name}]`" if name == "kubernetes" else ""
        raise OptionError(f"platform {name!r} cannot be imported: {error}{extra}") from None
