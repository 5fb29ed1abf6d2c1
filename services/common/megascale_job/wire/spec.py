"""Converts a job to and from its wire form, ``megascale.v1.JobSpec``.

The conversion uses the descriptors of both forms, so a field that is added to both needs no code
here. Enum values are their short names in lower case (PRECISION_BF16 is ``bf16``). A field that is
not set on the wire takes the default of the tree (:mod:`megascale_job.config`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from megascale.v1 import job_pb2
from megascale_job import loading
from megascale_job.config import JobConfig


def from_proto(spec: job_pb2.JobSpec) -> JobConfig:
    """The job in ``spec``, fully checked.

    Raises:
        JobError: lists every problem by field (:func:`megascale_job.loading.from_mapping`).
    """
    return loading.from_mapping(to_mapping(spec))


def from_accepted_proto(spec: job_pb2.JobSpec) -> JobConfig:
    """The job in ``spec``, which the driver checked when it was submitted.

    Raises:
        JobError: fields that this version cannot read.
    """
    return loading.from_accepted(to_mapping(spec))


def from_given(values: Mapping[str, Any]) -> job_pb2.JobSpec:
    """The message with the fields in ``values``, which :func:`loading.given` has checked."""
    spec = job_pb2.JobSpec()
    _fill(spec, values)
    return spec


def to_proto(config: JobConfig) -> job_pb2.JobSpec:
    """The wire form of ``config`` with every field set, defaults included."""
    values = loading.to_mapping(config)
    spec = job_pb2.JobSpec()
    trainer_fields = {field.name for field in job_pb2.TrainerSpec.DESCRIPTOR.fields}
    _fill(spec, {key: value for key, value in values.items() if key not in trainer_fields})
    _fill(spec.trainer, {key: value for key, value in values.items() if key in trainer_fields})
    return spec


def effective(spec: job_pb2.JobSpec) -> job_pb2.JobSpec:
    """``spec`` with every field set, including widths and heads that follow from others.

    Raises:
        JobError: the job is refused; lists every problem by field.
    """
    config = from_proto(spec)
    experts = config.model.experts
    if experts.count:
        experts = dataclasses.replace(experts, ffn_size=config.model.expert_width)
    model = dataclasses.replace(
        config.model,
        ffn_size=config.model.ffn_width,
        kv_heads=config.model.key_value_heads,
        experts=experts,
    )
    return to_proto(dataclasses.replace(config, model=model))


def to_mapping(message: Message, *, all_fields: bool = False) -> dict[str, Any]:
    """The fields that are set in ``message`` as plain values, enums by their short names.

    ``all_fields`` adds empty texts, empty lists and zeros.
    """
    # ListFields leaves out fields that are not set, and zeros of fields without presence. Both mean
    # the default, and so does an enum's UNSPECIFIED.
    found = {field.name: value for field, value in message.ListFields()}
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name not in found and all_fields and not field.has_presence:
            found[name] = getattr(message, name)
        if name in found and (field.enum_type is None or found[name] != 0):
            values[name] = _value(cast(FieldDescriptor, field), found[name], all_fields)
    return values


def _value(field: FieldDescriptor, value: Any, all_fields: bool) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Message):
        return to_mapping(value, all_fields=all_fields)
    if field.enum_type is not None:
        found = field.enum_type.values_by_number.get(value)
        # A number of a later version stays a number; the tree's reader refuses it with its field.
        return value if found is None else _strip(field.enum_type, found.name)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [
            to_mapping(item, all_fields=all_fields) if isinstance(item, Message) else item
            for item in value
        ]
    return value


@functools.cache
def short_names(enum: EnumDescriptor) -> Mapping[str, int]:
    """Values of an enum by short name: PRECISION_BF16 is ``bf16``; UNSPECIFIED is left out."""
    return {_strip(enum, value.name): value.number for value in enum.values if value.number}


def _strip(enum: EnumDescriptor, name: str) -> str:
    # Every value starts with the first value's name without UNSPECIFIED (buf lint checks that).
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return name.removeprefix(prefix).lower()


def _fill(message: Message, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:  # a field that was removed (REMOVED), which only stored jobs have
            continue
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
            setattr(message, name, short_names(field.enum_type)[value])
        else:
            setattr(message, name, value)
