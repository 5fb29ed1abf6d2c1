"""Converts plain values to the tree of a job and back; reports all problems at once.

Each problem has field and remedy. YAML, JSON and protobuf give the same plain values: a list can be
given for a tuple, a whole number for a float, and None means that a field is not set.
:func:`from_mapping` reads and checks a submitted job, :func:`from_accepted` reads one that was
accepted before, and :func:`given` keeps only the fields that a file sets, for the wire.
:func:`to_json` makes the canonical form, which the driver stores and workers get.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import re
import reprlib
import typing
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, Literal

from megascale_job.config import TRAINER_SECTIONS, JobConfig, validate
from megascale_job.problems import JobError, JobProblem
from megascale_job.sections.data import NO_SOURCES
from megascale_job.sections.fields import REMOVED

_SHOWN_CHARS = 60
# Bounded, because with aliases a small YAML file can have huge values.
_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = 2 * _SHOWN_CHARS
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _SHOWN_CHARS
# YAML 1.1 reads 3e-4 (without a point) as text, but it is meant as a number.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_ROOT = [field.name for field in dataclasses.fields(JobConfig)]
_AT_ROOT = [name for name in _ROOT if name not in TRAINER_SECTIONS]


def from_mapping(values: Any) -> JobConfig:
    """The job in plain values of YAML, JSON or protobuf, fully checked.

    A job file nests the trainer's sections under ``trainer``; they can also be at the root.

    Raises:
        JobError: lists every problem by field: unknown or missing fields, wrong types, and values
            that cannot run (:mod:`megascale_job.config`).
    """
    reader = _Reader()
    config = reader.job(values)
    if config is None:
        raise JobError([*reader.problems, *_no_sources(values)])
    if refused := validate(config):
        raise JobError(refused, config)
    return config


def from_accepted(values: Any) -> JobConfig:
    """The job in plain values that were checked when it was submitted; only types are checked.

    So a job that an earlier version accepted continues even if this version would refuse it.

    Raises:
        JobError: fields that this version cannot read; lists each.
    """
    reader = _Reader(accepted=True)
    config = reader.job(values)
    if config is None:
        raise JobError(reader.problems)
    return config


def given(values: Any) -> dict[str, Any]:
    """The fields that plain values set, converted to their types, nested as in a job file.

    Defaults are not filled in, so that the driver's apply, and missing fields are left to the
    driver's check. Numbers and texts that a message cannot carry are refused.

    Raises:
        JobError: unknown fields, with a suggestion, and values of the wrong type.
    """
    reader = _Reader(given=True)
    found = reader.file(values)
    if reader.problems:
        raise JobError(reader.problems)
    return found


def from_json(text: str | bytes) -> JobConfig:
    """The job that :func:`to_json` wrote.

    Raises:
        JobError: not JSON, or fields that this version cannot read; lists each.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise JobError([JobProblem("job", f"not JSON: {error}", "submit the job again")]) from error
    return from_accepted(values)


def to_mapping(config: JobConfig) -> dict[str, Any]:
    """Plain values of ``config``, for :func:`from_mapping`; the trainer's sections at the root."""
    return dataclasses.asdict(config)


def to_json(config: JobConfig) -> str:
    """Canonical JSON of ``config``, without fields that are ADDED and at their defaults.

    A build refuses unknown fields, so that none is dropped silently. But during an update two
    builds lead in turn, and the earlier one must read what the newer one stores. So a field that
    the earlier build does not know is stored only if the job uses it.
    """
    return json.dumps(_stored(config), sort_keys=True, separators=(",", ":"))


def digest_of(text: bytes) -> str:
    """SHA-256 of a job's canonical JSON, in hexadecimal digits."""
    return hashlib.sha256(text).hexdigest()


def _stored(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if item.metadata.get("added") and value == _default(item):
            continue
        found[item.name] = _stored(value) if dataclasses.is_dataclass(value) else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_stored(item) if dataclasses.is_dataclass(item) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


class _Reader:
    """Reads one job and collects ``problems``.

    With ``given``, sections are mappings of the fields that are set, else dataclasses of the tree.
    With ``accepted``, removed fields are read, because an earlier build may have stored them.
    """

    def __init__(self, *, given: bool = False, accepted: bool = False) -> None:
        self.problems: list[JobProblem] = []
        self._given = given
        self._accepted = accepted

    def job(self, values: Any) -> JobConfig | None:
        """The tree; None if there is a problem."""
        root, workload = self._split(values)
        built: dict[str, Any] = {}
        if root is not None:
            built |= self._fields(JobConfig, _AT_ROOT, root, "", ("trainer", *_ROOT))
        if workload is not None:
            built |= self._fields(JobConfig, TRAINER_SECTIONS, workload, "trainer")
        return None if self.problems else JobConfig(**built)

    def file(self, values: Any) -> dict[str, Any]:
        """The fields that a job file sets; trainer sections are only allowed under ``trainer``."""
        if not isinstance(values, Mapping):
            self._not_a_mapping("job", values, ("name", "trainer"))
            return {}
        root = {key: value for key, value in values.items() if key != "trainer"}
        built = self._fields(JobConfig, _AT_ROOT, root, "", (*_AT_ROOT, "trainer"))
        workload = values.get("trainer")
        if workload is not None and not isinstance(workload, Mapping):
            self._not_a_mapping("trainer", workload, TRAINER_SECTIONS)
        elif workload is not None:
            built["trainer"] = self._fields(JobConfig, TRAINER_SECTIONS, workload, "trainer")
        return built

    def _split(self, values: Any) -> tuple[Any, Any]:
        """The fields at the root of a job, and those that are, or belong, under ``trainer``.

        Each is None if it is not a mapping.
        """
        if not isinstance(values, Mapping):
            self._not_a_mapping("job", values, ("name", "trainer"))
            return None, None
        workload = values.get("trainer")
        if workload is None:  # report the fields that it needs, not itself
            workload = {}
        at_root = {key: values[key] for key in TRAINER_SECTIONS if key in values}
        root = {key: value for key, value in values.items() if key not in ("trainer", *at_root)}
        if not isinstance(workload, Mapping):
            self._not_a_mapping("trainer", workload, TRAINER_SECTIONS)
            return root, None
        for key in workload:
            if key in root or key in at_root:
                problem = "given outside `trainer` too"
                self._report(f"trainer.{key}", problem, "keep one of the two")
        # A field that is also at the root is reported as given twice, not as unknown here too.
        return root, {**{key: workload[key] for key in workload if key not in root}, **at_root}

    def _fields(
        self,
        cls: type[Any],
        names: Collection[str],
        values: Mapping[str, Any],
        path: str,
        suggested: Collection[str] = (),
    ) -> dict[str, Any]:
        """The fields ``names`` of the dataclass ``cls`` from ``values``, which are at ``path``.

        ``suggested`` are names to suggest for an unknown one, by default ``names``.
        """
        known = {
            field.name: field
            for field in dataclasses.fields(cls)
            if field.name in names or REMOVED in field.metadata
        }
        hints = _hints(typing.cast(Hashable, cls))
        built: dict[str, Any] = {}
        for key, value in values.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in known:
                self._report(where, "unknown field", _suggestion(str(key), suggested or names))
            elif value is None:
                continue  # `labels:` with nothing behind it is a field that is not set
            elif REMOVED in known[key].metadata and not self._accepted:
                if value != "":  # "" was the default, which changes nothing
                    self._report(where, "no longer supported", known[key].metadata[REMOVED])
            else:
                built[key] = self._value(hints[key], value, where, known[key].metadata)
        if self._given:
            return built
        for name, field in known.items():
            if name not in built and field.default is field.default_factory is dataclasses.MISSING:
                self._missing(hints[name], f"{path}.{name}" if path else name)
        return built

    def _missing(self, hint: Any, where: str) -> None:
        if dataclasses.is_dataclass(hint):  # report the fields that it needs, not itself
            self._value(hint, {}, where, {})
        elif hint is int:
            # A number that is 0 is absent on the wire, so no number without a default may be 0.
            remedy = "set it to at least 1: this field has no default"
            self._report(where, "missing or 0", remedy)
        else:
            self._report(where, "missing", "set it: this field has no default")

    def _section(self, cls: type[Any], values: Any, path: str) -> Any:
        names = [field.name for field in dataclasses.fields(cls) if REMOVED not in field.metadata]
        if not isinstance(values, Mapping):
            self._not_a_mapping(path, values, names)
            return None
        before = len(self.problems)
        built = self._fields(cls, names, values, path)
        if self._given:
            return built
        return cls(**built) if len(self.problems) == before else None

    def _value(self, hint: Any, value: Any, where: str, facts: Mapping[Any, Any]) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            return self._section(typing.cast(type[Any], hint), value, where)
        if origin is Literal:
            if not isinstance(value, str) or value not in arguments:
                problem = f"{_shown(value)} is not one of {', '.join(map(str, arguments))}"
                self._report(where, problem, _suggestion(_short(value), arguments))
            return value
        if origin is tuple:
            if not isinstance(value, (list, tuple)):
                self._report(where, f"expected a list; got {_shown(value)}", "write it as [a, b]")
                return ()
            item = arguments[0]
            return tuple(self._value(item, v, f"{where}[{i}]", facts) for i, v in enumerate(value))
        if origin is not None and issubclass(origin, Mapping):
            return self._map(arguments[1], value, where, facts)
        return self._scalar(hint, value, where, facts)

    def _map(self, item: Any, values: Any, where: str, facts: Mapping[Any, Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            self._report(where, f"expected a mapping; got {_shown(values)}", "write it as {a: b}")
            return {}
        found: dict[str, Any] = {}
        for key, value in values.items():
            # If text is expected, any value except a list or a mapping is taken as text.
            as_text = item is str and not isinstance(value, (list, tuple, Mapping))
            plain = str(value) if as_text else value
            found[str(key)] = self._value(item, plain, f"{where}.{key}", facts)
        return found

    def _scalar(self, hint: Any, value: Any, where: str, facts: Mapping[Any, Any]) -> Any:
        if hint is float:
            return self._number(value, where)
        if hint is int:
            return self._whole(value, where, facts)
        if hint is bool:
            if not isinstance(value, bool):
                problem = f"expected true or false; got {_shown(value)}"
                self._report(where, problem, "write it without quotes")
            return value
        if hint is not str:
            raise TypeError(f"{where}: the tree has a field of type {hint}, which has no reader")
        if not isinstance(value, str):
            self._report(where, f"expected text; got {_shown(value)}", "put it in quotes")
        elif not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            # YAML can write half of a surrogate pair as an escape, which protobuf cannot carry.
            problem = f"{_shown(value)} has half of a character"
            self._report(where, problem, "write the character itself, in UTF-8")
        return value

    def _number(self, value: Any, where: str) -> float | None:
        number = _float(value)
        if number is None:
            problem = f"expected a number; got {_shown(value)}"
            self._report(where, problem, "write it as 0.5 or 3e-4")
        elif self._given and not math.isfinite(number):  # otherwise the check of values does that
            self._report(where, f"{number} is not finite", "give a number")
        return number

    def _whole(self, value: Any, where: str, facts: Mapping[Any, Any]) -> Any:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(number, bool) or not isinstance(number, int):
            problem = f"expected a whole number; got {_shown(value)}"
            self._report(where, problem, "write it as 4")
            return number
        limit = 2 ** (facts.get("bits", 32) - 1)
        if self._given and not -limit <= number < limit:  # as above
            problem = f"{_shown(number)} is out of range"
            self._report(where, problem, f"give {-limit} to {limit - 1}")
        return number

    def _not_a_mapping(self, where: str, values: Any, names: Iterable[str]) -> None:
        self._report(where, f"expected a mapping; got {_shown(values)}", _names(names))

    def _report(self, where: str, problem: str, remedy: str) -> None:
        self.problems.append(JobProblem(where, problem, remedy))


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    """The types of the fields; cached, because Python compiles them from text at each call."""
    return typing.get_type_hints(cls)


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or (isinstance(value, str) and not _EXPONENT.fullmatch(value)):
        return None
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def _suggestion(word: str, known: Iterable[Any]) -> str:
    names = [str(name) for name in known]
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else _names(names)


def _short(value: Any) -> str:
    """The short name for an enum value such as PRECISION_BF16."""
    return _shown(value).strip("'\"").lower().rsplit("_", 1)[-1]


def _names(known: Iterable[str]) -> str:
    return f"known here: {', '.join(known)}"


def _shown(value: Any) -> str:
    try:
        text = _repr.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _no_sources(values: Any) -> list[JobProblem]:
    """The refusal of a job without any data, if its other fields could not be read."""
    if not isinstance(values, Mapping):
        return []
    workload = {} if values.get("trainer") is None else values["trainer"]
    if not isinstance(workload, Mapping):
        return []
    data = values.get("data", workload.get("data"))
    has_sources = data is not None and (not isinstance(data, Mapping) or data.get("sources"))
    return [] if has_sources else [NO_SOURCES]
