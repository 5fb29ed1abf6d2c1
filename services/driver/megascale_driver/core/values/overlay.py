"""Maps with cheap copies: a decision at ten thousand nodes costs only what it touches.

Note [Overlay maps]
~~~~~~~~~~~~~~~~~~~
The state is a value, so every decision makes a new map of nodes, and a copy of ten thousand entries
for each event would cost more than the event. :class:`Layers` is a value made of two dicts: a large
base that many states share, and a small layer of what changed since. A read looks into the layer
first. :class:`Working` is the copy that one event changes; freezing it gives the next value, whose
layer is the old one plus the changes. When a layer has more than ``LAYER`` keys, it is merged into
a new base, so one full copy is spread over that many changes. The order is that of a dict: by
insertion, and a changed key keeps its place.

A comparison of two states profits in the same way (:func:`changed_keys`). A map remembers the keys
that changed in the last ``TRAIL`` maps before it, so that two states a few events apart are
compared in these keys alone. Older pairs often share a base, or one base was made from the other;
then only the keys of their layers are compared.

A merge happens inside a read and is invisible: it replaces base and layer by an equal pair. Threads
may read one value at the same time, without a lock, because the three fields are written in one
order (origin, base, layer) and read in the reverse one (:meth:`Layers._parts`).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any, Final, TypeVar, overload

# keys. A decision with its comparison takes 17 us at 1,536 nodes (with 512 keys: 49), and 50 us at
# 12,500 nodes (56).
LAYER = 128

TRAIL = 8  # earlier maps to which a map knows the difference: as many as most commits have events

V = TypeVar("V")
T = TypeVar("T")


class _Gone:
    """In a layer: the key of the base is no longer there."""


_GONE: Final = _Gone()


class Layers(Mapping[str, V]):
    """A map that never changes. Reading all of it merges its layers, which cannot be seen."""

    __slots__ = ("_base", "_layer", "_length", "_mark", "_origin", "_trail")

    def __init__(
        self,
        base: dict[str, V],
        layer: dict[str, V | _Gone] | None = None,
        origin: tuple[dict[str, V], tuple[str, ...]] | None = None,
        trail: tuple[tuple[object, tuple[str, ...]], ...] = (),
    ) -> None:
        self._base = base
        self._layer: dict[str, V | _Gone] = layer if layer is not None else {}
        # The base before this one, and the keys in which the two may differ.
        self._origin = origin
        # The newest maps before this one: the mark of each, and the keys that changed after it.
        self._mark = object()
        self._trail = trail
        self._length = -1  # -1: not counted yet
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
        if self._length < 0:
            layer, base, _ = self._parts()
            count = len(base)
            for key, value in layer.items():
                count += (not isinstance(value, _Gone)) - (key in base)
            self._length = count
        return self._length

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
        if not changes:
            return self
        layer, base, origin = self._parts()
        trail = (*self._trail[1 - TRAIL :], (self._mark, tuple(changes)))
        return Layers(base, {**layer, **changes}, origin, trail)

    def changed_since(self, old: Layers[V]) -> dict[str, None] | None:
        """The keys that changed since an older map; None if that map is no longer remembered."""
        for index, (mark, _) in enumerate(self._trail):
            if mark is old._mark:
                return {key: None for _, keys in self._trail[index:] for key in keys}
        return None

    def _parts(
        self,
    ) -> tuple[dict[str, V | _Gone], dict[str, V], tuple[dict[str, V], tuple[str, ...]] | None]:
        """Layer, base and origin, read in the one order that a concurrent merge allows.

        A merge sets the origin, then the base, then the layer. So read the layer first: if it is
        still the old one, it has whatever the base may lack; if it is the new, empty one, base and
        origin were set before it. See Note [Overlay maps].
        """
        layer = self._layer
        base = self._base
        return layer, base, self._origin

    def _merge(self) -> dict[str, V]:
        layer, base, _ = self._parts()
        if layer:
            # Copied: other states share the old base.
            merged = dict(base)
            for key, value in layer.items():
                if isinstance(value, _Gone):
                    merged.pop(key, None)
                else:
                    merged[key] = value
            # Another thread may read between these writes: their order is that of Note [Overlay
            # maps].
            self._origin = base, tuple(layer)
            self._base = merged
            self._layer = {}
            return merged
        return base


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
        """The map as a value; the map before, if nothing was changed."""
        return self._before.updated(self._changes)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys for which the two maps hold different values, compared by identity.

    If the maps are only a few events apart, only the keys that these events changed are compared,
    in event order. If they share a base, or one base was made from the other, only the keys of
    their layers are. Otherwise the order is that of ``new``, with removed keys last.
    """
    if old is new:
        return ()
    wanted: Mapping[str, Any] | None = None
    if isinstance(old, Layers) and isinstance(new, Layers):
        wanted = new.changed_since(old)
        if wanted is None:
            wanted = _between(old, new)
    if wanted is None:
        wanted = {**new, **dict.fromkeys(key for key in old if key not in new)}
    return tuple(key for key in wanted if old.get(key) is not new.get(key))


def _between(old: Layers[Any], new: Layers[Any]) -> Mapping[str, Any] | None:
    """The keys in which two maps can differ; None if they have no base in common."""
    old_layer, old_base, old_origin = old._parts()
    new_layer, new_base, new_origin = new._parts()
    if old_base is new_base:
        return {**old_layer, **new_layer}
    if new_origin is not None and new_origin[0] is old_base:
        return {**old_layer, **dict.fromkeys(new_origin[1]), **new_layer}
    if old_origin is not None and old_origin[0] is new_base:
        return {**old_layer, **dict.fromkeys(old_origin[1]), **new_layer}
    return None
