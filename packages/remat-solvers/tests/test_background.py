import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from remat_solvers.core.background import in_background

PATIENCE = 600.0  # seconds, after which a test has failed


@pytest.fixture(autouse=True)
def _soon():
    with mock.patch("remat_solvers.core.background._SOON", 0.1):
        yield


@pytest.fixture
def two_cores():
    with mock.patch("remat_solvers.core.background._cores", return_value=2):
        yield


def test_gives_what_the_call_gives():
    assert in_background(lambda: 3) == 3


def test_raises_what_the_call_raises():
    def fail() -> None:
        raise ZeroDivisionError("of the call")

    with pytest.raises(ZeroDivisionError, match="of the call"):
        in_background(fail)


@pytest.mark.usefixtures("two_cores")
def test_takes_turns_until_the_call_is_done():
    enough = threading.Event()
    turns: list[float] = []

    def take(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            enough.set()

    assert in_background(lambda: enough.wait(PATIENCE), take)
    assert len(turns) >= 3
    assert min(turns) > 0


def test_takes_no_turns_without_a_second_core():
    turns: list[float] = []
    with mock.patch("remat_solvers.core.background._cores", return_value=1):
        assert not in_background(lambda: threading.Event().wait(0.3), turns.append)
    assert turns == []


def test_a_worker_of_a_pool_has_one_core():
    turns: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(in_background, lambda: threading.Event().wait(0.3), turns.append).result()
    assert turns == []


@pytest.mark.usefixtures("two_cores")
def test_an_interruption_does_not_wait_for_the_call():
    released, done = threading.Event(), threading.Event()

    def call() -> None:
        released.wait(PATIENCE)
        done.set()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_background(call, interrupt)
    assert not done.is_set()
    released.set()
    assert done.wait(PATIENCE)
