"""Optimizers by name: those of this folder, and those that installed packages register.

A module of this folder with an ``OPTIMIZER`` is an optimizer of its own name. A package registers
others through the entry-point group ``megascale.optimizers``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib import metadata
from typing import Any, cast

from megascale_job.sizes.checkpoint_layout import MASTER, is_state_name
from megascale_trainer import optimizer
from megascale_trainer.optimizer.interface import OptimizerFactory

ENTRY_POINT_GROUP = "megascale.optimizers"


def optimizer_factory(name: str) -> OptimizerFactory:
    """The optimizer that ``optimizer.name`` names on this node.

    Raises:
        ValueError: no such optimizer, it cannot be imported, or its states are badly named; the
            message names the field and the remedy.
    """
    found = dict(built_in()).get(name) or _installed(name)
    names = found.state_names
    well_named = names[:1] == (MASTER,) and all(map(is_state_name, names))
    if not well_named or len(set(names)) != len(names):
        raise ValueError(
            f"trainer.optimizer.name: {name!r} declares the states {', '.join(names) or 'none'}: "
            "its package must declare different names of a-z, 0-9 and '_', the first of them "
            f"{MASTER!r}"
        )
    return found


def built_in() -> Iterator[tuple[str, OptimizerFactory]]:
    """The optimizers of this folder with their names; imports them."""
    for module in pkgutil.iter_modules(optimizer.__path__):
        found = importlib.import_module(f"{optimizer.__name__}.{module.name}")
        if hasattr(found, "OPTIMIZER"):
            yield module.name, found.OPTIMIZER


def _installed(name: str) -> OptimizerFactory:
    registered = metadata.entry_points(group=ENTRY_POINT_GROUP)
    chosen = {entry.value: entry for entry in registered.select(name=name)}
    if not chosen:
        known = sorted({*registered.names, *(name for name, _ in built_in())})
        raise ValueError(
            f"trainer.optimizer.name: {name!r} is not installed on this node; known here: "
            f"{', '.join(known)}; install the package that registers it under "
            f"{ENTRY_POINT_GROUP} on every node, or use one of these"
        )
    if len(chosen) > 1:
        raise ValueError(
            f"trainer.optimizer.name: {name!r} is registered more than once "
            f"({', '.join(sorted(chosen))}); uninstall all but one of these packages"
        )
    [entry] = chosen.values()
    try:
        factory: Any = entry.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"trainer.optimizer.name: {name!r} cannot be imported from {entry.value}: {error}; "
            "repair or reinstall its package on this node"
        ) from error
    return cast(OptimizerFactory, factory)
