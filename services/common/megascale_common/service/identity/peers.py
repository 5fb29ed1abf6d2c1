"""Identity of callers: the role and name in a certificate, and the cluster token.

A certificate's SPIFFE ID gives its holder a role and a name. It is a URI in the subject alternative
names whose last two segments are the role and the name: the ID
``spiffe://example.org/megascale/prod/executor/n7`` is node n7. The segments before them are the
site's choice; only the authority that signed the certificate decides whether it is trusted.

The cluster token is a random word that every call between the parts of a cluster carries.
`megascale up` writes it to a file of mode 0600, which agents and clients read. A call carries it as
metadata (:data:`HEADER`, :func:`bearer`); grpcurl sends it with
``-H "authorization: Bearer $(cat FILE)"``.
"""

from __future__ import annotations

import enum
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale_common.service.errors import ForbiddenError
from megascale_job.names import is_dns_label

SCHEME = "spiffe://"
HEADER = "authorization"
MIN_TOKEN_CHARS = 16
MAX_URI = 2048  # of a SPIFFE ID, by its specification


class Role(enum.StrEnum):
    """Role of the holder of a certificate or token."""

    VIEWER = "viewer"  # a person or program that only reads
    OPERATOR = "operator"  # a person or program that also gives orders
    DRIVER = "driver"
    EXECUTOR = "executor"  # a node's agent; the name is the node's
    CHECKPOINT = "checkpoint"  # a node's checkpoint daemon; the name is the node's


@dataclass(frozen=True, slots=True)
class Peer:
    """A caller; ``by_token`` if a person's token identified it, not a certificate."""

    role: Role
    name: str
    by_token: bool = False

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def spiffe_id(trust_domain: str, cluster: str, role: Role, name: str) -> str:
    """The ID in certificates of ``megascale certs``."""
    return f"{SCHEME}{trust_domain}/megascale/{cluster}/{role}/{name}"


def peer_of(auth_context: Mapping[str, Iterable[bytes]]) -> Peer:
    """The caller, from the authentication context of its call.

    Raises:
        ForbiddenError: the certificate has no such ID, several, or one with an unknown role.
    """
    names = auth_context.get("x509_subject_alternative_name", ())
    found = [text for name in names if (text := _text(name)).startswith(SCHEME)]
    if len(found) != 1:
        raise ForbiddenError(
            f"the certificate has {len(found)} SPIFFE IDs, and one is needed: "
            f"{SCHEME}DOMAIN/.../ROLE/NAME, with the role {', '.join(Role)}",
            reason="NO_IDENTITY",
        )
    path = found[0].removeprefix(SCHEME).partition("/")[2]
    role, _, name = "/".join(path.split("/")[-2:]).partition("/")
    if role not in tuple(Role) or not is_dns_label(name):
        raise ForbiddenError(
            f"the SPIFFE ID {found[0][:200]!r} does not end in ROLE/NAME, with a role of "
            f"{', '.join(Role)} and a DNS-1123 label as the name",
            reason="NO_IDENTITY",
        )
    return Peer(Role(role), name)


def _text(name: bytes) -> str:
    return name[:MAX_URI].decode("ascii", errors="replace")


def bearer(token: str) -> str:
    """Value of :data:`HEADER` for a call with ``token``."""
    return f"Bearer {token}"


def read_or_create_token(path: Path) -> str:
    """The cluster token in ``path``; a new random one with mode 0600 when there is none.

    Raises:
        ValueError: the file holds no usable token.
    """
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            # A link, not a replacement: if several processes start at once, the first one wins and
            # all read its token.
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    token = path.read_text().strip()
    check_token(token)
    return token


def check_token(token: str) -> None:
    """Refuse a token that is too short to protect anything.

    Raises:
        ValueError: it is shorter than MIN_TOKEN_CHARS.
    """
    if len(token) < MIN_TOKEN_CHARS:
        raise ValueError(
            f"the token has {len(token)} characters, at least {MIN_TOKEN_CHARS} are needed: "
            "the token file is empty or damaged; delete it and restart the cluster"
        )
