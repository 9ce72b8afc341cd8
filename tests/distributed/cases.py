"""All cases, by id."""

from . import rule_cases


def of(size):
    """Those for so many processes."""
    return rule_cases.of(size)
