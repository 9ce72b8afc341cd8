"""Shared by all tests: fresh random inputs every run, with the seed printed."""

import gc
import random
import signal
import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Collections of garbage search no objects of earlier files: imported packages have millions,
    and some tests ask for many collections.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_replayed():
    """Drops prepared calls: a test may replace parts of the program on which they depend."""
    if below_autograd := sys.modules.get("deepspeed4science.below_autograd"):
        below_autograd.forget()


def pytest_configure():
    """Processes that tests start can be interrupted even where this one cannot: a shell that starts
    it in the background, or nohup, has it ignore interrupts, which its children would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="repeat the inputs of an earlier run")


@pytest.fixture(scope="session")
def session_seed(request):
    given = request.config.getoption("--seed")
    return random.SystemRandom().randrange(2**31) if given is None else given


def pytest_report_header(config):
    given = config.getoption("--seed")
    return (
        f"inputs: seed {given}" if given is not None else "inputs: fresh, seed printed on failure"
    )


@pytest.fixture
def seed(session_seed):
    """Seeds torch and prints what to repeat; pytest shows it when the test fails."""
    print(f"repeat with --seed {session_seed}")
    torch = pytest.importorskip("torch")
    torch.manual_seed(session_seed)
    return session_seed
