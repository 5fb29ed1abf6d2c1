"""What a page of the dashboard says, for the demos that show one: its link and its JSON twin."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from megascale_cli.demo.cluster import DemoFailed
from megascale_client.run_folder import read_token

TIMEOUT_S = 20.0


class Dashboard:
    """The dashboard of the cluster in ``folder``; ``url`` is the link that it has printed.

    That link carries a key which logs a browser in.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._parts, self._folder = urlsplit(url), folder

    def link(self, path: str) -> str:
        """The link of a page, for a browser."""
        return urlunsplit(self._parts._replace(path=path))

    async def read(self, path: str) -> dict[str, Any]:
        """What the page at ``path`` shows.

        Raises:
            DemoFailed: it does not answer, or with an error.
        """
        return await asyncio.to_thread(self._read, path)

    def _read(self, path: str) -> dict[str, Any]:
        url = urlunsplit(self._parts._replace(path=f"{path}.json", query=""))
        token = read_token(self._folder)
        request = Request(url, headers={"authorization": f"Bearer {token}"})
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:
                page = json.load(answer)
        except (URLError, OSError, ValueError) as error:
            raise DemoFailed(f"the dashboard's page {path} cannot be read: {error}") from None
        assert isinstance(page, dict)
        return page
