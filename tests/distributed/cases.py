"""All cases, by id."""

from . import layer_cases, ring_cases, rule_cases, wrapped_cases


def of(size):
    """The cases for that many processes."""
    layers = layer_cases.of(size) | wrapped_cases.of(size)
    return rule_cases.of(size) | ring_cases.of(size) | layers
