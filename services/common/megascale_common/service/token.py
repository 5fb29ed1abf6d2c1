"""The cluster token: a random word that every call between the parts of a cluster carries.

`megascale up` writes it to a file of mode 0600, which agents and clients read. A call carries it as
metadata (:data:`HEADER`, :func:`bearer`); grpcurl sends it with
``-H "authorization: Bearer $(cat FILE)"``.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

HEADER = "authorization"
MIN_TOKEN_CHARS = 16


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
            # A link, not a replacement: of several processes that start at once the first wins, and
            # all of them read its token.
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
