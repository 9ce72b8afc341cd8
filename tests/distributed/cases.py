"""All cases, by id."""

from . import ring_cases, rule_cases


def of(size):
    """Those for so many processes."""
    return rule_cases.of(size) | ring_cases.of(size)
