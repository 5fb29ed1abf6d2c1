"""Ranks for all modules, started once: a CUDA context and its libraries take seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from tests.harness.interpreter import interpret_without_cuda
from tests.harness.ranks import RankPool, rank_pool

interpret_without_cuda()  # modules of this folder may be imported without being run

# Ranks that hang on a device spin: their CPU time is no progress, and devices are expensive.
CAP_S = 240


def pytest_itemcollected(item: pytest.Item) -> None:
    """End a test of this folder sooner than others."""
    item.add_marker(pytest.mark.timeout(CAP_S))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that stay for the whole session, by world size.

    cuBLAS reads its workspace when a process first uses it: too late for a deterministic job that
    follows another one.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with rank_pool(resident=True) as ready:
        yield ready


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens: a run that its time limit ends says nothing afterwards."""
    if report.failed and report.nodeid.startswith("tests/gpu"):
        print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext}", file=sys.stderr)
