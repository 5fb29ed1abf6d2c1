"""Sends alerts to webhooks beside the loop: no decision ever waits for one.

Each webhook has a queue and a task of its own. A request runs in a thread, with a deadline. What
fails is tried again with growing waits, or when the server says (429, 503 with Retry-After), and
given up after GIVE_UP_S. A full queue drops the oldest alert and counts it. A URL is a secret: logs
name its host alone.
"""

from __future__ import annotations

import asyncio
import random
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from megascale_common.service import logs, tasks
from megascale_driver.alerting.grouping import Alert, Groups
from megascale_driver.alerting.messages import Format, body
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit

MAX_QUEUED: Final = 256
REQUEST_S: Final = 10.0
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0
GIVE_UP_S: Final = 900.0
CLOSE_S: Final = 3.0  # for what is queued when the driver ends
_log = logs.get(__name__)


class Webhook:
    """One address, its queue and what became of its alerts."""

    def __init__(self, url: str, cluster: str, form: Format) -> None:
        self._url, self._cluster, self._form = url, cluster, form
        self.host = urllib.parse.urlsplit(url).hostname or "?"
        self.outcomes: Counter[str] = Counter()  # sent, failed, dropped
        self._queue: deque[Alert] = deque()
        self._more = asyncio.Event()

    def put(self, alert: Alert) -> None:
        """Queue an alert; the oldest is dropped from a full queue."""
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft()
            self.outcomes["dropped"] += 1
        self._queue.append(alert)
        self._more.set()

    async def run(self) -> None:
        """Send for ever, one after the other."""
        while True:
            await self._more.wait()
            while self._queue:
                await self._deliver(self._queue.popleft())
            self._more.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._queue

    async def _deliver(self, alert: Alert) -> None:
        loop = asyncio.get_running_loop()
        until_s, wait_s = loop.time() + GIVE_UP_S, FIRST_WAIT_S
        data = body(alert, self._cluster, self._form)
        while True:
            problem, asked_s = await asyncio.to_thread(self._post, data)
            if not problem:
                self.outcomes["sent"] += 1
                return
            pause_s = max(asked_s, wait_s * random.uniform(0.5, 1.5))
            if asked_s < 0 or loop.time() + pause_s > until_s:
                self.outcomes["failed"] += 1
                _log.warning("an alert was not delivered", host=self.host, reason=problem)
                return
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _post(self, data: bytes) -> tuple[str, float]:
        """Why it failed (empty: it did not), and how long the server asks to wait; -1: for ever."""
        headers = {"Content-Type": "application/json", "User-Agent": "megascale"}
        request = urllib.request.Request(self._url, data=data, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S):
                return "", 0.0
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 429 or error.code >= 500:
                    return f"HTTP {error.code}", _seconds(error.headers.get("Retry-After"))
                return f"HTTP {error.code}", -1.0  # as it is it will never be taken
        except (OSError, ValueError) as error:
            return type(error).__name__, 0.0  # its text may hold the URL


def _seconds(text: str | None) -> float:
    """Of a Retry-After header; 0 for dates and nonsense."""
    return min(float(text), GIVE_UP_S) if text is not None and text.isdecimal() else 0.0


class Alerts:
    """Observes the engine and alerts by webhooks."""

    def __init__(
        self, webhooks: Sequence[Webhook], groups: Groups, now_s: Callable[[], float]
    ) -> None:
        self.webhooks, self._groups, self._now_s = tuple(webhooks), groups, now_s
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def outcomes(self) -> Counter[str]:
        """How many alerts were sent, failed and dropped, over all webhooks; lines silenced."""
        counts = sum((webhook.outcomes for webhook in self.webhooks), Counter[str]())
        counts["silenced"] = self._groups.held_back
        return counts

    def start(self) -> None:
        """Begin to send."""
        work = [self._group, *(webhook.run for webhook in self.webhooks)]
        self._tasks = [tasks.repeated(each, "alerts") for each in work]

    def step(self, job: str, record: object) -> None:
        """Steps alert nobody."""

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """Take in the lines of a decision."""
        now_s = self._now_s()
        for line in audit:
            self._groups.add(line, now_s, new.silences)
        if audit:
            self._changed.set()

    async def close(self) -> None:
        """Send what is queued, for a little while, and end."""
        for alert in self._groups.due(float("inf")):
            for webhook in self.webhooks:
                webhook.put(alert)
        for _ in range(int(CLOSE_S / 0.1)):
            if all(webhook.idle for webhook in self.webhooks):
                break
            await asyncio.sleep(0.1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _group(self) -> None:
        while True:
            for alert in self._groups.due(self._now_s()):
                for webhook in self.webhooks:
                    webhook.put(alert)
            next_s = self._groups.next_s()
            wait_s = None if next_s is None else max(next_s - self._now_s(), 0.01)
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
