"""An event loop whose time is virtual and whose ready order is drawn from a seed.

Nothing here waits: when no callback is ready, time moves to the next timer. The callbacks that are
ready together run in an order that the seed chooses, so a history holds for one interleaving of
tasks, and another seed tries another one. There are no threads and no sockets.

A task belongs to a :class:`Process`. A process can be killed between any two of its callbacks, that
is between any two awaits of its tasks: from then on none of its code runs, not even a ``finally``.
It can also be paused, as by SIGSTOP, and go on later.

Note [Order]
~~~~~~~~~~~~
By default the callbacks that are ready together are shuffled, so one more of them changes the order
of all. In an ordered loop each has a key: a hash of the key of the callback that brought it about,
and of how many that one had brought about before. The first keys follow from the seed and the event
of the world, and :meth:`VirtualLoop.call_in_place` gives the key itself. So the order of callbacks
is total, still another one with each seed, and does not depend on callbacks that have nothing to do
with them, such as heartbeats that a resting node does not send.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import operator
import random
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
START_S = 1_700_000_000.0

_CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
# Coroutines of killed processes: collected, they would run their `finally` blocks after all.
_BURIED: list[object] = []


class Process:
    """One operating-system process of the simulation: the tasks that die and stop together."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        # Callbacks after which the process is killed; below 0: never.
        self.dies_after = -1
        self.on_death: Callable[[], None] = lambda: None
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.held: list[_Handle] = []
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_CURRENT.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process."""
        return self._loop.create_task(work, context=self._context.copy())

    def kill(self) -> None:
        """End the process at once: none of its code runs again."""
        if not self.alive:
            return
        self.alive = False
        self.dies_after = -1
        _BURIED.extend(self.tasks)
        _BURIED.extend(self.held)
        self.held.clear()
        self.on_death()

    def pause(self) -> None:
        """Run nothing of the process until :meth:`resume`; its timers and input wait."""
        self.paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        if self.paused:
            self.paused = False
            self._loop.ready_again(self.held)
            self.held = []


class _Handle(asyncio.TimerHandle):
    """A callback with its place among those that are ready together; of a timer also its time.

    It sets what asyncio's own sets, without a question for the loop's debug mode each time.
    """

    __slots__ = ("key",)
    key: int
    _loop: Any
    _callback: Any
    _context: contextvars.Context
    _repr: Any
    _source_traceback: Any
    _when: float
    _scheduled: bool

    def __init__(
        self,
        when: float,
        callback: Any,
        args: Any,
        loop: VirtualLoop,
        context: contextvars.Context | None,
        key: int,
    ) -> None:
        self._callback, self._args, self._loop, self.key = callback, args, loop, key
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, False


class _Call:
    """A call of the world's own: of no process, never cancelled, in no context of its own."""

    __slots__ = ("args", "key", "work")

    def __init__(self, work: Callable[..., object], args: tuple[Any, ...], key: int) -> None:
        self.work, self.args, self.key = work, args, key


class DeadlockError(Exception):
    """No callback is ready and no timer is set: the simulation would stand still for ever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. ``random`` chooses among ready callbacks; ``steps`` counts those that ran."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.random = random.Random(f"loop-{seed}")
        self.steps = 0
        self.most_steps = 100_000_000
        self.now_s = START_S  # the virtual time
        # (when, number, what): heaps of TimerHandles compare them in Python, at 5 % of a run.
        self._timers: list[tuple[float, int, _Handle | _Call]] = []
        self._numbers = itertools.count()
        # See Note [Order]; the key of the callback that runs, and how many it has brought about.
        self.ordered = False
        self._event = -1  # of the world, the newest
        self._key, self._children = hash((seed, -1)), 0
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self.now_s

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback with the next ones that are ready."""
        key = self._next_key() if self.ordered else 0
        handle = _Handle(self.now_s, callback, args, self, context, key)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """The same: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a virtual time."""
        key = self._next_key() if self.ordered else 0
        timer = _Handle(when, callback, args, self, context, key)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after a virtual time."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_outside(self, delay_s: float, work: Callable[..., object], *args: Any) -> None:
        """Call ``work`` later as nobody's code: it happens even if the caller dies first."""
        call = _Call(work, args, self._next_key() if self.ordered else 0)
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), call))

    def call_in_place(
        self, delay_s: float, place: int, work: Callable[..., object], *args: Any
    ) -> None:
        """The same at this place of the order, whoever brings it about."""
        if not self.ordered:
            self.call_outside(delay_s, work, *args)
            return
        call = _Call(work, args, hash((self._seed, self._event, place)))
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), call))

    def begin(self, event: int) -> None:
        """What follows from now on has its places by this event, whatever was before."""
        self.random.seed(f"loop-{self._seed}-{event}")
        self._event = event
        self._key, self._children = hash((self._seed, event)), 0

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is brought about in here changes no place of what the callback brings about."""
        key, children = self._key, self._children
        self._key, self._children = hash((key, -1)), 0
        try:
            yield
        finally:
            self._key, self._children = key, children

    def _next_key(self) -> int:
        self._children += 1
        return hash((self._key, self._children))

    def ready_again(self, handles: list[_Handle]) -> None:
        """Callbacks of a process that goes on."""
        self._ready.extend(handles)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Run it now, in place of a thread."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Open a connection as :attr:`dialler` has it; there are no sockets."""
        return await self.dialler(*args, **options)

    dialler: Callable[..., Coroutine[Any, Any, Any]]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that nobody handles is one of the simulation: it ends the run."""
        if not str(context.get("message", "")).startswith("Task was destroyed"):
            self.unhandled.append(context)

    @property
    def unhandled(self) -> list[dict[str, Any]]:
        """Errors of callbacks and tasks that nobody awaited."""
        found: list[dict[str, Any]] = self.__dict__.setdefault("_unhandled", [])
        return found

    def _run_once(self) -> None:
        timers, ready = self._timers, self._ready
        if not ready:
            while timers and _cancelled(timers[0][2]):
                heapq.heappop(timers)
            if not timers:
                raise DeadlockError("nothing is left to happen")
            self.now_s = max(self.now_s, timers[0][0])
        now_s = self.now_s
        while timers and timers[0][0] <= now_s:
            ready.append(heapq.heappop(timers)[2])
        batch = list(ready)
        ready.clear()
        if len(batch) > 1:
            if self.ordered:
                batch.sort(key=_key_of)
            else:
                self.random.shuffle(batch)
        for what in batch:
            if type(what) is _Call:
                self._count(what)
                try:
                    what.work(*what.args)
                except Exception as error:
                    self._failed(error)
            elif not what._cancelled:
                self._run(what)

    def _run(self, handle: _Handle) -> None:
        process = handle._context.get(_CURRENT)
        if process is not None:
            if not process.alive:
                _BURIED.append(handle)
                return
            if process.paused:
                process.held.append(handle)
                return
            if process.dies_after >= 0:
                if process.dies_after == 0:
                    _BURIED.append(handle)
                    process.kill()
                    return
                process.dies_after -= 1
        self._count(handle)
        try:
            handle._context.run(handle._callback, *handle._args)
        except Exception as error:
            self._failed(error)

    def _count(self, what: _Handle | _Call) -> None:
        """Count what is about to run, and make its key that of what it brings about."""
        self.steps += 1
        if self.steps > self.most_steps:
            raise DeadlockError(f"{self.steps} callbacks: something goes round in circles")
        if self.ordered:
            self._key, self._children = what.key, 0

    def _failed(self, error: Exception) -> None:
        self.call_exception_handler({"message": "a callback failed", "exception": error})

    # What BaseEventLoop asks of its subclasses.
    _ready: deque[_Handle | _Call]

    def _process_events(self, event_list: list[Any]) -> None:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        """There are no other threads to wake this one."""


_key_of: Callable[[Any], int] = operator.attrgetter("key")


def _cancelled(what: _Handle | _Call) -> bool:
    return type(what) is not _Call and what.cancelled()  # type: ignore[union-attr]


def current_process() -> Process | None:
    """The process whose code runs now; None outside of all."""
    return _CURRENT.get()


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = _CURRENT.get() if context is None else context.get(_CURRENT)
    if process is not None:
        process.tasks.add(task)
    return task
