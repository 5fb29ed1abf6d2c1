"""Corpora of log excerpts: classification of JSON lines, and the score of a labelled corpus.

A line is ``{"id", "log"}``; labels add ``"category"``, ``"role"`` and ``"action"``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megascale_driver.analysis.logs.correlation import classify

# Categories without a finding; precision and recall count all others.
_NOTHING = frozenset({"benign", "unknown"})


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One line of a corpus; ``labels`` is empty for a line without labels."""

    id: object
    log: str
    labels: Mapping[str, str]


def read(line: str) -> Excerpt:
    """Read one line of a corpus.

    Raises:
        ValueError: it is not an object with ``id`` and the text ``log``; the message has the
            remedy.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); write one object a line") from None
    if not isinstance(value, dict):
        raise ValueError('not an object; write {"id": ..., "log": "..."}')
    for field in ("id", "log"):
        if field not in value:
            raise ValueError(f"{field}: missing; add it")
    if not isinstance(value["id"], (str, int)) or isinstance(value["id"], bool):
        raise ValueError("id: neither a text nor an integer; quote it")
    if not isinstance(value["log"], str):
        raise ValueError("log: not a text; join the lines with \\n")
    labels = {key: value[key] for key in ("category", "role", "action") if key in value}
    return Excerpt(value["id"], value["log"], labels)


def answers(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The verdict of each line that is not blank, as JSON, and False for an invalid line."""
    for line in lines:
        if not line.strip():
            continue
        try:
            excerpt = read(line)
        except ValueError as error:
            yield json.dumps({"id": None, "error": str(error)}), False
            continue
        found = classify(excerpt.log)
        answer = {
            "id": excerpt.id,
            "category": found.category,
            "role": found.role,
            "action": found.action,
            "evidence": found.evidence,
        }
        yield json.dumps(answer), True  # ASCII: any terminal or pipe can take it


def is_held_out(id_: object) -> bool:
    """True if the excerpt belongs to the third to which no rule was fitted."""
    return int(hashlib.sha256(str(id_).encode()).hexdigest(), 16) % 3 == 0


@dataclass(frozen=True, slots=True)
class Score:
    """Precision and recall of categories, and evictions that a label does not ask for."""

    excerpts: int
    precision: float
    recall: float
    wrong_evictions: int
    wrong: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The four figures, without ``wrong``, which is for people who fit rules."""
        return {
            "excerpts": self.excerpts,
            "precision": round(self.precision, 4),
            "recall": round(self.recall, 4),
            "wrong_evictions": self.wrong_evictions,
        }


def score(excerpts: Iterable[Excerpt]) -> Score:
    """The score of labelled excerpts, micro-averaged over all categories with a finding.

    Precision: share of the named categories that are right. Recall: share of the labelled
    categories that were named. An eviction is wrong if the label has another action.
    """
    count = named = labelled = right = evictions = 0
    wrong: list[str] = []
    for excerpt in excerpts:
        count += 1
        found = classify(excerpt.log)
        label = excerpt.labels["category"]
        named += found.category not in _NOTHING
        labelled += label not in _NOTHING
        right += found.category == label and label not in _NOTHING
        evicts = found.action == "evict_restart" != excerpt.labels["action"]
        evictions += evicts
        got = (found.category, found.role, found.action)
        want = (label, excerpt.labels["role"], excerpt.labels["action"])
        if got != want:
            wrong.append(f"{excerpt.id}: {' '.join(got)}, not {' '.join(want)}")
    return Score(count, right / max(named, 1), right / max(labelled, 1), evictions, tuple(wrong))
