"""The learning-rate finder: what it returns, and that the graph is as it was."""

import math
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from tests.fit_runs import BATCH, arrays, parameters, renewed


def test_the_graph_is_as_it_was_and_rates_rise() -> None:
    training, plain = renewed(), renewed(1)
    for one in (training, plain):
        sg.fit(one, arrays(), progress="quiet")  # buffers, statistics and the random stream are under way
    before, steps = parameters(training), training.optimizer.time_step
    found = sg.find_learning_rate(training, arrays(), lowest=1e-4, highest=10.0, steps=30)
    assert parameters(training) == before
    assert training.optimizer.learning_rate == 0.01 and training.optimizer.time_step == steps
    assert len(found.rates) == len(found.losses) <= 30
    ratios = np.divide(found.rates[1:], found.rates[:-1])
    np.testing.assert_allclose(ratios, 1e5 ** (1 / 29))
    assert found.rates[0] == 1e-4 and found.suggested in found.rates
    a, b = (sg.fit(one, arrays(), epochs=2, progress="quiet") for one in (training, plain))
    assert a.steps == b.steps and parameters(training) == parameters(plain)


def test_the_losses_are_those_of_a_loop_by_hand() -> None:
    training, mine = renewed(), renewed(1)
    x, y = arrays()
    found = sg.find_learning_rate(training, (x, y), lowest=1e-3, highest=1e-1, steps=8, shuffle=False)
    losses = []
    for n in range(8):
        mine.optimizer.learning_rate = 1e-3 * 100 ** (n / 7)
        rows = slice(n % 6 * BATCH, n % 6 * BATCH + BATCH)
        losses.append(mine.execute({"x": x[rows]}, {"y": y[rows]}, batch_size=len(x[rows])).loss)
    assert found.losses == losses


def test_it_ends_when_the_loss_diverges() -> None:
    training = renewed()
    x, y = arrays()
    x[20:] = np.nan
    before = parameters(training)
    found = sg.find_learning_rate(training, (x, y), steps=50, shuffle=False)
    assert len(found.rates) == 3 and math.isnan(found.losses[-1]) and parameters(training) == before


def test_an_error_puts_the_graph_back_too() -> None:
    training = renewed()
    before = parameters(training)

    def broken(epoch: int) -> Any:
        yield arrays(BATCH)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        sg.find_learning_rate(training, broken)
    assert parameters(training) == before and training.optimizer.learning_rate == 0.01


@pytest.mark.parametrize(
    "wrong", [{"lowest": 0.0}, {"lowest": 1.0, "highest": 0.1}, {"steps": 1}, {"highest": math.inf}]
)
def test_senseless_ranges_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(sg.ArgumentError, match="find_learning_rate"):
        sg.find_learning_rate(renewed(), arrays(), **wrong)
