"""Finds a cluster of this machine by its run folder, which holds driver address and token."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megascale_client.errors import ClusterNotFound, NotAllowed

ADDRESS_FILE = "driver.address"
TOKEN_FILE = "token"
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
        NotAllowed: the token cannot be read by this user, or is damaged.
    """
    try:
        token = (folder / TOKEN_FILE).read_text().strip()
    except FileNotFoundError:
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
    while there is none, and NotAllowed where this user may not read it.
    """

    def read() -> str:
        try:
            address = (folder / ADDRESS_FILE).read_text().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            address = ""
        except OSError as error:
            raise _not_allowed(folder / ADDRESS_FILE, error) from None
        if not address:
            raise ClusterNotFound(
                f"the cluster in {folder} is down: no driver has written its address there; "
                f"{start_again(folder)}"
            )
        return address

    return read


def start_again(folder: Path) -> str:
    """What to do about a cluster that is down."""
    return f"start it with `megascale up --run-folder {folder}`, with the options it had"


def _not_allowed(path: Path, error: OSError) -> NotAllowed:
    return NotAllowed(
        f"{path} is not yours to read ({error.strerror}): "
        "ask the owner of the cluster for the right to it"
    )
