"""When a platform is asked for more nodes: after a while, bounded, the same number again."""

from __future__ import annotations

from typing import Any

import pytest

from megascale_common.service.errors import UnavailableError
from megascale_driver.platform.follower import NodeProvider


class Scene:
    """A platform with ``there`` nodes that gives all it is asked for, unless it refuses."""

    def __init__(self, up_to: int = 10, there: int = 2) -> None:
        self.now_s, self.there, self.refusal = 1000.0, there, ""
        self.asked: list[int] = []
        self.events: list[tuple[str, Any]] = []
        self.up_to = up_to
        self.start()

    def start(self) -> None:
        """A process of its own, as after a crash."""
        self.providing = NodeProvider(self._provide, self.up_to, 60.0, self._report, self._clock)

    def _clock(self) -> float:
        return self.now_s

    def _report(self, event: str, fields: dict[str, Any]) -> None:
        self.events.append((event, fields))

    async def _provide(self, count: int) -> int:
        self.asked.append(count)
        if self.refusal:
            raise UnavailableError(self.refusal)
        self.there = max(self.there, count)
        return self.there

    async def lack(self, wanted: int, missing: int, seconds: float) -> None:
        """Look at an interval of ten seconds for so long."""
        for _ in range(round(seconds / 10)):
            await self.providing.settle(wanted, missing)
            self.now_s += 10


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_nodes_that_lack_for_a_moment_are_not_asked_for(scene: Scene) -> None:
    await scene.lack(3, 1, 60)
    await scene.lack(3, 0, 10)
    await scene.lack(3, 1, 60)
    assert scene.asked == [] and scene.events == []


async def test_the_same_number_is_asked_for_until_they_are_there(scene: Scene) -> None:
    await scene.lack(5, 3, 90)
    assert scene.asked == [5, 5, 5] and scene.there == 5
    assert scene.events == [("provided", {"count": 5, "there": 5, "bound": 0})]
    # A crash after the call: the next process asks for the same, and gets none twice.
    scene.start()
    await scene.lack(5, 1, 70)
    assert set(scene.asked) == {5} and scene.there == 5


async def test_more_than_the_bound_is_never_asked_for() -> None:
    scene = Scene(up_to=4)
    await scene.lack(400, 398, 100)
    assert set(scene.asked) == {4}
    assert scene.events == [("provided", {"count": 4, "there": 4, "bound": 4})]
    idle = Scene(up_to=0)
    await idle.lack(5, 3, 100)
    assert idle.asked == []


async def test_a_refusal_is_reported_once_and_asked_again(scene: Scene) -> None:
    scene.refusal = "no machine is left"
    await scene.lack(3, 1, 100)
    assert scene.events == [("not_provided", {"count": 3, "error": "no machine is left"})]
    assert len(scene.asked) == 4
    scene.refusal = ""
    await scene.lack(3, 1, 20)
    assert scene.events[1:] == [("provided", {"count": 3, "there": 3, "bound": 0})]
