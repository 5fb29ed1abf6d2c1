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
    if not folder.is_dir():
        raise ClusterNotFound(
            f"no cluster at {folder} ({origin}): start one with `megascale up`, or give the run "
            f"folder of a running one with --cluster DIR or ${RUN_FOLDER_VARIABLE}"
        )
    return folder


def read_token(folder: Path) -> str:
    """The cluster token of a run folder.

    Raises:
        ClusterNotFound: there is no token, so no cluster was ever started in this folder.
        NotAllowed: the token belongs to another user.
    """
    try:
        return (folder / TOKEN_FILE).read_text().strip()
    except FileNotFoundError:
        raise ClusterNotFound(
            f"{folder} holds no cluster (no file `{TOKEN_FILE}`): "
            f"start one there with `megascale up --run-folder {folder}`"
        ) from None
    except PermissionError:
        raise NotAllowed(
            f"{folder / TOKEN_FILE} is not yours to read: ask the owner of the cluster"
        ) from None


def address_reader(folder: Path) -> Callable[[], str]:
    """A function that reads the driver's current address, anew on each call.

    A restarted driver writes a new address to the same file. The function raises ClusterNotFound
    while there is none.
    """

    def read() -> str:
        try:
            address = (folder / ADDRESS_FILE).read_text().strip()
        except FileNotFoundError:
            address = ""
        if not address:
            raise ClusterNotFound(
                f"no driver serves {folder} (no address in `{ADDRESS_FILE}`): "
                "is `megascale up` running?"
            )
        return address

    return read
