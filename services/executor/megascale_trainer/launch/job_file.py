"""A job file as the trainer reads it, without the client: JSON by itself, YAML through PyYAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megascale_job import config as job_config
from megascale_job.config import JobConfig
from megascale_job.problems import JobError, JobProblem

MAX_FILE_BYTES = 1 << 20  # that of the client's reader


def load_config(path: str | Path) -> JobConfig:
    """The job in a YAML or JSON file; relative paths in it start at the file's folder.

    It is the file that `megascale submit` takes. A name that ends in .json is JSON, any other YAML,
    which needs PyYAML.

    Raises:
        JobError: it cannot be read, or fields are refused; lists each with its remedy.
    """
    file = Path(path)
    values = _values(file)
    _anchor(values, file.resolve().parent)
    return job_config.from_mapping(values)


def _values(file: Path) -> Any:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _refused(file, f"cannot be read: {why}", "give a job file") from error
    if len(data) > MAX_FILE_BYTES:
        raise _refused(file, f"is larger than {MAX_FILE_BYTES} bytes", "give a job file")
    if file.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise _refused(file, f"is not JSON: {error}", "correct the file") from error
    try:
        import yaml
    except ImportError as error:
        remedy = "pip install pyyaml, or give the job as a .json file"
        raise _refused(file, "is YAML, and PyYAML is not installed", remedy) from error
    try:
        return yaml.load(text, Loader=_without_repetition(yaml))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _refused(file, f"is not valid YAML: {error}", "correct the file") from error


def _without_repetition(yaml: Any) -> Any:
    """PyYAML's safe loader, but refusing a key given twice, of which it takes the last."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            twice = sorted({str(key) for key in keys if keys.count(key) > 1})
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{', '.join(twice)} given twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader


def _refused(file: Path, problem: str, remedy: str) -> JobError:
    return JobError([JobProblem(str(file), problem, remedy)])


def _anchor(values: Any, folder: Path) -> None:
    """Make the paths in a job's plain values absolute, which the job's check wants; in place.

    What is not as it should be stays: the check reports it.
    """
    if not isinstance(values, dict):
        return
    for holder in (values, values.get("trainer")):
        for section in ("data", "evaluation"):
            for source in _list(_of(holder, section).get("sources")):
                _make_absolute(source, "prefix", folder)
        _make_absolute(_of(_of(holder, "data"), "tokenizer"), "path", folder)
    for name in ("uri", "load_uri"):
        _make_absolute(values.get("checkpoint"), name, folder)


def _of(holder: Any, name: str) -> dict[str, Any]:
    found = holder.get(name) if isinstance(holder, dict) else None
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _make_absolute(holder: Any, name: str, folder: Path) -> None:
    path = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(path, str) and path and "://" not in path:
        holder[name] = str(folder / Path(path).expanduser())
