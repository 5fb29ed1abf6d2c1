"""DriverService calls about the whole cluster: figures, rules, quotas, circuit breaker."""

from __future__ import annotations

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.service.errors import invalid
from megascale_common.service.start import build_version
from megascale_common.service.status import answers
from megascale_driver.core.queue.scheduling import demand
from megascale_driver.core.values.cluster import Liveness
from megascale_driver.core.values.events import (
    BreakerResetRequested,
    PolicyRequested,
    QuotaRequested,
)
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.rules import RULES
from megascale_driver.service.driver import Calls, Context
from megascale_driver.wire import messages as wire
from megascale_job.names import is_dns_label

MAX_QUOTA = 10**9  # devices of a tenant


class ClusterCalls(Calls):
    """Reads the cluster's figures, and changes the driver's own rules."""

    @answers
    async def SetPolicy(
        self, request: driver_pb2.SetPolicyRequest, context: Context
    ) -> driver_pb2.SetPolicyResponse:
        """Switch a rule between observing and enforcing."""
        asked = self._driver.asked(request, context)
        if request.rule not in RULES:
            known = ", ".join(RULES)
            raise invalid("rule", f"there is no rule {request.rule!r}", f"give one of {known}")
        if not request.mode or request.mode not in types_pb2.PolicyMode.values():
            raise invalid(
                "mode", "missing or unknown", "give POLICY_MODE_ENFORCE or POLICY_MODE_OBSERVE"
            )
        mode = types_pb2.PolicyMode.Name(request.mode).removeprefix("POLICY_MODE_")
        event = PolicyRequested(rule=request.rule, mode=mode, **asked)
        consequence = await self._driver.carried_out(request, event, "POLICY_SET", "rule")
        rule = driver_pb2.PolicyRule(
            name=request.rule, mode=request.mode, effect=RULES[request.rule].effect
        )
        return driver_pb2.SetPolicyResponse(rule=rule, consequence=consequence)

    @answers
    async def SetQuota(
        self, request: driver_pb2.SetQuotaRequest, context: Context
    ) -> driver_pb2.SetQuotaResponse:
        """Limit the devices of a tenant, or restore the driver's default."""
        asked = self._driver.asked(request, context)
        if not is_dns_label(request.tenant):
            problem = f"{request.tenant!r} is not the name of a tenant"
            raise invalid("tenant", problem, "use a-z, 0-9 and '-', at most 63")
        devices = request.devices if request.HasField("devices") else None
        if devices is not None and not 0 <= devices <= MAX_QUOTA:
            raise invalid("devices", f"{devices} is out of range", f"give 0 to {MAX_QUOTA}")
        event = QuotaRequested(tenant=request.tenant, devices=devices, **asked)
        consequence = await self._driver.carried_out(request, event, "QUOTA_SET", "tenant")
        tenant = wire.tenant_message(self._engine.state, self._engine.policy, request.tenant)
        return driver_pb2.SetQuotaResponse(tenant=tenant, consequence=consequence)

    @answers
    async def ResetBreaker(
        self, request: driver_pb2.ResetBreakerRequest, context: Context
    ) -> driver_pb2.ResetBreakerResponse:
        """Reset the circuit breaker, so that inferred verdicts are enforced again."""
        event = BreakerResetRequested(**self._driver.asked(request, context))
        consequence = await self._driver.carried_out(request, event, "BREAKER_RESET", "breaker")
        return driver_pb2.ResetBreakerResponse(consequence=consequence)

    @answers
    async def GetClusterInfo(
        self, request: driver_pb2.GetClusterInfoRequest, context: Context
    ) -> driver_pb2.GetClusterInfoResponse:
        """The leader, counts of alive nodes and running jobs, rules, tenants, missing nodes."""
        self._driver.require_state()
        state, term = self._engine.state, self._engine.term
        tripped_s = state.breaker.tripped_at_s
        asked = demand(state, self._engine.policy)
        return driver_pb2.GetClusterInfoResponse(
            rules=wire.rule_messages(state.breaker.modes),
            tenants=wire.tenant_messages(state, self._engine.policy),
            breaker_tripped_at=wire.timestamp(tripped_s) if tripped_s else None,
            cluster=self._driver.cluster,
            leader=self._engine.address if term is not None else "",
            epoch=self._driver.epoch(),
            leader_since=wire.timestamp(state.leader_since_s),
            build=build_version(),
            nodes_alive=sum(node.liveness is Liveness.ALIVE for node in state.nodes.values()),
            jobs_running=sum(job.phase is JobPhase.RUNNING for job in state.jobs.values()),
            nodes_wanted=asked.wanted,
            nodes_missing=asked.missing,
            nodes_missing_reason=asked.why,
        )
