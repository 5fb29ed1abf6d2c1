"""The bandwidth limit of stage 2: the bucket without a clock, and ranks that share one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_checkpoint.concurrency import BURST_S, Cancellation, TokenBucket
from megascale_checkpoint.save.write_limit import MIB, WriteLimits
from megascale_common.service.errors import SupersededError


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    bucket = TokenBucket(1000.0)
    assert bucket.take(int(1000 * BURST_S), 10.0) == 0.0
    assert bucket.take(500, 10.0) == 0.5
    assert bucket.take(500, 10.0) == 1.0
    assert bucket.take(100, 11.0) == pytest.approx(0.1)
    assert bucket.take(100, 99.0) == 0.0  # what was not used is not saved up beyond the burst
    assert bucket.take(1000, 99.0) == pytest.approx(1.1 - BURST_S)


@given(
    st.floats(1e3, 1e10),
    st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 5)), min_size=1, max_size=40),
)
def test_in_no_span_of_time_more_is_written_than_rate_and_burst(
    rate: float, takes: list[tuple[int, float]]
) -> None:
    bucket, now_s = TokenBucket(rate), 0.0
    written: list[tuple[float, int]] = []
    for size, pause_s in takes:
        now_s += pause_s
        now_s += bucket.take(size, now_s)  # the writer waits, then writes
        written.append((now_s, size))
    for first in range(len(written)):
        total = 0
        for at_s, size in written[first:]:
            total += size
            span_s = at_s - written[first][0]
            # The first one's own bytes were paid for before the span.
            assert total - written[first][1] <= rate * (span_s + BURST_S) * (1 + 1e-6) + 1


def test_ranks_of_a_job_share_its_limit_and_another_job_has_its_own() -> None:
    limits, rate_mib, each = WriteLimits(), 8.0, 2 * MIB

    def write(job: str) -> int:
        data = memoryview(bytearray(each))
        return sum(map(len, limits.paced(job, rate_mib, [data], Cancellation())))

    begun_s = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, ["a", "a", "a", "b"])) == [each] * 4
    # Only a lower bound: a busy machine may take longer.
    assert time.monotonic() - begun_s >= 3 * each / (rate_mib * MIB) - BURST_S


def test_without_a_limit_chunks_pass_as_they_are_and_a_wait_can_be_cancelled() -> None:
    chunks = [memoryview(bytes(5 * MIB)), memoryview(b"x")]
    assert list(WriteLimits().paced("job", 0.0, chunks, Cancellation())) == chunks
    cancelled = Cancellation()
    paced = WriteLimits().paced("job", 1.0, chunks, cancelled)
    next(paced)
    cancelled.cancel()
    with pytest.raises(SupersededError):
        next(paced)
