"""What a Kubernetes API server keeps: objects with versions, their history, selectors and patches.

Written after the API's published conventions. What it leaves out: finalizers, server-side apply,
admission, the cascade of a deletion, and the merge keys of strategic patches but for the lists
named in ``_MERGE_KEYS``.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str, str]  # of an object: plural name of its kind, namespace, name
MERGE, STRATEGIC, JSON_PATCH = (
    f"application/{kind}-patch+json" for kind in ("merge", "strategic-merge", "json")
)
_MERGE_KEYS = {"conditions": "type", "containers": "name", "env": "name", "volumes": "name"}
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_KEPT_ON_UPDATE = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")


class Refusal(Exception):
    """An answer of the API that is no success: a Status object with its HTTP code."""

    def __init__(self, code: int, reason: str, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.code, self.reason, self.retry_after_s = code, reason, retry_after_s

    def status(self) -> Object:
        """The Status object."""
        details = {"retryAfterSeconds": self.retry_after_s} if self.retry_after_s else {}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": details,
            "code": self.code,
        }


def expired(version: int) -> Refusal:
    """A version that is no longer held: HTTP 410."""
    return Refusal(410, "Expired", f"too old resource version: {version}")


@dataclass(frozen=True, slots=True)
class Change:
    """One write: the object before and after it; None where there is none."""

    version: int
    plural: str
    before: Object | None
    after: Object | None

    def event(self, matches: Callable[[Object], bool]) -> Object | None:
        """The watch event for those who see only what matches; None if that is not concerned."""
        was = self.before is not None and matches(self.before)
        found = self.after is not None and matches(self.after)
        if found:
            return {"type": "MODIFIED" if was else "ADDED", "object": self.after}
        if was:
            assert self.before is not None
            gone = copy.deepcopy(self.before)
            gone["metadata"]["resourceVersion"] = str(self.version)
            return {"type": "DELETED", "object": gone}
        return None


@dataclass
class Store:
    """Objects by kind, namespace and name. ``listeners`` get every change from then on."""

    objects: dict[Key, Object] = field(default_factory=dict)
    version: int = 0
    history: list[Change] = field(default_factory=list)
    oldest: int = 0  # versions up to here are no longer held
    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    pages: dict[str, list[Object]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def compact(self) -> None:
        """Forget the history: a watch that begins at an older version is refused.

        The version grows by one, as by a write to a kind that nobody here watches.
        """
        self.history.clear()
        self.pages.clear()
        self.version += 1
        self.oldest = self.version

    def get(self, key: Key) -> Object:
        """A copy of one object; Refusal 404."""
        if key not in self.objects:
            raise Refusal(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return copy.deepcopy(self.objects[key])

    def list(self, plural: str, namespace: str, matches: Callable[[Object], bool]) -> list[Object]:
        """Copies of the matching objects, by name; of all namespaces for ''."""
        return [
            copy.deepcopy(found)
            for (kind, place, _), found in sorted(self.objects.items())
            if kind == plural and namespace in ("", place) and matches(found)
        ]

    def create(self, plural: str, namespace: str, given: Object) -> Object:
        """Add an object; Refusal 409 if its name is taken."""
        new = copy.deepcopy(given)
        meta = new.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = f"{meta['generateName']}{next(self._numbers):05x}"
        name = str(meta.get("name", ""))
        if not _NAME.fullmatch(name):
            raise Refusal(422, "Invalid", f"metadata.name: Invalid value: {name!r}")
        key = (plural, namespace, name)
        if key in self.objects:
            raise Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if meta.get("resourceVersion"):
            raise Refusal(400, "BadRequest", "resourceVersion should not be set to be created")
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        meta.update({"namespace": namespace} if namespace else {})
        return self._write(key, None, new)

    def update(self, key: Key, change: Callable[[Object], Object], status: bool) -> Object:
        """Replace an object by ``change`` of it, of its status or of all but that.

        ``change`` may give a resourceVersion and a uid, which are preconditions.

        Raises:
            Refusal: 409 if one of them is not the object's.
        """
        before = self.get(key)
        new = change(copy.deepcopy(before))
        meta = new.setdefault("metadata", {})
        require(key, before, meta.get("uid"), meta.get("resourceVersion"))
        if status:
            new = {**before, "status": new.get("status", {})}
        elif "status" in before:
            new["status"] = before["status"]
        kept = {
            name: before["metadata"].get(name) for name in (*_KEPT_ON_UPDATE, "resourceVersion")
        }
        meta = {**new["metadata"], **kept}
        new["metadata"] = {name: value for name, value in meta.items() if value is not None}
        if new == before:
            return before  # nothing is written, and the version stays
        return self._write(key, before, new)

    def delete(self, key: Key, options: Mapping[str, Any]) -> Object:
        """Remove an object; a pod on a node only once its kubelet asks for it without grace.

        Raises:
            Refusal: 404, or 409 if a precondition does not hold.
        """
        before = self.get(key)
        conditions = options.get("preconditions") or {}
        require(key, before, conditions.get("uid"), conditions.get("resourceVersion"))
        grace_s = options.get("gracePeriodSeconds")
        if key[0] == "pods" and before.get("spec", {}).get("nodeName"):
            if grace_s is None:
                grace_s = before["spec"].get("terminationGracePeriodSeconds", 30)
            if grace_s > 0:
                if "deletionTimestamp" in before["metadata"]:
                    return before
                marked = copy.deepcopy(before)
                marked["metadata"] |= {
                    "deletionTimestamp": now(),
                    "deletionGracePeriodSeconds": grace_s,
                }
                return self._write(key, before, marked)
        self.version += 1
        del self.objects[key]
        self._note(Change(self.version, key[0], before, None))
        return before

    def _write(self, key: Key, before: Object | None, new: Object) -> Object:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = new
        self._note(Change(self.version, key[0], before, copy.deepcopy(new)))
        return copy.deepcopy(new)

    def _note(self, change: Change) -> None:
        self.history.append(change)
        for listener in list(self.listeners):
            listener(change)

    def since(self, version: int) -> list[Change]:
        """All changes after ``version``; Refusal 410 if they are no longer held."""
        if version < self.oldest:
            raise expired(version)
        return [change for change in self.history if change.version > version]


def require(key: Key, found: Object, uid: str | None, version: str | None) -> None:
    """Check the preconditions of a write; Refusal 409."""
    meta = found["metadata"]
    what = f'Operation cannot be fulfilled on {key[0]} "{key[2]}"'
    if uid and uid != meta["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {meta['uid']}"
        raise Refusal(409, "Conflict", f"{what}: {why}")
    if version and version != meta["resourceVersion"]:
        why = "the object has been modified; please apply your changes to the latest version"
        raise Refusal(409, "Conflict", f"{what}: {why}")


def now() -> str:
    """The time as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def patched(found: Object, patch: Any, kind: str) -> Object:
    """``found`` with a patch of that content type; Refusal 415 or 422."""
    if kind == JSON_PATCH:
        for step in patch:
            _json_step(found, step)
        return found
    if kind not in (MERGE, STRATEGIC):
        raise Refusal(415, "UnsupportedMediaType", f"the body of a patch was {kind}")
    merged = _merged(found, patch, strategic=kind == STRATEGIC)
    assert isinstance(merged, dict)
    return merged


def _merged(found: Any, patch: Any, *, strategic: bool, name: str = "") -> Any:
    key = _MERGE_KEYS.get(name) if strategic else None
    if key and isinstance(patch, list) and isinstance(found, list):
        by_key = {each[key]: each for each in found}
        for each in patch:
            by_key[each[key]] = _merged(by_key.get(each[key], {}), each, strategic=strategic)
        return list(by_key.values())
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for field_name, value in patch.items():
        if field_name.startswith("$"):
            continue  # directives of kubectl on the order of lists
        if value is None:
            result.pop(field_name, None)
        else:
            old = result.get(field_name)
            result[field_name] = _merged(old, value, strategic=strategic, name=field_name)
    return result


def _json_step(found: Any, step: Object) -> None:
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]
    ]
    try:
        for part in parents:
            found = found[int(part)] if isinstance(found, list) else found[part]
        at: Any = last
        if isinstance(found, list):
            at = len(found) if last == "-" else int(last)
        match step["op"]:
            case "test":
                if found[at] != step["value"]:
                    raise Refusal(422, "Invalid", f"testing value {step['path']} failed")
            case "add" if isinstance(found, list):
                found.insert(at, step["value"])
            case "add" | "replace":
                found[at] = step["value"]
            case "remove":
                del found[at]
            case other:
                raise Refusal(422, "Invalid", f"operation {other!r} is not served here")
    except (KeyError, IndexError, ValueError):
        raise Refusal(422, "Invalid", f"no such path: {step['path']}") from None


def selector(labels: str, fields: str) -> Callable[[Object], bool]:
    """What a label selector and a field selector choose; Refusal 400 for what is not one."""
    wanted = [_label_rule(part) for part in re.split(r",(?![^()]*\))", labels) if part.strip()]
    paths = [_field_rule(part) for part in fields.split(",") if part]

    def matches(found: Object) -> bool:
        own = found["metadata"].get("labels") or {}
        return all(rule(own) for rule in wanted) and all(rule(found) for rule in paths)

    return matches


def _label_rule(text: str) -> Callable[[Mapping[str, str]], bool]:
    if found := re.fullmatch(r"\s*([\w./-]+)\s+(in|notin)\s*\(([^()]*)\)\s*", text):
        name, word, among = found[1], found[2], {part.strip() for part in found[3].split(",")}
        return lambda labels: (labels.get(name) in among) == (word == "in")
    if found := re.fullmatch(r"\s*([\w./-]+)\s*(==|=|!=)\s*([\w.-]*)\s*", text):
        name, sign, value = found[1], found[2], found[3]
        return lambda labels: (labels.get(name) == value) == (sign != "!=")
    if found := re.fullmatch(r"\s*(!?)\s*([\w./-]+)\s*", text):
        absent, name = found[1] == "!", found[2]
        return lambda labels: (name in labels) != absent
    raise Refusal(400, "BadRequest", f"unable to parse requirement: {text!r}")


def _field_rule(text: str) -> Callable[[Object], bool]:
    path, sign, value = re.split(r"(!=|==|=)", text, maxsplit=1)

    def rule(found: Object) -> bool:
        at: Any = found
        for part in path.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        word = {None: "", True: "true", False: "false"}.get(at, at)
        return (word == value) == (sign != "!=")

    return rule
