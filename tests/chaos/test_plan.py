"""A job on a real cluster beside its plan, with an optimizer that sleeps: which term is named."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest
from tests.harness import paced
from tests.harness.chaos_cluster import chaos_cluster, measured
from tests.harness.local_cluster import megascale

# What `megascale plan calibrate` writes; the rates of one shared core.
CALIBRATION = {
    "version": 1,
    "device": "cpu",
    "attention_tokens": 256,
    "rates": {
        "gemm_flops": 5e10,
        "attention_flops": 2e10,
        "copy_bytes_s": 1e10,
        "collective_bytes_s": 1e8,
    },
}
SLEEP_S = 0.1


def scraped(address: Path) -> str:
    with urllib.request.urlopen(f"http://{address.read_text().strip()}/metrics", timeout=10) as got:
        return str(got.read().decode())


@pytest.mark.slow
async def test_a_job_that_is_slower_than_planned_says_by_which_term(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(CALIBRATION))
    with chaos_cluster(tmp_path, "--nodes", "2", "--calibration", str(file)) as cluster:
        where = ("--cluster", str(cluster.up.folder))
        async with cluster.client() as client:
            optimizer = paced.paced(SLEEP_S)
            spec = cluster.job("slow", steps=10_000, interval_steps=0, dp=2, optimizer=optimizer)
            async with cluster.follow(client, spec) as run:
                found = await run.until_event("SLOWER_THAN_PLAN")
                job = await client.get("slow")
                why = await client.explain("slow")
                shown = megascale("job", "slow", *where)
                metrics = await asyncio.to_thread(scraped, cluster.up.folder / "metrics.address")
                lines = [event for event in run.events if event.reason == "SLOWER_THAN_PLAN"]
                await client.cancel("slow", reason="the test is over")
    assert len(lines) == 1 and found.mode == "OBSERVE" and run.job.attempt == 1, run.story()
    assert "optimizer term +" in found.message, found
    assert job.plan.slower_by == "optimizer" and not job.plan.problem, job.plan
    terms = {term.name: term for term in job.plan.terms}
    assert SLEEP_S <= terms["optimizer"].measured_s < 2 * SLEEP_S, job.plan
    total = sum(term.measured_s for term in terms.values())
    assert 0.7 < total / job.plan.measured_step_s < 1.3, job.plan
    assert "slower than planned: step" in why.explanation and why.plan.slower_by == "optimizer"
    assert "optimizer term +" in " ".join(shown.stdout.split()), shown
    assert 'megascale_plan_step_seconds{job="slow",kind="measured"}' in metrics, metrics
    assert 'megascale_plan_term_seconds{job="slow",kind="planned",term="optimizer"}' in metrics
    measured("plan", step_s=job.plan.measured_step_s, planned_s=job.plan.predicted_step_s)
