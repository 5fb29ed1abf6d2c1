"""Self-check: the node's checkpoint daemon serves."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding


class CheckpointDaemonServes(Diagnostic):
    """Skipped for a job that writes no checkpoints."""

    name = "checkpoint_daemon"

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the node."""
        if node.attempt is not None and not node.attempt.job.checkpoint.uri:
            return [Finding(self.name, "node", "SKIPPED", "the job writes no checkpoints")]
        endpoint = await node.daemon_endpoint()
        if endpoint:
            return [Finding(self.name, "node", "PASS", f"serves at {endpoint}")]
        detail = "does not serve; see checkpoint.log of the node"
        return [Finding(self.name, "node", "FAIL", detail)]
