"""Base classes of the client's messages: read-only views, and enums that print as names.

A view shows the fields of one message of ``megascale.v1``. An enum is a member of its class here
(``job.phase`` prints ``RUNNING``) and compares with the number on the wire; a nested message that
has such a field is a view again; everything else is what the message holds. ``view.proto`` is the
message itself. The classes are in :mod:`megascale_client.messages`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from google.protobuf.message import Message

from megascale_client.errors import InvalidRequest

_ENUMS: dict[str, type[NamedEnum]] = {}
_VIEWS: dict[str, type[View]] = {}


class NamedEnum(enum.IntEnum):
    """An enum of the wire whose members are shown by name, without the prefix of the proto."""

    def __init_subclass__(cls) -> None:
        _ENUMS[cls.__name__] = cls

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

    @classmethod
    def of(cls, given: int | str) -> Self:
        """The member of a number, or of a name in any case. Raises InvalidRequest."""
        if not isinstance(given, str):
            return cls(given)
        try:
            return cls[given.upper()]
        except KeyError:
            known = ", ".join(member.name for member in cls if member)
            raise InvalidRequest(f"{given!r} is unknown; give one of {known}") from None

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        # A later version of the driver can send a value that this client has no name for.
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"VALUE_{value}"
        member._value_ = value
        return member


class View:
    """A message, read-only; ``HasField`` and ``WhichOneof`` are those of the message."""

    __slots__ = ("proto",)

    proto: Any
    _TYPE: ClassVar[type[Message]]

    def __init_subclass__(cls, of: type[Message]) -> None:
        cls._TYPE = of
        _VIEWS[cls.__name__] = cls

    def __init__(self, message: Any = None) -> None:
        object.__setattr__(self, "proto", self._TYPE() if message is None else message)

    def HasField(self, name: str) -> bool:
        """Whether an optional field is set."""
        return bool(self.proto.HasField(name))

    def WhichOneof(self, group: str) -> str | None:
        """Name of the field that is set in a group of which one is."""
        found: str | None = self.proto.WhichOneof(group)
        return found

    if not TYPE_CHECKING:  # the subclasses declare their fields

        def __getattr__(self, name: str) -> Any:
            if name == "proto":  # of an instance that was never initialised
                raise AttributeError(name)
            return _shown(self.proto, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is read-only: {name!r} cannot be set")

    def __eq__(self, other: object) -> bool:
        return bool(self.proto == (other.proto if isinstance(other, View) else other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.proto,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(str(self.proto).split())})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._TYPE.DESCRIPTOR.fields_by_name]


def _shown(message: Message, name: str) -> Any:
    value = getattr(message, name)
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None:  # a method
        return value
    if field.enum_type is not None:
        return _ENUMS[field.enum_type.name](value) if field.enum_type.name in _ENUMS else value
    view = _VIEWS.get(field.message_type.name) if field.message_type is not None else None
    if view is None:
        return value
    return view(value) if isinstance(value, Message) else [view(item) for item in value]
