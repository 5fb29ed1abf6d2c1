"""The platform process of a cluster: ``python -m megascale_driver.platform.kubernetes --help``.

One such process runs next to the drivers of a cluster. Only it has rights on the Kubernetes API;
drivers have none, and nodes, which run a team's own code, must not have any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service import logs
from megascale_common.service.channel import present
from megascale_common.service.errors import NotFoundError, OptionError, UnavailableError
from megascale_common.service.identity import certificates
from megascale_common.service.start import build_version, ends_with_a_sentence, read_token
from megascale_driver.platform.follower import AFTER_S, NodeProvider
from megascale_driver.platform.interface import MAX_NODES
from megascale_driver.platform.kubernetes.objects import SELECTOR, STATEFUL_SET, SWITCH_LABEL

if TYPE_CHECKING:
    from megascale_driver.platform.kubernetes.cluster import KubernetesCluster

INTERVAL_S = 5.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m megascale_driver.platform.kubernetes",
        description="Carry out the driver's decisions about nodes on Kubernetes, and report the "
        "state of their machines to the driver.",
    )
    made.add_argument("--version", action="version", version=build_version())
    add = made.add_argument
    add("--driver", required=True, help="drivers as HOST:PORT[,HOST:PORT], tried in turn")
    add("--token-file", type=Path, required=True, help="file with the cluster token (mode 0600)")
    add("--namespace", required=True, help="namespace of the nodes' pods")
    add("--selector", default=SELECTOR, help="labels of the nodes' pods (default %(default)s)")
    add(
        "--switch-label",
        default=SWITCH_LABEL,
        help="label of a machine whose value is its switch (default %(default)s)",
    )
    add(
        "--kubeconfig",
        type=Path,
        help="configuration file; default: the service account of this pod",
    )
    add(
        "--interval-s",
        type=float,
        default=INTERVAL_S,
        help="longest time between two looks at the driver (default %(default)s)",
    )
    add(
        "--provide-up-to",
        type=int,
        default=0,
        help="add pods if jobs lack nodes, up to this total; 0 (the default): never",
    )
    add(
        "--provide-after-s",
        type=float,
        default=AFTER_S,
        help="how long jobs must lack nodes before pods are added (default %(default)s)",
    )
    add(
        "--stateful-set",
        default=STATEFUL_SET,
        help="the StatefulSet of the nodes' pods (default %(default)s)",
    )
    certificates.add_options(made)
    return made


def main() -> None:
    """Run until SIGTERM or SIGINT; exit status 0 then, 2 for an option that cannot work."""
    if PARENT_PID_VARIABLE in os.environ:
        arm_parent_death()
    made = parser()
    options = made.parse_args()
    if not 0 < options.interval_s <= 3600:
        made.error("--interval-s: give a number of seconds up to 3600")
    if not 0 <= options.provide_up_to <= MAX_NODES or options.provide_after_s < 0:
        made.error(f"--provide-up-to, --provide-after-s: give 0 to {MAX_NODES}, and seconds from 0")
    logs.configure("kubernetes")
    with ends_with_a_sentence("megascale kubernetes"):
        present(certificates.of_options(options))
        asyncio.run(_run(options, read_token(options.token_file)))


async def _run(options: argparse.Namespace, token: str) -> None:
    # Imported late, so that --help works without the extra, and a missing extra is one sentence.
    try:
        from megascale_driver.platform.kubernetes.api import KubernetesApi
        from megascale_driver.platform.kubernetes.cluster import KubernetesCluster
        from megascale_driver.platform.kubernetes.controller import Controller, Driver
    except ImportError as error:
        raise OptionError(f"{error}: install it with `pip install megascale[kubernetes]`") from None

    driver = Driver([each for each in options.driver.split(",") if each], token)
    try:
        async with KubernetesApi(options.kubeconfig) as api:
            cluster = KubernetesCluster(
                api, options.namespace, options.selector, options.switch_label
            )
            controller = Controller(
                cluster, driver, options.interval_s, _providing(cluster, options)
            )
            running = asyncio.create_task(controller.run())
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, running.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await running
    finally:
        await driver.close()


def _providing(cluster: KubernetesCluster, options: argparse.Namespace) -> NodeProvider | None:
    """The part that adds pods for missing nodes; None if that is switched off."""

    async def provide(count: int) -> int:
        try:
            return await cluster.provide(options.stateful_set, count)
        except NotFoundError as error:
            raise UnavailableError(error.message) from None

    def report(event: str, fields: dict[str, Any]) -> None:
        logs.get(__name__).warning(event, **fields)

    if not options.provide_up_to:
        return None
    return NodeProvider(provide, options.provide_up_to, options.provide_after_s, report)


if __name__ == "__main__":
    main()
