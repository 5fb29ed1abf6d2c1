"""Checks at the start of a process. A failure is one sentence and an exit status.

The sentence names the option, the fact and the remedy. Nothing here imports grpc.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from megascale_common.node.addresses import split
from megascale_common.node.files import replace_file
from megascale_common.service import logs
from megascale_common.service.errors import OptionError, ServiceError, UnavailableError
from megascale_common.service.identity.peers import check_token

CANNOT_START = 2
UNAVAILABLE = 3
_FRAMES = 5  # of the traceback of an operating system's error, in the log

_WHY_NOT = {
    errno.EADDRINUSE: "the port is in use: choose another, or 0 for any free one",
    errno.EADDRNOTAVAIL: "the address is not of this host: give one that is, such as 127.0.0.1",
    errno.EACCES: "this user may not use that port: choose one from 1024 on, or 0",
}


@contextlib.contextmanager
def ends_with_a_sentence(program: str) -> Iterator[None]:
    """Turn the errors of a process that cannot start into a line on stderr and an exit status.

    An error of the operating system is also logged, with its place in the code. Other exceptions
    are defects and keep their traceback.
    """
    try:
        yield
    except (ServiceError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            frames = [
                f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            ]
            logs.get(__name__).error("the process ends", error=repr(error), where=frames)
            text = refusal_of(error)
        print(f"{program}: {text}", file=sys.stderr)
        status = UNAVAILABLE if isinstance(error, UnavailableError) else CANNOT_START
        raise SystemExit(status) from None


def refusal_of(error: OSError) -> str:
    """A sentence about an operating system's error, with the file and a remedy if it has one."""
    if error.filename is None:
        return error.strerror or str(error)
    remedy = {
        errno.EACCES: "give this user the permission, or choose another path",
        errno.EPERM: "give this user the permission, or choose another path",
        errno.ENOENT: "check the path",
        errno.ENOSPC: "make room on the disk",
    }.get(error.errno or 0, "choose another path")
    return f"{error.filename}: {error.strerror}: {remedy}"


def require_bindable(option: str, bind: str) -> None:
    """Check that this process could listen on ``bind`` (host:port).

    Raises:
        OptionError: it could not; the text says why.
    """
    try:
        host, port = split(bind)
    except ValueError:
        raise OptionError(f"{option}: {bind!r} is not HOST:PORT, such as 127.0.0.1:0") from None
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        raise OptionError(f"{option}: {host!r} is not an address: give one of this host") from None
    except OSError as error:
        why = _WHY_NOT.get(error.errno or 0, f"{error.strerror}: choose another address")
        raise OptionError(f"{option}: cannot listen on {bind}: {why}") from None


def write_address(option: str, path: Path, address: str) -> None:
    """Write host:port to the file of ``option``.

    Raises:
        OptionError: it cannot be written.
        UnavailableError: its disk is full.
    """
    try:
        replace_file(path, f"{address}\n")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # a later start may succeed
            raise UnavailableError(
                f"{option}: {path} cannot be written ({error.strerror}): make room on the disk"
            ) from None
        raise OptionError(
            f"{option}: {path} cannot be written ({error.strerror}): "
            "give a file in a folder that exists and that you can write to"
        ) from None


def read_token(path: Path, option: str = "--token-file") -> str:
    """The cluster token in the file of ``option``.

    Raises:
        OptionError: the file has no usable token.
    """
    try:
        token = path.read_text().strip()
        check_token(token)
    except FileNotFoundError:
        raise OptionError(
            f"{option}: {path} does not exist: `megascale up` writes it; without that, write a "
            "random word of at least 16 characters into it, mode 0600"
        ) from None
    except UnicodeDecodeError:
        raise OptionError(f"{option}: {path} is not text: give the file with the token") from None
    except OSError as error:
        raise OptionError(
            f"{option}: {path} cannot be read ({error.strerror}): "
            "give the file with the token, readable by this user"
        ) from None
    except ValueError as error:
        raise OptionError(f"{option}: {path}: {error}") from None
    return token


@functools.cache  # read from files, and a driver sends it to every node that connects
def build_version() -> str:
    """Version of the installed package, for hello messages, metrics and ``--version``."""
    try:
        return metadata.version("megascale")
    except metadata.PackageNotFoundError:
        return "unknown"
