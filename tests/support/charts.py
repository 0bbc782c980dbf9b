"""Runs of 04 without charts: drawing them takes longer than the tiny runs that the tests train."""

from tests.support.patched import patched

CHARTS = ("line_chart", "bar_chart", "histogram")


def without_charts():
    """A context in which the report has empty drawings in place of its charts; tests/report draws them."""
    return patched({f"common.report.report.{name}": lambda *_, **__: "<svg></svg>" for name in CHARTS})
