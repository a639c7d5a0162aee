"""Hardware counters of calls in this process, without ncu. See `collect`."""

from attnscope.counters.library import Unavailable
from attnscope.counters.session import METRICS, Counted, collect, metrics_for

__all__ = ["METRICS", "Counted", "Unavailable", "collect", "metrics_for"]
