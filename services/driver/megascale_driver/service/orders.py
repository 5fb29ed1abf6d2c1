"""DriverService, the methods that move running work: restart, update, drain, rules, quotas,
alerts, breaker.
"""

from __future__ import annotations

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.service.errors import NotFoundError, invalid
from megascale_common.service.handlers import answers
from megascale_driver.core.values.events import (
    BreakerResetRequested,
    DrainRequested,
    PolicyRequested,
    QuotaRequested,
    RestartRequested,
    UpdateRequested,
)
from megascale_driver.core.values.rules import RULES
from megascale_driver.core.values.state import Job
from megascale_driver.service import admission, update_request
from megascale_driver.service.base import (
    Context,
    checked_spec,
    required_reason,
)
from megascale_driver.service.watch import WatchMethods
from megascale_driver.wire import messages as wire
from megascale_job.names import is_dns_label

MAX_QUOTA = 10**9  # devices of a tenant
SHOWN = 8  # checkpoints that an error lists


class OrderMethods(WatchMethods):
    """Orders of operators about running work and about the driver's own rules."""

    @answers
    async def RestartJob(
        self, request: driver_pb2.RestartJobRequest, context: Context
    ) -> driver_pb2.RestartJobResponse:
        """Begin a new attempt, from the newest state or from a named step."""
        required_reason(request.reason)
        job, step = self._job(request.name), None
        written_by, later = 0, tuple[int, ...]()
        if request.HasField("from_step"):
            step = request.from_step
            written_by, later = await self._checkpoint_of(job, step)
        event = RestartRequested(
            job=job.name, from_step=step, from_attempt=written_by, later_steps=later,
            now=request.now, **self._asked(request, context),
        )  # fmt: skip
        consequence = await self._carried_out(
            event, "RESTART_REQUESTED", "job", dry=request.validate_only
        )
        return driver_pb2.RestartJobResponse(
            job=self._message(self._job(request.name)), consequence=consequence
        )

    async def _checkpoint_of(self, job: Job, step: int) -> tuple[int, tuple[int, ...]]:
        """The attempt that wrote the checkpoint of ``step``, and the steps to restore no more."""
        if step < 0:
            raise invalid("from_step", f"{step} is negative", "give the step of a checkpoint")
        commits = await self._commits(job) if job.config.checkpoint.uri else []
        steps = sorted({commit.step for commit in commits}, reverse=True)
        if step not in steps and (step or steps):
            newest = ", ".join(map(str, steps[:SHOWN])) or "none"
            raise NotFoundError(
                f"job {job.name} has no complete checkpoint of step {step}; it has {newest} "
                "(`megascale checkpoint list` has all)",
                reason="CHECKPOINT_NOT_FOUND",
            )
        # The newest that is not refused is restored, whatever its number: after an earlier order to
        # go back, it may be a lower one than the one that is named now.
        at = next((n for n, commit in enumerate(commits) if commit.step == step), len(commits))
        newer = {commit.step for commit in commits[:at]} | {
            found for found in steps if found > step
        }
        written_by = commits[at].attempt if at < len(commits) else 0
        return written_by, tuple(sorted(newer - {step}, reverse=True))

    @answers
    async def UpdateJob(
        self, request: driver_pb2.UpdateJobRequest, context: Context
    ) -> driver_pb2.UpdateJobResponse:
        """Give a job a new configuration for its next attempt."""
        required_reason(request.reason)
        config = checked_spec(request)
        job = self._job(config.name)
        changed = update_request.changed_fields(job.config, config)
        warnings = await admission.examine(config, self.engine.state, self.engine.orders.network)
        asked = self._asked(request, context)
        event = UpdateRequested(config=config, restart=request.restart, **asked)
        consequence = await self._carried_out(
            event, "UPDATE_REQUESTED", "job", dry=request.validate_only
        )
        return driver_pb2.UpdateJobResponse(
            job=self._message(self._job(config.name)),
            consequence=consequence,
            changed_fields=changed,
            warnings=warnings,
        )

    @answers
    async def DrainNode(
        self, request: driver_pb2.DrainNodeRequest, context: Context
    ) -> driver_pb2.DrainNodeResponse:
        """Empty a node; its job saves before it leaves."""
        asked = self._asked(request, context)
        event = DrainRequested(node=self._node(request.name).name, **asked)
        consequence = self._preview_leaving(event)
        if not request.validate_only:
            await self._call(event)
        return driver_pb2.DrainNodeResponse(
            node=self._node_message(request.name), consequence=consequence
        )

    @answers
    async def SetPolicy(
        self, request: driver_pb2.SetPolicyRequest, context: Context
    ) -> driver_pb2.SetPolicyResponse:
        """Have a rule observed or enforced."""
        asked = self._asked(request, context)
        if request.rule not in RULES:
            known = ", ".join(RULES)
            raise invalid("rule", f"there is no rule {request.rule!r}", f"give one of {known}")
        if not request.mode or request.mode not in types_pb2.PolicyMode.values():
            raise invalid(
                "mode", "missing or unknown", "give POLICY_MODE_ENFORCE or POLICY_MODE_OBSERVE"
            )
        mode = types_pb2.PolicyMode.Name(request.mode).removeprefix("POLICY_MODE_")
        event = PolicyRequested(rule=request.rule, mode=mode, **asked)
        consequence = await self._carried_out(
            event, "POLICY_SET", "rule", dry=request.validate_only
        )
        rule = driver_pb2.PolicyRule(
            name=request.rule, mode=request.mode, effect=RULES[request.rule]
        )
        return driver_pb2.SetPolicyResponse(rule=rule, consequence=consequence)

    @answers
    async def SetQuota(
        self, request: driver_pb2.SetQuotaRequest, context: Context
    ) -> driver_pb2.SetQuotaResponse:
        """Bound the devices of a tenant, or go back to the driver's default."""
        asked = self._asked(request, context)
        if not is_dns_label(request.tenant):
            problem = f"{request.tenant!r} is not the name of a tenant"
            raise invalid("tenant", problem, "use a-z, 0-9 and '-', at most 63")
        devices = request.devices if request.HasField("devices") else None
        if devices is not None and not 0 <= devices <= MAX_QUOTA:
            raise invalid("devices", f"{devices} is out of range", f"give 0 to {MAX_QUOTA}")
        event = QuotaRequested(tenant=request.tenant, devices=devices, **asked)
        consequence = await self._carried_out(
            event, "QUOTA_SET", "tenant", dry=request.validate_only
        )
        tenant = wire.tenant_message(self.engine.state, self.engine.policy, request.tenant)
        return driver_pb2.SetQuotaResponse(tenant=tenant, consequence=consequence)

    @answers
    async def ResetBreaker(
        self, request: driver_pb2.ResetBreakerRequest, context: Context
    ) -> driver_pb2.ResetBreakerResponse:
        """Enforce inferred verdicts again."""
        event = BreakerResetRequested(**self._asked(request, context))
        consequence = await self._carried_out(
            event, "BREAKER_RESET", "breaker", dry=request.validate_only
        )
        return driver_pb2.ResetBreakerResponse(consequence=consequence)

    def _rules(self) -> list[driver_pb2.PolicyRule]:
        return wire.rule_messages(self.engine.state.breaker.modes)
