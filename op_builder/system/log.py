"""Warnings that never fail a call: with a full disk behind stderr, a closed pipe or a handler that
raises, only the message is lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable

logger = logging.getLogger("op_builder")

_seen: dict[Hashable, object] = {}


def warn(message: str) -> None:
    with contextlib.suppress(Exception):
        logger.warning("%s", message)


def warn_once(message: str) -> None:
    if first_time(message):
        warn(message)


def first_time(what: Hashable) -> bool:
    """True once for each `what`, for whichever thread asks first."""
    mine = object()
    return _seen.setdefault(what, mine) is mine


def seen(what: Hashable) -> bool:
    return what in _seen
