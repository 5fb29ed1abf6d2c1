"""Reads a job file; whatever is wrong with the file itself is reported with its line and remedy."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from megascale.v1 import job_pb2
from megascale_client.errors import FieldProblem, InvalidJob
from megascale_client.spec import anchor_paths, parse_job

MAX_FILE_BYTES = 1 << 20
MAX_BRACKETS = 64  # within each other; PyYAML's time grows with their square

_GIVE_FILE = "give the path of a job file"
_FILE_REMEDIES: tuple[tuple[type[OSError], str], ...] = (
    (IsADirectoryError, "give the job file in it"),
    (FileNotFoundError, "give the path of a job file, or write one with `megascale init`"),
    (PermissionError, "change its permissions or its owner"),
)
_MERGE = "tag:yaml.org,2002:merge"
_REMEDY = "correct that line; text with : # @ { or [ goes in quotes"
# What PyYAML reports, and the remedy.
_REMEDIES = {
    "given twice": "keep one of the two",
    "could not determine a constructor for the tag": "remove the tag",
    "but found another document": "keep one job per file: remove the line --- and what follows it",
    "'\\t'": "indent with spaces",
    "found unhashable key": "a key is a word, the name of a field",
    "cannot be read": "put it in quotes if it is text",
    "special characters are not allowed": "remove the character",
}


def load_job(path: str | Path) -> job_pb2.JobSpec:
    """The job in a YAML (or JSON) file; relative paths in it start at the file's folder.

    Raises:
        InvalidJob: no such file, not YAML, or refused fields; names the file and each dotted path.
    """
    file = Path(path)
    try:
        values = yaml.load(_text(file), Loader=_Loader)
    except yaml.YAMLError as error:
        raise _refused(file, *_described(error)) from None
    except RecursionError:
        raise _refused(file, "nests far too deeply", "a job has five levels") from None
    if values is None:
        raise _refused(file, "is empty", "write a job with `megascale init`")
    try:
        spec = parse_job(values)
    except InvalidJob as error:
        raise InvalidJob(error.problems, source=str(file)) from None
    anchor_paths(spec, file.resolve().parent)
    return spec


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
        problem = "is not text in UTF-8"
        remedy = "give a job file, saved as UTF-8"
        raise _refused(file, problem, remedy, f"line {line}") from None


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML silently takes the last."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level == MAX_BRACKETS:
            raise RecursionError  # reported as the one that still deeper values end in
        super().fetch_flow_collection_start(token)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:  # a date of month 13, an integer of 5000 digits
            value = str(getattr(node, "value", ""))
            shown = value if len(value) <= 40 else f"{value[:37]}..."
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown} cannot be read as what it seems to be", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, Hashable) else repr(key))
        return super().construct_mapping(node, deep)


def _described(error: yaml.YAMLError) -> tuple[str, str, str]:
    """Problem, remedy and place of what PyYAML found."""
    if isinstance(error, yaml.MarkedYAMLError):
        problem = " ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
    else:
        problem = str(error).splitlines()[0]
        mark = None
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    remedy = next((fix for found, fix in _REMEDIES.items() if found in problem), _REMEDY)
    return f"is not valid YAML: {problem}", remedy, place


def _refused(file: Path, problem: str, remedy: str, place: str = "") -> InvalidJob:
    return InvalidJob([FieldProblem(place or "file", problem, remedy)], source=str(file))
