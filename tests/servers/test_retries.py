"""The retry policy: how long a pause is, how many tries there are, when a run stops."""

import email.utils
import time

import pytest

from common.pipeline.errors import SafetyStop
from common.servers.retries import LONGEST_PAUSE_S, RetryPolicy, is_retried, retry_after_s


def test_backoff_doubles_up_to_a_limit_with_jitter():
    policy = RetryPolicy(retries=10, max_consecutive_failures=1, what="requests")
    for tries in range(1, 11):
        longest = min(2.0 ** (tries - 1), LONGEST_PAUSE_S)
        pauses = [policy.pause_s(tries) for _ in range(50)]
        assert all(longest / 2 <= pause <= longest for pause in pauses) and len(set(pauses)) > 1
    assert policy.pause_s(11) is None


def test_retry_after_replaces_backoff_up_to_the_deadline():
    policy = RetryPolicy(retries=1, max_consecutive_failures=1, what="requests")
    assert 5 <= policy.pause_s(1, wait_s=5) <= 5.5
    assert 7 <= policy.pause_s(1, wait_s=100, longest_wait_s=7) <= 7.7
    assert policy.pause_s(2, wait_s=5) is None


def test_a_success_starts_the_count_of_failures_anew():
    policy = RetryPolicy(retries=0, max_consecutive_failures=2, what="samples")
    policy.failed("one")
    policy.succeeded()
    policy.failed("two")
    with pytest.raises(SafetyStop, match="2 samples failed in a row, the last with: three; rerun to resume"):
        policy.failed("three")


def test_which_errors_are_retried():
    assert [status for status in range(400, 600) if is_retried(status) and status < 500] == [408, 409, 425, 429]
    assert all(is_retried(status) for status in (500, 502, 503, 504, 529))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("soon", None), ("", None), ("nan", None), ("inf", None)],
)
def test_retry_after(value, seconds):
    assert retry_after_s({"retry-after": value}) == seconds


def test_retry_after_as_a_date():
    assert retry_after_s({"retry-after": email.utils.formatdate(time.time() + 100, usegmt=True)}) == pytest.approx(
        99, abs=2
    )
    assert retry_after_s({"retry-after": email.utils.formatdate(time.time() - 100, usegmt=True)}) == 0.0
    assert retry_after_s({}) is None
