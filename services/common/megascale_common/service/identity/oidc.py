"""Tokens of an OpenID provider: signed JWTs, checked against the provider's keys.

OpenID Connect Core 1.0 (section 3.1.3.7) and RFC 7519 for the checks, RFC 7517 for the keys. The
keys are read at the first token and again when they are old or a token names one that is not among
them; a provider that does not answer costs only people, never a node. Needs the package ``pyjwt``
with ``cryptography`` (extra ``oidc``), which is imported here late.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megascale_common.node.addresses import is_loopback
from megascale_common.service import logs
from megascale_common.service.errors import (
    ForbiddenError,
    OptionError,
    UnauthenticatedError,
    UnavailableError,
)
from megascale_common.service.identity.peers import Peer, Role

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
LEEWAY_S = 30.0  # clocks of hosts differ
KEYS_FRESH_S = 300.0
KEYS_USABLE_S = 86_400.0  # while the provider does not answer
RETRY_S = 10.0  # between two reads, whatever tokens ask for
TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20
MAX_NAME = 64  # of the audit log
DISCOVERY = "/.well-known/openid-configuration"
_log = logs.get(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OidcConfig:
    """A provider, and what its tokens mean here.

    Args:
        issuer: URL that the tokens name as ``iss``.
        audience: what they have to name as ``aud``.
        keys_url: where the keys are; empty: as the issuer's discovery document says.
        role_claim: name of the claim with the person's roles or groups: a text or a list.
        roles: which of its values gives which role.
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
                "--oidc-issuer: tokens of a provider are checked with the package pyjwt: install "
                "it with `pip install megascale[oidc]`"
            ) from None
        self._jwt = jwt
        self._config = config
        self._keys: Mapping[str, Any] = {}
        self._read_at_s = self._tried_at_s = -KEYS_USABLE_S
        self._turn = asyncio.Lock()

    async def peer(self, token: str) -> Peer:
        """Who the token is for.

        Raises:
            UnauthenticatedError: it is not the provider's, not for us, or no longer valid.
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
            f"the token's claim {claim!r} has none of {', '.join(sorted(roles))}: ask whoever "
            "gives roles at the provider for one",
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
    """A JSON object, of MAX_BYTES at most, within about TIMEOUT_S."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        data = answer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{url} answers more than {MAX_BYTES} bytes")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{url} answers no JSON object")
    return found
