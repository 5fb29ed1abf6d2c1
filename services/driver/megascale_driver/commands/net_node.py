"""What a node of a running cluster found about the site's network profile before its last attempt.

For `megascale net verify NODE`: asks the driver, which has the findings from the node's heartbeats.
"""

from __future__ import annotations

from pathlib import Path

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.service.channel import open_channel, present
from megascale_common.service.errors import NotFoundError, UnavailableError
from megascale_common.service.identity import certificates
from megascale_common.service.identity.peers import Role
from megascale_common.service.status import enum_name
from megascale_driver.platform.local_node import OPERATOR_NAME

CHECK = "network_profile"
CALL_TIMEOUT_S = 10.0


async def findings(run_folder: Path, node: str) -> list[dict[str, str]]:
    """``target``, ``verdict`` and ``detail`` of each; empty before the node's first attempt.

    Raises:
        UnavailableError: no cluster runs in that folder.
        NotFoundError: it has no such node.
    """
    try:
        address = (run_folder / "driver.address").read_text().strip()
        token = (run_folder / "token").read_text().strip()
    except OSError as error:
        raise UnavailableError(
            f"there is no running cluster at {run_folder} ({error.strerror}): give its run folder "
            "with --cluster, or run `megascale net verify FILE` on the node itself",
            reason="CLUSTER_DOWN",
        ) from None
    present(certificates.of_cluster(run_folder, Role.OPERATOR, OPERATOR_NAME))
    async with open_channel(address, token) as channel:
        stub = driver_pb2_grpc.DriverServiceStub(channel)
        page = ""
        while True:
            request = driver_pb2.ListNodesRequest(page_token=page)
            answer = await stub.ListNodes(request, timeout=CALL_TIMEOUT_S)
            for found in answer.nodes:
                if found.name == node:
                    return [_row(check) for check in found.checks if check.name == CHECK]
            page = answer.next_page_token
            if not page:
                break
    raise NotFoundError(f"there is no node {node} (`megascale nodes` lists them)")


def _row(check: types_pb2.CheckResult) -> dict[str, str]:
    verdict = enum_name(types_pb2.CheckVerdict, check.verdict, "CHECK_VERDICT_")
    return {"target": check.target, "verdict": verdict, "detail": check.detail}
