"""What people and their scripts ask of the drivers, right and wrong, with retries.

A request goes to one driver after another under one request_id until it is answered, as clients do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from tests.simulation.shell.network import Context, Refused
from tests.simulation.shell.ordered import Order
from tests.simulation.shell.training import SNAPSHOT_STEPS

from megascale.v1 import driver_pb2
from megascale_job import config as job_config
from megascale_job import loading
from megascale_job.wire import spec as job_spec

if TYPE_CHECKING:
    from tests.simulation.shell.world import World

CALL_S = 8.0
GIVE_UP_S = 900.0


class Operators:
    """Requests in progress, and their answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = 0
        self.busy = 0
        self.answers: list[tuple[str, str]] = []  # method, code
        self.configs: dict[str, job_config.JobConfig] = {}  # of every job that was submitted
        self.repeats = 0.0  # chance that a request is sent once more

    def submit(
        self,
        name: str,
        nodes: int,
        *,
        steps: int,
        step_s: float,
        spares: int = 0,
        priority: int = 0,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Submit a job on so many whole nodes; ``more``: further fields of its specification."""
        world = self._world
        world.submitted(name, step_s, nodes * world.devices)
        config = job_of(name, nodes, world.devices, steps, spares, priority, more or {})
        self.configs[name] = config
        self.send("SubmitJob", driver_pb2.SubmitJobRequest(spec=job_spec.to_proto(config)))

    def send(self, method: str, request: Any, then: Callable[[], None] | None = None) -> None:
        """Send a request until it is answered, ``then`` do something.

        Later answers of repetitions do not count.
        """
        self._numbers += 1
        if "request_id" in type(request).DESCRIPTOR.fields_by_name and not request.request_id:
            request.request_id = f"{method}-{self._numbers}"
        self.busy += 1
        self._world.touched()
        order = self._world.invariants.orders.sent(request)
        self._outside(self._until_answered(method, request, order, then))

    def _outside(self, work: Coroutine[Any, Any, None]) -> None:
        world = self._world
        task = world.loop.create_task(work, context=world._outside.copy())
        self._tasks = [*getattr(self, "_tasks", []), task]
        self._tasks = [item for item in self._tasks if not item.done()]

    async def _until_answered(
        self, method: str, request: Any, order: Order, then: Callable[[], None] | None
    ) -> None:
        world, orders, unsure = self._world, self._world.invariants.orders, False
        began_s = world.now_s
        try:
            while world.now_s - began_s < GIVE_UP_S:
                for driver in world.drivers:
                    if not driver.alive:
                        continue
                    code = await self._call(driver, method, request)
                    if code in ("UNAVAILABLE", "NO_ANSWER"):
                        unsure = True
                        continue
                    orders.answered(order, "UNSURE" if unsure and code != "OK" else code)
                    if world.random.random() < self.repeats:
                        await asyncio.sleep(world.draw(0.0, 20.0))
                        if code != "OK":  # what was refused may be in order by now
                            orders.answered(order, "UNSURE")
                        await self._repeat(driver, method, request, code)
                    self.answers.append((method, code))
                    world.touched()
                    return
                await asyncio.sleep(world.draw(0.5, 2.0))
            orders.answered(order, "GIVEN_UP")
            self.answers.append((method, "GIVEN_UP"))
        finally:
            self.busy -= 1
            if then is not None:
                then()

    async def _repeat(self, driver: Any, method: str, request: Any, code: str) -> None:
        """Send a request again: under its id it is carried out once, and answered the same."""
        again = await self._call(driver, method, request)
        if code == "OK" and again not in ("OK", "UNAVAILABLE", "NO_ANSWER"):
            self._world.invariants.breaks("request", f"{method} again is answered by {again}")

    async def _call(self, driver: Any, method: str, request: Any) -> str:
        """One call; the code of its answer."""
        reply: asyncio.Future[str] = self._world.loop.create_future()

        async def serve() -> None:
            code = "OK"
            try:
                await driver.service.handlers[method](request, Context("ada"))
            except Refused as refusal:
                code = refusal.code.name if isinstance(refusal.code, grpc.StatusCode) else "?"
            except Exception as error:
                code = f"ERROR {type(error).__name__}: {error}"
                self._world.invariants.request_failed(method, error)
            if not reply.done():
                reply.set_result(code)

        driver.process.spawn(serve())
        try:
            async with asyncio.timeout(CALL_S):
                return await reply
        except TimeoutError:
            return "NO_ANSWER"


def job_of(
    name: str,
    nodes: int,
    devices: int,
    steps: int,
    spares: int,
    priority: int,
    more: Mapping[str, Any],
) -> job_config.JobConfig:
    """A job of one tensor-parallel group per node."""
    fields: dict[str, Any] = {
        "name": name,
        "priority": priority,
        "model": {
            "layers": 2,
            "hidden_size": 64,
            "heads": 4,
            "vocab_size": 257,
            "sequence_length": 64,
        },
        "training": {"steps": steps, "global_batch_size": 8 * nodes},
        "parallelism": {"tp": devices, "pp": 1, "dp": nodes},
        "data": {"sources": [{"prefix": "/data/corpus"}]},
        "checkpoint": {"uri": f"/checkpoints/{name}", "interval_steps": SNAPSHOT_STEPS},
        "recovery": {
            "spare_nodes": spares,
            "max_restarts": 100_000,
            "max_restarts_without_progress": 1000,
        },
    }
    for key, value in more.items():
        fields[key] = {**fields.get(key, {}), **value} if isinstance(value, Mapping) else value
    return loading.from_accepted(fields)
