"""Short turns of threads: set once, restored by the last user, left alone if somebody else sets them."""

import os
import sys
from collections.abc import Iterator

import pytest

from stepgraph.system.switch_interval import TURN, ShortSwitchInterval


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def is_short() -> bool:
    return sys.getswitchinterval() == pytest.approx(TURN)


def test_turns_are_short_until_the_last_block_ends() -> None:
    sys.setswitchinterval(0.004)
    with ShortSwitchInterval():
        with ShortSwitchInterval():
            assert is_short()
        assert is_short()
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_block_that_fails_restores_them() -> None:
    sys.setswitchinterval(0.004)
    with pytest.raises(ValueError, match="broken"), ShortSwitchInterval():
        raise ValueError("broken")
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_turns_that_are_shorter_already_stay() -> None:
    sys.setswitchinterval(TURN / 4)
    given = sys.getswitchinterval()
    for _ in range(3):
        with ShortSwitchInterval():
            assert sys.getswitchinterval() == given
        assert sys.getswitchinterval() == given


def test_what_the_program_sets_meanwhile_stays() -> None:
    with ShortSwitchInterval():
        sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == pytest.approx(0.003)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_child_has_the_turns_of_before() -> None:
    sys.setswitchinterval(0.004)
    with ShortSwitchInterval():
        child = os.fork()
        if not child:
            os._exit(0 if sys.getswitchinterval() == pytest.approx(0.004) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
