"""People by token: a file of names and roles, and tokens of an OpenID provider.

A line of the file is ``NAME ROLE sha256:HEX``, where HEX is the SHA-256 of the person's token, so
that nobody who reads the file can call with it. `megascale certs person` makes a token and its
line. The file counts as it is at each call.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio

from megascale_common.node.files import replace_file
from megascale_common.service import logs
from megascale_common.service.errors import OptionError, ServiceError, UnauthenticatedError
from megascale_common.service.identity.oidc import Oidc
from megascale_common.service.identity.peers import Peer, Role
from megascale_common.service.identity.rates import CallRate
from megascale_common.service.token import HEADER
from megascale_job.names import is_dns_label

ROLES = (Role.VIEWER, Role.OPERATOR)
MAX_FILE_BYTES = 1 << 20  # some 10,000 people
MAX_TOKEN_BYTES = 8 << 10  # gRPC itself takes no more metadata
_BEARER = "Bearer "
_PREFIX = "sha256:"
_log = logs.get(__name__)


class People:
    """Finds who calls by the token of the call; for :class:`gate.Gate`."""

    def __init__(self, file: Path | None, oidc: Oidc | None) -> None:
        self._file = None if file is None else PeopleFile(file)
        self._oidc = oidc
        self._hosts = CallRate()  # before it is known who calls: a check of a signature takes time

    async def __call__(self, context: grpc.aio.ServicerContext[Any, Any]) -> Peer:
        """The caller.

        Raises:
            UnauthenticatedError: the token is nobody's, or no longer valid.
            ForbiddenError: it gives no role here.
            LimitError: the host of the caller begins too many calls.
            UnavailableError: the provider's keys cannot be read.
        """
        self._hosts.take(context.peer().rpartition(":")[0])
        token = token_of(dict(context.invocation_metadata() or ()))
        if self._file is not None and (found := self._file.find(token)) is not None:
            return found
        if self._oidc is not None and token.count(".") == 2:
            return await self._oidc.peer(token)
        raise UnauthenticatedError("the token is nobody's: ask for one of your own")


def token_of(metadata: Mapping[str, str | bytes]) -> str:
    """The token that a call carries.

    Raises:
        UnauthenticatedError: it carries none.
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
    """The file; one that becomes unreadable is logged, and the people of before stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stamp = self._look()
            self._people = read_people(path)
        except (OSError, ServiceError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise OptionError(f"--people-tokens {path}: {reason}") from None

    def find(self, token: str) -> Peer | None:
        """Whose token it is; None if nobody's."""
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
                "the file of people cannot be read; those of before stay", error=str(error)
            )
            return
        _log.info("the file of people was read again", people=len(self._people))

    def _look(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino


def digest_of(token: str) -> str:
    """What stands for the token in the file."""
    return _PREFIX + hashlib.sha256(token.encode(errors="replace")).hexdigest()


def read_people(path: Path) -> dict[str, Peer]:
    """The people of a file by digest.

    Raises:
        OptionError: a line is not as it should be.
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
    """Give a person a new token and write its line, in place of the person's line before.

    Returns:
        The token, which is nowhere else.

    Raises:
        OptionError: the name or the role cannot be used, or the file has a line that cannot.
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
