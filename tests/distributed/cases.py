"""All cases, by id."""

from . import layer_cases, ring_cases, rule_cases


def of(size):
    """The cases for that many processes."""
    return rule_cases.of(size) | ring_cases.of(size) | layer_cases.of(size)
