"""A job as a message: from a job file or plain values, and back to them.

What a job is, and the reading of files, is :mod:`megascale_job`; it is loaded when a job is
first read, because its tree is a tenth of the start of the command line. Whether values fit
together is checked by the driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.v1 import job_pb2
from megascale_client.errors import FieldProblem, InvalidJob, InvalidRequest

if TYPE_CHECKING:
    from megascale_job.problems import JobError

_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def load_job(path: str | Path) -> job_pb2.JobSpec:
    """The job in a YAML (or JSON) file; relative paths in it start at the file's folder.

    Raises:
        InvalidJob: no such file, not YAML, or refused fields; names the file and each dotted path.
    """
    from megascale_job.job_file import read_values
    from megascale_job.problems import JobError

    try:
        return _parse(read_values(path))
    except JobError as error:
        raise _invalid(error, str(Path(path))) from None


def parse_job(values: Any) -> job_pb2.JobSpec:
    """The job in plain values (as YAML or JSON gives them).

    Raises:
        InvalidJob: unknown fields, with a suggestion, and values of the wrong type, by dotted path.
    """
    from megascale_job.problems import JobError

    try:
        return _parse(values)
    except JobError as error:
        raise _invalid(error) from None


def _parse(values: Any) -> job_pb2.JobSpec:
    from megascale_job import loading
    from megascale_job.wire import spec

    return spec.from_given(loading.given(values))


def _invalid(error: JobError, source: str = "") -> InvalidJob:
    problems = [FieldProblem(each.field, each.problem, each.remedy) for each in error.problems]
    return InvalidJob(problems, source=source)


def job_values(spec: job_pb2.JobSpec, *, all_fields: bool = False) -> dict[str, Any]:
    """What is set in a job as plain values, as a job file has them and ``parse_job`` reads them.

    ``all_fields`` adds empty texts and lists and zeros.
    """
    from megascale_job.wire.spec import to_mapping

    return to_mapping(spec, all_fields=all_fields)


def dump_job(spec: job_pb2.JobSpec, *, all_fields: bool = False) -> str:
    """The text of a job file (YAML)."""
    import yaml

    values = job_values(spec, all_fields=all_fields)
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    if all(map(str.isprintable, text.splitlines())):
        return text
    # Marks that turn the direction of text would make the file look like another.
    return str(yaml.safe_dump(values, sort_keys=False, width=100))


def set_value(values: dict[str, Any], setting: str) -> None:
    """Set one field of a job's plain values from ``PATH=VALUE``, the value written as in YAML.

    Raises:
        InvalidRequest: no such form, or a path through something that has no fields.
    """
    import yaml

    path, equals, text = setting.partition("=")
    parts = [name or int(index) for name, index in _PART.findall(path)]
    if not equals or "".join(_written(parts)) != path or not parts:
        raise _refused(path, f"{setting!r} is not PATH=VALUE", "write trainer.training.steps=500")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise _refused(path, f"the value is not YAML: {problem}", "put it in quotes") from None
    target: Any = values
    for part in parts[:-1]:
        if isinstance(target, dict) and isinstance(part, str):
            target.setdefault(part, {})
        _require(target, part, path)
        target = target[part]
    if not isinstance(target, dict) or not isinstance(parts[-1], str):
        _require(target, parts[-1], path)
    target[parts[-1]] = value


def _require(target: Any, part: str | int, path: str) -> None:
    if isinstance(part, str):
        there = isinstance(target, dict) and part in target
    else:
        there = isinstance(target, list) and part < len(target)
    if not there:
        raise _refused(path, f"the job has no {part!r} there", "`megascale config show` prints it")


def flattened(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a job by its dotted path."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flattened(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list) and values:
        for index, value in enumerate(values):
            yield from flattened(value, f"{path}[{index}]")
    else:
        yield path, values


def _written(parts: list[str | int]) -> Iterator[str]:
    for index, part in enumerate(parts):
        if isinstance(part, int):
            yield f"[{part}]"
        else:
            yield f".{part}" if index else part


def _refused(path: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(
        str(FieldProblem(path, problem, remedy)),
        problems=[FieldProblem(path, problem, remedy)],
        reason="BAD_SETTING",
    )
