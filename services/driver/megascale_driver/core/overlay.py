"""Maps that are copied by what changes: a decision at ten thousand nodes costs what it touches.

:class:`Layers` is a value: a large base that many states share, and a small layer of what changed
since. :class:`Working` is the copy that one event changes; freezing it gives the next value. A
layer that has grown to ``LAYER`` keys is merged into a new base, so the cost of a copy of all is
spread over as many changes. The order is that of a dict: by insertion, a changed key keeps its
place.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any, Final, TypeVar, overload

LAYER = 128  # keys: 17 us per decision and comparison at 1,536 nodes (512: 49), 50 (56) at 12,500

V = TypeVar("V")
T = TypeVar("T")


class _Gone:
    """In a layer: the key of the base is no longer there."""


_GONE: Final = _Gone()


class Layers(Mapping[str, V]):
    """A map that never changes; reading all of it merges its layers, which nobody can see."""

    __slots__ = ("_base", "_layer")

    def __init__(self, base: dict[str, V], layer: dict[str, V | _Gone] | None = None) -> None:
        self._base = base
        self._layer: dict[str, V | _Gone] = layer if layer is not None else {}
        if len(self._layer) > LAYER:
            self._merge()

    def __getitem__(self, key: str) -> V:
        found = self._layer.get(key)
        if found is None:
            return self._base[key]
        if isinstance(found, _Gone):
            raise KeyError(key)
        return found

    @overload
    def get(self, key: str, /) -> V | None: ...

    @overload
    def get(self, key: str, /, default: V | T) -> V | T: ...

    def get(self, key: str, /, default: Any = None) -> Any:
        """The value of ``key``, else ``default``."""
        found = self._layer.get(key)
        if found is None:
            return self._base.get(key, default)
        return default if isinstance(found, _Gone) else found

    def __contains__(self, key: object) -> bool:
        found = self._layer.get(key)  # type: ignore[call-overload]
        return key in self._base if found is None else not isinstance(found, _Gone)

    def __len__(self) -> int:
        count = len(self._base)
        for key, value in self._layer.items():
            count += (not isinstance(value, _Gone)) - (key in self._base)
        return count

    def __iter__(self) -> Iterator[str]:
        return iter(self._merge())

    def keys(self) -> KeysView[str]:
        """All keys."""
        return self._merge().keys()

    def values(self) -> ValuesView[V]:
        """All values."""
        return self._merge().values()

    def items(self) -> ItemsView[str, V]:
        """All keys with their values."""
        return self._merge().items()

    def __repr__(self) -> str:
        return f"Layers({self._merge()!r})"

    def updated(self, changes: Mapping[str, V | _Gone]) -> Layers[V]:
        """The map with all ``changes`` of a :class:`Working` copy."""
        return Layers(self._base, {**self._layer, **changes}) if changes else self

    def _merge(self) -> dict[str, V]:
        if self._layer:
            # A new base: the old one belongs to other states as well.
            merged = dict(self._base)
            for key, value in self._layer.items():
                if isinstance(value, _Gone):
                    merged.pop(key, None)
                else:
                    merged[key] = value
            self._base, self._layer = merged, {}
        return self._base


class Working(MutableMapping[str, V]):
    """One event's copy of a map: reads fall through to the map before, writes stay here."""

    __slots__ = ("_before", "_changes")

    def __init__(self, before: Mapping[str, V]) -> None:
        self._before: Layers[V] = before if isinstance(before, Layers) else Layers(dict(before))
        self._changes: dict[str, V | _Gone] = {}

    def __getitem__(self, key: str) -> V:
        found = self._changes.get(key)
        if found is None:
            return self._before[key]
        if isinstance(found, _Gone):
            raise KeyError(key)
        return found

    @overload
    def get(self, key: str, /) -> V | None: ...

    @overload
    def get(self, key: str, /, default: V | T) -> V | T: ...

    def get(self, key: str, /, default: Any = None) -> Any:
        """The value of ``key``, else ``default``."""
        found = self._changes.get(key)
        if found is None:
            return self._before.get(key, default)
        return default if isinstance(found, _Gone) else found

    def __contains__(self, key: object) -> bool:
        found = self._changes.get(key)  # type: ignore[call-overload]
        return key in self._before if found is None else not isinstance(found, _Gone)

    def __setitem__(self, key: str, value: V) -> None:
        self._changes[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._changes[key] = _GONE

    def __len__(self) -> int:
        return len(self.frozen())

    def __iter__(self) -> Iterator[str]:
        return iter(self.frozen())

    def keys(self) -> KeysView[str]:
        """All keys, as they are now."""
        return self.frozen().keys()

    def values(self) -> ValuesView[V]:
        """All values, as they are now."""
        return self.frozen().values()

    def items(self) -> ItemsView[str, V]:
        """All keys with their values, as they are now."""
        return self.frozen().items()

    @property
    def touched(self) -> tuple[str, ...]:
        """The keys that were set or removed, in the order of their first change."""
        return tuple(self._changes)

    def frozen(self) -> Layers[V]:
        """The map as a value; the map before where nothing was changed."""
        return self._before.updated(self._changes)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of which the two maps may hold different values, in the order of ``new``.

    Keys that were removed come last. Two states that are a few events apart share their base, and
    then only the keys of their layers are looked at.
    """
    if old is new:
        return ()
    if isinstance(old, Layers) and isinstance(new, Layers) and old._base is new._base:
        wanted: Mapping[str, Any] = {**old._layer, **new._layer}
    else:
        wanted = {**new, **dict.fromkeys(key for key in old if key not in new)}
    return tuple(key for key in wanted if old.get(key) is not new.get(key))
