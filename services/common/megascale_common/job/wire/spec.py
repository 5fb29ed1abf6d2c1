"""The wire form of a job, ``megascale.v1.JobSpec``, to the tree of
:mod:`megascale_common.job.config` and back.

Both are walked by their descriptors, so a field that is added to both needs nothing here. Enum
values are their short names in lower case (PRECISION_BF16 is ``bf16``). What is not set on the wire
takes the default of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from megascale.v1 import job_pb2
from megascale_common.job import config as job_config
from megascale_common.job.config import ConfigError, JobConfig

_WORKLOAD = "trainer"


def from_proto(spec: job_pb2.JobSpec) -> JobConfig:
    """The tree of ``spec``. Only names and types are judged here; see ``job_validation`` for the
    values.

    Raises:
        ConfigError: a required field is not set, or an enum has an unknown value; names the dotted
            path.
    """
    values = _to_dict(spec, "")
    workload = values.pop(_WORKLOAD, None)
    if workload is None:
        raise ConfigError(
            _WORKLOAD,
            "missing; a job needs a workload: set `trainer` with model, training and data",
        )
    return job_config.from_dict({**values, **workload})


def to_proto(config: JobConfig) -> job_pb2.JobSpec:
    """The wire form of ``config`` with every field set, defaults included."""
    values = job_config.to_dict(config)
    spec = job_pb2.JobSpec()
    trainer_fields = {field.name for field in job_pb2.TrainerSpec.DESCRIPTOR.fields}
    _fill(spec, {key: value for key, value in values.items() if key not in trainer_fields})
    _fill(spec.trainer, {key: value for key, value in values.items() if key in trainer_fields})
    return spec


def _to_dict(message: Message, path: str) -> dict[str, Any]:
    # ListFields leaves out what is not set, and zeros of fields without presence: both mean the
    # default.
    return {
        field.name: _value(field, value, f"{path}.{field.name}" if path else field.name)
        for field, value in message.ListFields()
        if not _is_unspecified(field, value)
    }


def _is_unspecified(field: FieldDescriptor, value: Any) -> bool:
    return field.enum_type is not None and value == 0


def _value(field: FieldDescriptor, value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Message):
        return _to_dict(value, path)
    if field.enum_type is not None:
        return _short_name(field.enum_type, value, path)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_to_dict(item, path) if isinstance(item, Message) else item for item in value]
    return value


def _short_name(enum: EnumDescriptor, number: int, path: str) -> str:
    found = enum.values_by_number.get(number)
    if found is None:
        known = ", ".join(_strip(enum, value.name) for value in enum.values if value.number)
        raise ConfigError(path, f"unknown value {number}; known here: {known}")
    return _strip(enum, found.name)


def _strip(enum: EnumDescriptor, name: str) -> str:
    # Every value starts with the first value's name less UNSPECIFIED (buf lint holds that).
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return name.removeprefix(prefix).lower()


def _fill(message: Message, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        target = getattr(message, name)
        if isinstance(value, Mapping):
            if isinstance(target, Message):
                target.SetInParent()
                _fill(target, value)
            else:
                target.update(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Mapping):
                    _fill(target.add(), item)
                else:
                    target.append(item)
        elif field.enum_type is not None:
            enum: EnumDescriptor = field.enum_type  # type: ignore[assignment]
            numbers = {_strip(enum, v.name): v.number for v in enum.values}
            setattr(message, name, numbers[value])
        else:
            setattr(message, name, value)
