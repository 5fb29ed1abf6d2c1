"""Switches of nodes from a file: the output of `scontrol show topology`, or labels in JSON. Pure.

    SwitchName=tor0 Level=0 LinkSpeed=1 Nodes=n[00-31]
    SwitchName=agg0 Level=1 LinkSpeed=1 Nodes=n[00-63] Switches=tor[0-1]

    {"n00": {"switch": "tor0", "block": "agg0"}}

Levels 0, 1 and 2 become the labels :data:`SWITCH_LABELS`; higher levels are ignored, because all
distances that count are decided below them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Topology labels of a node's switches: its leaf, the aggregation block above it, and its core.
SWITCH_LABELS = ("switch", "block", "core")
MAX_NODES = 100_000  # more than any planned cluster
_FIELD = re.compile(r"(\w+)=(\S*)")
_NAMES = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")


class BadTopology(ValueError):
    """A topology that cannot be read; the message names the line or the node."""


def parse(text: str) -> dict[str, dict[str, str]]:
    """Topology labels by node.

    Raises:
        BadTopology: the text has neither form, names more than MAX_NODES nodes, or a node twice
            on one level.
    """
    if text.lstrip().startswith("{"):
        return _labels(text)
    found: dict[str, dict[str, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = dict(_FIELD.findall(line))
        if "SwitchName" not in fields or not fields.get("Level", "").isdecimal():
            raise BadTopology(
                f"line {number}: no SwitchName= and Level=; give the output of "
                "`scontrol show topology`"
            )
        level = int(fields["Level"])
        if level >= len(SWITCH_LABELS):
            continue
        label = SWITCH_LABELS[level]
        for node in expanded(fields.get("Nodes", ""), number):
            labels = found.setdefault(node, {})
            if label in labels:
                raise BadTopology(f"line {number}: node {node} is on two switches of level {level}")
            labels[label] = fields["SwitchName"]
            if len(found) > MAX_NODES:
                raise BadTopology(f"line {number}: more than {MAX_NODES} nodes")
    return found


def expanded(names: str, line: int = 0) -> Iterator[str]:
    """The hosts in a list such as ``n[00-03,7],gpu1``, with at most one bracket per name.

    Raises:
        BadTopology: a malformed range.
    """
    if names in ("", "(null)"):
        return
    for each in _NAMES.findall(names):
        before, bracket, rest = each.partition("[")
        if not bracket:
            yield each
            continue
        inside, _, after = rest.partition("]")
        for part in inside.split(","):
            found = _RANGE.match(part)
            first, last = (found[1], found[2] or found[1]) if found else ("0", "")
            if not last or "[" in after or not 0 <= int(last) - int(first) < MAX_NODES:
                raise BadTopology(f"line {line}: {each[:80]} is no list of hosts")
            for number in range(int(first), int(last) + 1):
                yield f"{before}{number:0{len(first)}d}{after}"


def _labels(text: str) -> dict[str, dict[str, str]]:
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise BadTopology(f"it is no JSON: {error}") from None
    if len(found) > MAX_NODES:
        raise BadTopology(f"more than {MAX_NODES} nodes")
    for node, labels in found.items():
        texts = isinstance(labels, dict) and all(isinstance(v, str) for v in labels.values())
        if not texts or not set(labels) <= set(SWITCH_LABELS):
            raise BadTopology(f"node {node}: give some of {', '.join(SWITCH_LABELS)}, each a name")
    return found
