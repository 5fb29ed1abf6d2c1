"""Access by the cluster's token once, then by a cookie; no secret stays in a URL.

The token is that of the run folder. The link that is printed at the start carries a key of this
process alone, which is exchanged for the cookie at once, so the cluster's token is in no URL.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable

COOKIE = "megascale_dashboard"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 256  # the oldest is forgotten first
MAX_FAILURES = 10  # of one caller within FAILURES_S; further ones are refused
FAILURES_S = 60.0
MAX_CALLERS = 1024  # whose failures are remembered; the one that failed longest ago is forgotten


class TooManyAttempts(Exception):
    """One more wrong token, after too many from this caller within a minute."""


class Access:
    """The sessions of one dashboard.

    Args:
        token: the cluster's token.
        clock: monotonic seconds.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = secrets.token_urlsafe(24)  # for the link that is printed at the start
        self._token = token
        self._clock = clock
        self._sessions: OrderedDict[str, float] = OrderedDict()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def open(self, given: str, caller: str | None) -> str | None:
        """A new session for the token or the key; None for anything else.

        The right one is accepted whatever was tried before: it is too long to be guessed, and a
        limit would let anybody lock its owner out.

        Args:
            caller: the address that asks; None: a page of another site asks through a browser,
                so its failures are not counted against the address.

        Raises:
            TooManyAttempts: a wrong one, and the caller has given wrong ones too often.
        """
        if not self._right(given, (self._token, self.key), caller):
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = self._clock() + SESSION_S
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def allows(self, session: str) -> bool:
        """Whether a session is known and has not expired."""
        until_s = self._sessions.get(session)
        if until_s is None:
            return False
        if self._clock() >= until_s:
            del self._sessions[session]
            return False
        return True

    def bears(self, header: str, caller: str | None) -> bool:
        """Whether an Authorization header has the cluster's token: for programs.

        ``caller`` and what it raises: as of :meth:`open`.
        """
        scheme, _, given = header.partition(" ")
        return scheme.lower() == "bearer" and self._right(given.strip(), (self._token,), caller)

    def close(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(session, None)

    def _right(self, given: str, wanted: tuple[str, ...], caller: str | None) -> bool:
        # All are compared, in constant time, so that the time of an answer tells nothing.
        found = [hmac.compare_digest(given.encode(), each.encode()) for each in wanted]
        if not any(found) and caller is not None:
            self._note_failure(caller)
        return any(found)

    def _note_failure(self, caller: str) -> None:
        now_s = self._clock()
        # The times of the newest MAX_FAILURES failures: full, with a recent oldest, is too many.
        failures = self._failures.setdefault(caller, deque(maxlen=MAX_FAILURES))
        self._failures.move_to_end(caller)
        while len(self._failures) > MAX_CALLERS:
            self._failures.popitem(last=False)
        if len(failures) == MAX_FAILURES and now_s - failures[0] < FAILURES_S:
            raise TooManyAttempts(
                f"{MAX_FAILURES} wrong tokens within {FAILURES_S:g} s from your address: "
                "only the right one is taken"
            )
        failures.append(now_s)
