"""What every platform keeps (docs/how-to/add-a-platform.md), checked on one of its nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from megascale_common.service.errors import OptionError, UnavailableError
from megascale_driver.platform.interface import MAX_NODES, PREFIX, Platform, PlatformNode


async def node_of(platform: Platform, name: str) -> PlatformNode:
    """The node as the platform lists it."""
    (found,) = [node for node in await platform.nodes() if node.name == name]
    return found


async def check(platform: Platform, name: str, undo: Callable[[], Awaitable[None]]) -> None:
    """Drain and restore a node in every way.

    Args:
        name: a node that is ready and not drained, and is so again at the end.
        undo: makes the platform's operators take back a drain of theirs.
    """
    nodes = await platform.nodes()
    assert [node.name for node in nodes] == sorted({node.name for node in nodes})
    before = await node_of(platform, name)
    assert before.ready and not before.drained and all(before.conditions)
    # Errors change nothing.
    for wrong in (
        platform.drain("nobody", "x"),
        platform.restore("nobody"),
        platform.drain(name, ""),
    ):
        with pytest.raises(OptionError):
            await wrong
    await platform.restore(name)  # which is not drained
    assert await node_of(platform, name) == before
    # Ours: drained, twice as once, and restored, twice as once.
    for _ in range(2):
        await platform.drain(name, f"{PREFIX}three ECC errors (GPU 3)")
        drained = await node_of(platform, name)
        assert drained.drained and drained.reason == f"{PREFIX}three ECC errors (GPU 3)"
        assert drained.switch == before.switch
    for _ in range(2):
        await platform.restore(name)
        assert not (await node_of(platform, name)).drained
    # Another's: stays.
    await platform.drain(name, "moved to another rack")
    await platform.restore(name)
    theirs = await node_of(platform, name)
    assert theirs.drained and theirs.reason == "moved to another rack"
    await undo()
    assert not (await node_of(platform, name)).drained


async def check_provide(platform: Platform, count: int, *, gives: bool) -> None:
    """Ask for one node more than the cluster has.

    Args:
        count: nodes that it has.
        gives: whether the platform has one more to give; it then has ``count + 1`` at the end.
    """
    for wrong in (-1, 0, MAX_NODES + 1):
        with pytest.raises(OptionError, match="count"):
            await platform.provide(wrong)
    for enough in (1, count):  # none is taken away
        assert await platform.provide(enough) == count
    if not gives:
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await platform.provide(count + 1)
        assert await platform.provide(count) == count
        return
    # The number is a total: a caller that ended after it had asked asks for the same again.
    for _ in range(3):
        assert await platform.provide(count + 1) == count + 1
    assert await platform.provide(count) == count + 1
