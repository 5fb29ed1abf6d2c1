"""YAML to plain values: safe, bounded, without repeated keys; errors have place and remedy."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MAX_BRACKETS = 64  # depth of brackets; PyYAML's time grows with its square

_MERGE = "tag:yaml.org,2002:merge"
_REMEDY = "correct that line; text with : # @ { or [ goes in quotes"
# Remedies by a part of PyYAML's message.
_REMEDIES = {
    "given twice": "keep one of the two",
    "could not determine a constructor for the tag": "remove the tag",
    "but found another document": "keep one job per file: remove the line --- and what follows it",
    "'\\t'": "indent with spaces",
    "found unhashable key": "a key is a word, the name of a field",
    "cannot be read": "put it in quotes if it is text",
    "special characters are not allowed": "remove the character",
}


class NotYaml(ValueError):
    """The text is refused; ``place`` is a line and column, or empty."""

    def __init__(self, problem: str, remedy: str, place: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.place = place


def load(text: str) -> Any:
    """The plain values of one document; None if it is empty.

    Raises:
        NotYaml: the problem, with place and remedy.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _described(error) from None
    except RecursionError:
        raise NotYaml("nests far too deeply", "a job has five levels") from None


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, while PyYAML would silently take the last value."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level == MAX_BRACKETS:
            raise RecursionError  # reported like the one that even deeper values cause
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


def _described(error: yaml.YAMLError) -> NotYaml:
    """Problem, remedy and place of PyYAML's error."""
    if isinstance(error, yaml.MarkedYAMLError):
        problem = " ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
    else:
        problem = str(error).splitlines()[0]
        mark = None
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    remedy = next((fix for found, fix in _REMEDIES.items() if found in problem), _REMEDY)
    return NotYaml(f"is not valid YAML: {problem}", remedy, place)
