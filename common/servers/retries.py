"""The one retry policy for requests to servers: what is retried, after how long, and when a run stops.

The openai client's own retries stay off (`max_retries=0`): it would repeat a request on the server that failed while
another one is free, and it notices neither a faulty body nor a missing file. With both policies at work, a sample would
be sent more often than `retries` + 1 times.
"""

import email.utils
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from common.pipeline.errors import SafetyStop
from common.servers.endpoints import status_line

LONGEST_PAUSE_S = 60.0
RETRIED_STATUS = (408, 409, 425, 429)  # and every 5xx; another 4xx means that the request itself is wrong


@dataclass
class RetryPolicy:
    """Exponential backoff with jitter for one request, and a stop after too many failed requests in a row."""

    retries: int
    max_consecutive_failures: int
    what: str  # the plural of what fails, for the message
    consecutive_failures: int = 0

    def pause_s(self, tries: int, wait_s: float | None = None, longest_wait_s: float = math.inf) -> float | None:
        """Seconds until the next try after `tries` failed ones, None where no try is left.

        `wait_s`: the server's Retry-After, which is honoured up to `longest_wait_s`.
        """
        if tries > self.retries:
            return None
        if wait_s is not None:
            return min(wait_s, longest_wait_s) * random.uniform(1.0, 1.1)
        return min(2.0 ** (tries - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self.consecutive_failures = 0

    def failed(self, reason: str) -> None:
        """Count a request whose tries all failed; raises SafetyStop when the next ones would probably fail too."""
        self.consecutive_failures += 1
        if self.consecutive_failures >= self.max_consecutive_failures:
            raise SafetyStop(
                f"{self.consecutive_failures} {self.what} failed in a row, the last with: {reason}; rerun to resume"
            )


def refusal(response) -> tuple[str, bool, float | None]:
    """(message, whether a retry may help, Retry-After in seconds) of an HTTP error, from the client's raw response."""
    status, headers = response.status_code, response.headers
    return status_line(status, response.text), is_retried(status), retry_after_s(headers)


def is_retried(status: int) -> bool:
    """Whether a request that got this HTTP status may succeed when it is sent again."""
    return status in RETRIED_STATUS or status >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, given as seconds or as a date; None without a valid one."""
    value = headers.get("retry-after", "")
    date = email.utils.parsedate_tz(value)
    try:
        seconds = email.utils.mktime_tz(date) - time.time() if date else float(value)
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
