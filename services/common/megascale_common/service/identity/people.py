"""Identifies people by token: a file of names and roles, and tokens of an OpenID provider.

A line of the file is ``NAME ROLE sha256:HEX``, where HEX is the SHA-256 of the person's token, so
that a reader of the file cannot call with it. `megascale certs person` makes a token and its line.
A change of the file applies from the next call on.

A provider's tokens are signed JWTs, checked against its keys: OpenID Connect Core 1.0 (section
3.1.3.7) and RFC 7519 for the checks, RFC 7517 for the keys. The keys are read at the first token,
and again when they are old or a token names an unknown one. A provider that does not answer affects
only people, never nodes. Needs the package ``pyjwt`` with ``cryptography`` (extra ``oidc``), which
is imported late.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio

from megascale_common.node.addresses import is_loopback
from megascale_common.node.files import replace_file
from megascale_common.service import logs
from megascale_common.service.errors import (
    ForbiddenError,
    OptionError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)
from megascale_common.service.identity.gate import CallRate
from megascale_common.service.identity.peers import HEADER, Peer, Role
from megascale_job.names import is_dns_label

ROLES = (Role.VIEWER, Role.OPERATOR)
MAX_FILE_BYTES = 1 << 20  # about 10,000 people
MAX_TOKEN_BYTES = 8 << 10  # gRPC's own limit on metadata
_BEARER = "Bearer "
_PREFIX = "sha256:"
_log = logs.get(__name__)


class People:
    """Finds the caller by the token of the call; for :class:`gate.Gate`."""

    def __init__(self, file: Path | None, oidc: Oidc | None) -> None:
        self._file = None if file is None else PeopleFile(file)
        self._oidc = oidc
        self._hosts = CallRate()  # by host, because to check a signature takes time

    async def __call__(self, context: grpc.aio.ServicerContext[Any, Any]) -> Peer:
        """The caller.

        Raises:
            UnauthenticatedError: the token is unknown, or no longer valid.
            ForbiddenError: it gives no role here.
            LimitError: the caller's host begins too many calls.
            UnavailableError: the provider's keys cannot be read.
        """
        self._hosts.take(context.peer().rpartition(":")[0])
        token = token_of(dict(context.invocation_metadata() or ()))
        if self._file is not None and (found := self._file.find(token)) is not None:
            return found
        if self._oidc is not None and token.count(".") == 2:
            return await self._oidc.peer(token)
        raise UnauthenticatedError("the token is unknown: ask for one of your own")


def token_of(metadata: Mapping[str, str | bytes]) -> str:
    """The token of a call.

    Raises:
        UnauthenticatedError: the call has none.
    """
    value = metadata.get(HEADER, "")
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    token = text.removeprefix(_BEARER).strip()
    if not text.startswith(_BEARER) or not token or len(token) > MAX_TOKEN_BYTES:
        raise UnauthenticatedError(
            "the call carries no token: send metadata 'authorization: Bearer TOKEN' with a token "
            "of your own"
        )
    return token


class PeopleFile:
    """The file of people. If it becomes unreadable, that is logged and the old people stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stamp = self._look()
            self._people = read_people(path)
        except (OSError, ServiceError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise OptionError(f"--people-tokens {path}: {reason}") from None

    def find(self, token: str) -> Peer | None:
        """The person with this token; None if it is unknown."""
        self._refresh()
        return self._people.get(digest_of(token))

    def _refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._people = read_people(self._path)
        except (OSError, ServiceError) as error:
            _log.warning(
                "the file of people cannot be read; keeping its last content", error=str(error)
            )
            return
        _log.info("the file of people was read again", people=len(self._people))

    def _look(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino


def digest_of(token: str) -> str:
    """The digest of a token, as the file has it."""
    return _PREFIX + hashlib.sha256(token.encode(errors="replace")).hexdigest()


def read_people(path: Path) -> dict[str, Peer]:
    """The people of a file by digest.

    Raises:
        OptionError: a line has another form.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OptionError(f"{path} is larger than {MAX_FILE_BYTES} bytes: use OIDC for so many")
    found: dict[str, Peer] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or words[1] not in ROLES or not _is_digest(words[2]):
            raise OptionError(
                f"{path}:{number}: write NAME ROLE sha256:HEX, with the role "
                f"{' or '.join(ROLES)}, as `megascale certs person` does"
            )
        if not is_dns_label(words[0]):
            raise OptionError(f"{path}:{number}: the name is 1 to 63 of a-z, 0-9 and '-'")
        found[words[2]] = Peer(Role(words[1]), words[0], by_token=True)
    return found


def _is_digest(text: str) -> bool:
    digits = text.removeprefix(_PREFIX)
    return text.startswith(_PREFIX) and len(digits) == 64 and set(digits) <= set("0123456789abcdef")


def add_person(path: Path, name: str, role: Role) -> str:
    """Give a person a new token and write its line, in place of the person's earlier line.

    Returns:
        The token, which is not stored anywhere.

    Raises:
        OptionError: the name, the role, or a line of the file cannot be used.
    """
    if not is_dns_label(name):
        raise OptionError(f"--name {name!r}: use 1 to 63 of a-z, 0-9 and '-'")
    if role not in ROLES:
        raise OptionError(f"--role {role}: people are {' or '.join(ROLES)}")
    lines = []
    if path.exists():
        read_people(path)
        lines = [line for line in path.read_text().splitlines() if line.split()[:1] != [name]]
    token = secrets.token_urlsafe(32)
    replace_file(path, "\n".join([*lines, f"{name} {role} {digest_of(token)}"]) + "\n")
    return token


ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
LEEWAY_S = 30.0  # clocks of hosts differ
KEYS_FRESH_S = 300.0
KEYS_USABLE_S = 86_400.0  # while the provider does not answer
RETRY_S = 10.0  # at least so long between two reads, whatever keys the tokens name
TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20
MAX_NAME = 64  # characters in the audit log
DISCOVERY = "/.well-known/openid-configuration"


@dataclass(frozen=True, kw_only=True, slots=True)
class OidcConfig:
    """A provider, and how its tokens map to names and roles.

    Args:
        issuer: URL in the claim ``iss`` of the tokens.
        audience: required value of the claim ``aud``.
        keys_url: URL of the keys; empty: from the issuer's discovery document.
        role_claim: name of the claim with the person's roles or groups, a text or a list.
        roles: our role for each of its values.
        name_claim: name of the claim with the person's name, for the audit log.
    """

    issuer: str
    audience: str
    keys_url: str = ""
    role_claim: str = "roles"
    roles: Mapping[str, Role] = field(
        default_factory=lambda: {str(role): role for role in (Role.VIEWER, Role.OPERATOR)}
    )
    name_claim: str = "sub"

    def __post_init__(self) -> None:
        for option, url in (("--oidc-issuer", self.issuer), ("--oidc-jwks", self.keys_url)):
            if url:
                _check_url(option, url)
        if not self.issuer or not self.audience:
            raise OptionError("--oidc-issuer and --oidc-audience are given together")


def _check_url(option: str, url: str) -> None:
    parts = urlsplit(url)
    private = parts.scheme == "http" and is_loopback(parts.hostname or "")
    if not parts.hostname or not (parts.scheme == "https" or private):
        raise OptionError(f"{option} {url!r}: give an https URL (http on loopback alone)")


class Oidc:
    """Checks tokens of one provider."""

    def __init__(self, config: OidcConfig) -> None:
        try:
            import jwt
        except ImportError:
            raise OptionError(
                "--oidc-issuer: tokens of a provider need the package pyjwt: install it with "
                "`pip install megascale[oidc]`"
            ) from None
        self._jwt = jwt
        self._config = config
        self._keys: Mapping[str, Any] = {}
        self._read_at_s = self._tried_at_s = -KEYS_USABLE_S
        self._turn = asyncio.Lock()

    async def peer(self, token: str) -> Peer:
        """The person of the token.

        Raises:
            UnauthenticatedError: it is from another provider, for another audience, or expired.
            ForbiddenError: it gives none of our roles.
            UnavailableError: the keys could not be read.
        """
        jwt, config = self._jwt, self._config
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise UnauthenticatedError(
                    f"the token is signed with {str(header.get('alg'))[:20]!r}: use one of "
                    f"{', '.join(ALGORITHMS)}"
                )
            key = await self._key(str(header.get("kid", "")))
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=config.audience,
                issuer=config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(
                f"the token of {config.issuer} is not valid: {str(error)[:200]}"
            ) from None
        return Peer(self._role(claims), self._name(claims), by_token=True)

    def _role(self, claims: Mapping[str, Any]) -> Role:
        claim, roles = self._config.role_claim, self._config.roles
        value = claims.get(claim, [])
        values = value if isinstance(value, list) else [value]
        found = {roles[each] for each in values if isinstance(each, str) and each in roles}
        for role in (Role.OPERATOR, Role.VIEWER):
            if role in found:
                return role
        raise ForbiddenError(
            f"the token's claim {claim!r} has none of {', '.join(sorted(roles))}: ask the "
            "provider's administrator for one",
            reason="NO_ROLE",
        )

    def _name(self, claims: Mapping[str, Any]) -> str:
        value = claims.get(self._config.name_claim)
        if not isinstance(value, str) or not value.strip():
            raise UnauthenticatedError(
                f"the token has no claim {self._config.name_claim!r} with a name"
            )
        return "".join(char for char in value if char.isprintable())[:MAX_NAME]

    async def _key(self, key_id: str) -> Any:
        async with self._turn:
            now_s = time.monotonic()
            age_s = now_s - self._read_at_s
            wanted = age_s > KEYS_FRESH_S or key_id not in self._keys
            if wanted and now_s - self._tried_at_s > RETRY_S:
                self._tried_at_s = now_s
                await self._read()
            if time.monotonic() - self._read_at_s > KEYS_USABLE_S:
                raise UnavailableError(
                    f"the keys of {self._config.issuer} cannot be read now: try again, or use a "
                    "certificate",
                    reason="NO_PROVIDER",
                )
        if key_id not in self._keys:
            raise UnauthenticatedError(
                f"the token is signed with a key that {self._config.issuer} does not show"
            )
        return self._keys[key_id]

    async def _read(self) -> None:
        jwt, config = self._jwt, self._config
        try:
            url = config.keys_url
            if not url:
                found = await asyncio.to_thread(_fetch, config.issuer.rstrip("/") + DISCOVERY)
                url = str(found.get("jwks_uri", ""))
                _check_url("jwks_uri", url)
            keys = jwt.PyJWKSet.from_dict(await asyncio.to_thread(_fetch, url)).keys
        except (OSError, ValueError, OptionError, jwt.PyJWTError) as error:
            _log.warning("the provider's keys cannot be read", url=url, error=str(error)[:300])
            return
        self._keys = {key.key_id or "": key for key in keys if key.public_key_use != "enc"}
        self._read_at_s = time.monotonic()


def _fetch(url: str) -> dict[str, Any]:
    """Fetch a JSON object of at most MAX_BYTES, within about TIMEOUT_S."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        data = answer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{url} returns more than {MAX_BYTES} bytes")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{url} does not return a JSON object")
    return found
