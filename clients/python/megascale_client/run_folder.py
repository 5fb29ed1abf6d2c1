"""Finds a cluster of this machine by its run folder, which holds driver address and token."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from megascale_client.errors import ClusterNotFound, NotAllowed

ADDRESS_FILE = "driver.address"
TOKEN_FILE = "token"
# `megascale up` holds a lock on this file while it runs, and writes into it how it was started.
LOCK_FILE = "up.lock"
RUN_FOLDER_VARIABLE = "MEGASCALE_RUN_FOLDER"
DEFAULT_RUN_FOLDER = Path("runs") / "current"


def find_run_folder(given: Path | None = None) -> Path:
    """The run folder to use: ``given``, else $MEGASCALE_RUN_FOLDER, else ./runs/current.

    Raises:
        ClusterNotFound: there is no such folder; the message has what was tried and the remedy.
    """
    from_environment = os.environ.get(RUN_FOLDER_VARIABLE)
    if given is not None:
        folder, origin = given, "given"
    elif from_environment:
        folder, origin = Path(from_environment), f"${RUN_FOLDER_VARIABLE}"
    else:
        folder, origin = DEFAULT_RUN_FOLDER, "the default"
    try:
        there = folder.is_dir()
    except OSError as error:
        raise _not_allowed(folder, error) from None
    if not there:
        raise ClusterNotFound(
            f"no cluster at {folder} ({origin}): start one with `megascale up`, or give the run "
            f"folder of a running one with --cluster DIR or ${RUN_FOLDER_VARIABLE}"
        )
    return folder


def read_token(folder: Path) -> str:
    """The cluster token of a run folder.

    Raises:
        ClusterNotFound: there is no token, so no cluster was ever started in this folder.
        NotAllowed: the token cannot be read by this user, is damaged, or missing while the cluster
            runs.
    """
    try:
        token = (folder / TOKEN_FILE).read_text().strip()
    except FileNotFoundError:
        if is_held(folder):
            raise NotAllowed(
                f"{folder / TOKEN_FILE} is missing, and the cluster runs: put the file back from a "
                "copy, or stop `megascale up` and start it again, which makes a new one"
            ) from None
        raise ClusterNotFound(
            f"{folder} holds no cluster (no file `{TOKEN_FILE}`): "
            f"start one there with `megascale up --run-folder {folder}`"
        ) from None
    except OSError as error:
        raise _not_allowed(folder / TOKEN_FILE, error) from None
    except UnicodeDecodeError:
        token = ""
    if not (token.isascii() and token.isprintable() and token):
        raise NotAllowed(
            f"{folder / TOKEN_FILE} holds no token: remove it and start the cluster again with "
            f"`megascale up --run-folder {folder}`"
        )
    return token


def address_reader(folder: Path) -> Callable[[], str]:
    """A function that reads the driver's current address, anew on each call.

    A restarted driver writes a new address to the same file. The function raises ClusterNotFound
    while there is none, and NotAllowed if this user cannot read it.
    """

    def read() -> str:
        try:
            address = (folder / ADDRESS_FILE).read_text().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            address = ""
        except OSError as error:
            raise _not_allowed(folder / ADDRESS_FILE, error) from None
        if not address:
            what, remedy = outage(folder)
            raise ClusterNotFound(f"{what}: no driver has written its address there; {remedy}")
        return address

    return read


def ended(folder: Path) -> ClusterNotFound | None:
    """The error for a cluster of which no `megascale up` runs; None if one does, or none ever did.

    The kernel frees the lock of a process that has ended, however it ended.
    """
    if is_held(folder) is not False:
        return None
    what, remedy = outage(folder)
    return ClusterNotFound(f"{what}: no `megascale up` runs there; {remedy}")


def is_held(folder: Path) -> bool | None:
    """Whether a `megascale up` runs in the folder; None where that cannot be seen."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # never started by `megascale up`, or by another user
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False


def outage(folder: Path) -> tuple[str, str]:
    """Why no driver answers, and the remedy."""
    if is_held(folder):
        log = folder / "driver.log"
        remedy = f"`megascale up` runs there and starts its driver again; {log} says why it ended"
        return f"the driver of the cluster in {folder} is down", remedy
    return f"the cluster in {folder} is down", start_again(folder)


def start_again(folder: Path) -> str:
    """The command that starts the cluster of a run folder again."""
    try:
        words = json.loads((folder / LOCK_FILE).read_text())["options"]
        command = shlex.join(["megascale", "up", "--run-folder", str(folder), *words])
    except (OSError, ValueError, KeyError, TypeError):
        return f"start it with `megascale up --run-folder {folder}`, with the options it had"
    return f"start it with `{command}`"


def _not_allowed(path: Path, error: OSError) -> NotAllowed:
    return NotAllowed(
        f"{path} cannot be read ({error.strerror}): ask the owner of the cluster for access to it"
    )
