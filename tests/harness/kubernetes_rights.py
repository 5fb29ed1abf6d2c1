"""Rules of access (RBAC) as manifests give them, for the tests' API server."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.harness.kubernetes_store import Object, Refusal


class Asked(Protocol):
    """What a call asks for."""

    @property
    def user(self) -> str: ...
    @property
    def verb(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...


# Verb, group, resource with its subresource; after a space the name where a rule has names.
Right = tuple[str, str, str]


@dataclass
class Rights:
    """What users may do, and what of it they have done.

    ``granted`` is by user and namespace, '' for all of them; ``administrators`` may do everything.
    """

    granted: dict[tuple[str, str], set[Right]] = field(default_factory=dict)
    administrators: set[str] = field(default_factory=set)
    used: set[tuple[str, Right]] = field(default_factory=set)

    @classmethod
    def of_manifests(cls, manifests: Iterable[Object]) -> Rights:
        """Those that bindings give to service accounts (`system:serviceaccount:SPACE:NAME`)."""
        found = cls()
        listed = list(manifests)
        roles = {
            (each["kind"], each["metadata"]["name"]): each["rules"]
            for each in listed
            if each["kind"] in ("Role", "ClusterRole")
        }
        for each in listed:
            if each["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
                continue
            where = each["metadata"]["namespace"] if each["kind"] == "RoleBinding" else ""
            reference = each["roleRef"]
            for subject in each["subjects"]:
                user = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
                rules = roles[reference["kind"], reference["name"]]
                found.granted.setdefault((user, where), set()).update(_rights(rules))
        return found

    def of(self, user: str) -> set[Right]:
        """All rights of a user, wherever."""
        return {
            right for (name, _), rights in self.granted.items() if name == user for right in rights
        }

    def require(self, call: Asked) -> None:
        """Refusal 403 unless the call's user may do it."""
        if call.user in self.administrators:
            return
        granted = [self.granted.get((call.user, place), ()) for place in ("", call.namespace)]
        resources = (call.resource, f"{call.resource} {call.name}")
        rights = {(call.verb, call.group, each) for each in resources}
        used = {right for right in rights if any(right in each for each in granted)}
        if not used:
            where = f" in the namespace {call.namespace!r}" if call.namespace else ""
            raise Refusal(
                403,
                "Forbidden",
                f"{call.resource} {call.name!r} is forbidden: User {call.user!r} cannot "
                f"{call.verb} resource {call.resource!r} in API group {call.group!r}{where}",
            )
        self.used |= {(call.user, right) for right in used}


def _rights(rules: Iterable[Any]) -> Iterable[Right]:
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                names = [f" {name}" for name in rule.get("resourceNames", ())] or [""]
                for verb, name in itertools.product(rule["verbs"], names):
                    yield verb, group, f"{resource}{name}"
