"""Reads a job file, YAML or JSON, into plain values; an error in it has line and remedy.

`megascale submit` and runs by hand use it. PyYAML is imported only for YAML, because a node that
only trains may not have it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megascale_job.config import JobConfig
from megascale_job.loading import from_mapping
from megascale_job.problems import JobError, JobProblem

MAX_FILE_BYTES = 1 << 20

_GIVE_FILE = "give the path of a job file"
_FILE_REMEDIES: tuple[tuple[type[OSError], str], ...] = (
    (IsADirectoryError, "give the job file in it"),
    (FileNotFoundError, "give the path of a job file, or write one with `megascale init`"),
    (PermissionError, "change its permissions or its owner"),
)


def load_config(path: str | Path) -> JobConfig:
    """The job in a YAML or JSON file, fully checked; its paths are relative to the file's folder.

    `megascale submit` takes the same file. A file whose name ends in .json is JSON, any other is
    YAML, which needs PyYAML.

    Raises:
        JobError: it cannot be read, or fields are refused; lists each with its remedy.
    """
    return from_mapping(read_values(path))


def read_values(path: str | Path) -> Any:
    """The plain values of a job file, not checked yet; paths in it are made absolute.

    Raises:
        JobError: no such file, or not YAML or JSON; names the file and the line.
    """
    file = Path(path)
    text = _text(file)
    values = _from_json(file, text) if file.suffix == ".json" else _from_yaml(file, text)
    if values is None:
        raise _refused(file, "is empty", "write a job with `megascale init`")
    anchor(values, file.resolve().parent)
    return values


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        why = getattr(error, "strerror", None) or str(error)
        remedy = next((fix for kind, fix in _FILE_REMEDIES if isinstance(error, kind)), _GIVE_FILE)
        raise _refused(file, f"cannot be read: {why}", remedy) from None
    if len(data) > MAX_FILE_BYTES:
        problem = f"is larger than {MAX_FILE_BYTES} bytes, the limit of a job file"
        raise _refused(file, problem, _GIVE_FILE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        remedy = "give a job file, saved as UTF-8"
        raise _refused(file, "is not text in UTF-8", remedy, f"line {line}") from None


def _from_json(file: Path, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise _refused(file, "nests far too deeply", "a job has five levels") from None
    except json.JSONDecodeError as error:
        problem, place = f"is not JSON: {error.msg}", f"line {error.lineno}, column {error.colno}"
        raise _refused(file, problem, "correct the file", place) from None
    except ValueError as error:
        raise _refused(file, f"is not JSON: {error}", "correct the file") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a repeated key is refused, while Python would take the last value."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key!r} is given twice")
        values[key] = value
    return values


def _from_yaml(file: Path, text: str) -> Any:
    try:
        from megascale_job import yaml_text
    except ImportError:
        remedy = "pip install pyyaml, or give the job as a .json file"
        raise _refused(file, "is YAML, and PyYAML is not installed", remedy) from None
    try:
        return yaml_text.load(text)
    except yaml_text.NotYaml as error:
        raise _refused(file, error.problem, error.remedy, error.place) from None


def _refused(file: Path, problem: str, remedy: str, place: str = "") -> JobError:
    return JobError([JobProblem(place or "file", problem, remedy)], source=str(file))


def anchor(values: Any, folder: Path) -> None:
    """Make the paths in a job's plain values absolute, in place, because nodes run elsewhere.

    Values of the wrong type are left for the check to report.
    """
    if not isinstance(values, dict):
        return
    for holder in (values, values.get("trainer")):
        for section in ("data", "evaluation"):
            sources = _of(holder, section).get("sources")
            for source in sources if isinstance(sources, list) else ():
                _make_absolute(source, "prefix", folder)
        _make_absolute(_of(_of(holder, "data"), "tokenizer"), "path", folder)
    for name in ("uri", "load_uri"):
        _make_absolute(values.get("checkpoint"), name, folder)


def _of(holder: Any, name: str) -> dict[str, Any]:
    found = holder.get(name) if isinstance(holder, dict) else None
    return found if isinstance(found, dict) else {}


def _make_absolute(holder: Any, name: str, folder: Path) -> None:
    path = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(path, str) and path and "://" not in path:
        holder[name] = str(folder / Path(path).expanduser())
