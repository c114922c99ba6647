"""Schedules against PyTorch's, and what they refuse."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph as sg
from tests.fit_runs import arrays, parameters, renewed

THEIRS = torch.optim.lr_scheduler
ROWS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "constant": (sg.ConstantSchedule(0.4), lambda one: THEIRS.ConstantLR(one, factor=1.0)),
    "step": (sg.StepSchedule(0.4, 7, 0.3), lambda one: THEIRS.StepLR(one, 7, 0.3)),
    "linear": (sg.LinearSchedule(0.4, 0.1, 20), lambda one: THEIRS.LinearLR(one, 1.0, 0.25, 20)),
    "cosine": (sg.CosineSchedule(0.4, 0.1, 30), lambda one: THEIRS.CosineAnnealingLR(one, 30, 0.1)),
    "polynomial": (sg.PolynomialSchedule(0.4, power=2.5, steps=20), lambda one: THEIRS.PolynomialLR(one, 20, 2.5)),
    "one cycle": (sg.OneCycleSchedule(0.4, 30), lambda one: THEIRS.OneCycleLR(one, 0.4, 30)),
    "one steep cycle": (
        sg.OneCycleSchedule(0.4, 30, rise=0.1, first=4, last=8),
        lambda one: THEIRS.OneCycleLR(one, 0.4, 30, pct_start=0.1, div_factor=4, final_div_factor=8),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rates_are_those_of_pytorch(name: str) -> None:
    mine, make = ROWS[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    theirs = make(optimizer)
    for n in range(30):
        assert mine(n) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-12), n
        optimizer.step()
        theirs.step() if n < 29 else None


@pytest.mark.parametrize("name", ROWS)
def test_a_warm_up_rises_to_any_schedule_and_hands_over(name: str) -> None:
    then = ROWS[name][0]
    rate = sg.Warmup(then, 5)
    assert [rate(n) for n in range(5)] == pytest.approx([then(0) * (n + 1) / 5 for n in range(5)])
    assert [rate(n) for n in range(5, 35)] == [then(n) for n in range(30)]
    assert sg.Warmup(then, 0)(3) == then(3)


def test_warm_up_and_cosine_is_the_two_of_them() -> None:
    both, apart = sg.WarmupCosine(0.4, 6, 40, 0.1), sg.Warmup(sg.CosineSchedule(0.4, 0.1, 34), 6)
    assert [both(n) for n in range(50)] == [apart(n) for n in range(50)]


def test_fit_fills_in_the_number_of_updates() -> None:
    cosine = sg.CosineSchedule(0.1)
    for given, whole in (
        (sg.LinearSchedule(0.1), sg.LinearSchedule(0.1, steps=12)),
        (sg.OneCycleSchedule(0.1), sg.OneCycleSchedule(0.1, 12)),
        (sg.Warmup(sg.Warmup(cosine, 2), 3), sg.Warmup(sg.Warmup(replace(cosine, steps=7), 2), 3)),
        (sg.Warmup(lambda n: 0.1 / (n + 1), 3), sg.Warmup(lambda n: 0.1 / (n + 1), 3)),
    ):
        history = sg.fit(renewed(), arrays(), epochs=2, schedule=given, progress="quiet")
        assert [rate for _, _, rate in history.steps] == [whole(n) for n in range(12)]
    batches = [arrays(8)] * 2
    with pytest.raises(sg.ArgumentError, match="number of updates is unknown"):
        sg.fit(renewed(), lambda epoch: batches, schedule=sg.Warmup(sg.LinearSchedule(0.1), 1), progress="quiet")


@pytest.mark.parametrize("schedule", [sg.OneCycleSchedule(0.02), sg.Warmup(sg.PolynomialSchedule(0.02, power=2), 3)])
def test_a_schedule_goes_on_after_a_stop_within_an_epoch(schedule: Any, tmp_path: Path) -> None:
    class Stop(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            if moment.step == 8:
                moment.stop()

    settings: dict[str, Any] = {"epochs": 3, "schedule": schedule, "progress": "quiet"}
    whole, resumed = renewed(), renewed(1)
    expected = sg.fit(whole, arrays(), **settings)
    sg.fit(renewed(2), arrays(), checkpoints=tmp_path, callbacks=[Stop()], **settings)
    assert sg.fit(resumed, arrays(), checkpoints=tmp_path, resume=True, **settings).steps == expected.steps
    assert parameters(resumed) == parameters(whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.ConstantSchedule(-0.1),
        lambda: sg.ConstantSchedule(math.nan),
        lambda: sg.ConstantSchedule("0.1"),
        lambda: sg.StepSchedule(0.1, 0),
        lambda: sg.StepSchedule(0.1, 5, -0.5),
        lambda: sg.LinearSchedule(math.inf),
        lambda: sg.LinearSchedule(0.1, -1e-9),
        lambda: sg.CosineSchedule(0.1, 0.2),
        lambda: sg.CosineSchedule(0.1, steps=0),
        lambda: sg.PolynomialSchedule(0.1, power=-1),
        lambda: sg.OneCycleSchedule(0.1, rise=1.5),
        lambda: sg.OneCycleSchedule(0.1, first=0),
        lambda: sg.Warmup(sg.ConstantSchedule(0.1), -1),
        lambda: sg.WarmupCosine(0.1, 2.5),
    ],
)
def test_settings_that_give_no_rates_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(sg.ArgumentError, match="Fix:"):
        make()


@pytest.mark.parametrize("bad", [-1e-3, math.nan, math.inf, None, "fast"])
def test_a_schedule_that_returns_no_rate_ends_the_run_before_the_update(bad: Any) -> None:
    training = renewed()
    with pytest.raises(sg.ArgumentError, match="for update 3"):
        sg.fit(training, arrays(), schedule=lambda n: bad if n == 3 else 0.01, progress="quiet")
    assert training.optimizer.time_step == 4  # three updates were made
    with pytest.raises(sg.DataTypeError, match="not a function"):
        sg.fit(training, arrays(), schedule=0.1, progress="quiet")
    with pytest.raises(sg.DataTypeError, match="not a function"):
        sg.Warmup(0.1, 3)


def test_numbers_of_other_libraries_are_rates() -> None:
    history = sg.fit(renewed(), arrays(8), schedule=lambda n: torch.tensor(0.25), progress="quiet")
    assert history["rate"] == [0.25]
