"""Random numbers: the platform's seed, the initializers, and the statistics of the counter-based masks.

All draws are fixed by their seeds, so a bound of four sigma either holds always or never.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph import random
from stepgraph.errors import ArgumentError
from stepgraph.random import draw_seed, get_seed, initialize, keep_mask, set_seed, uniform
from stepgraph.types import RandomInitializerType

UNIFORM, GLOROT, XAVIER = RandomInitializerType
COUNT = 1 << 16


@pytest.fixture(autouse=True)
def platform_seed() -> Iterator[None]:
    """Puts the platform's generator back after a test that seeds it."""
    seed, state = random._seed, random._generator.get_state()
    yield
    random._seed = seed
    random._generator.set_state(state)


def mask(seed: int = 7, step: int = 0, salt: int = 3, rate: float = 0.5, count: int = COUNT) -> torch.Tensor:
    return keep_mask(torch.tensor([seed, step]), salt, (count,), rate)


def sigmas(kept: torch.Tensor, rate: float) -> float:
    """Distance of the share of kept elements from `1 - rate`, in standard deviations."""
    return abs(kept.double().mean().item() - (1 - rate)) / math.sqrt(rate * (1 - rate) / kept.numel())


class TestSeed:
    def test_seed_is_what_was_given(self) -> None:
        for seed in (0, 1, -5, 2**63 + 1):
            set_seed(seed)
            assert get_seed() == seed

    def test_seeded_runs_repeat(self) -> None:
        def draws() -> list[float]:
            values = [initialize(kind, (3, 4), 4, 3) for kind in (UNIFORM, GLOROT, XAVIER)]
            return [*torch.stack(values).flatten().tolist(), draw_seed()]

        set_seed(17)
        first = draws()
        assert draws() != first
        set_seed(17)
        assert draws() == first
        set_seed(18)
        assert draws() != first

    @pytest.mark.parametrize("seed", [1.0, "1", None, True])
    def test_other_kinds_are_refused(self, seed: object) -> None:
        with pytest.raises(ArgumentError, match="not an integer"):
            set_seed(seed)  # type: ignore[arg-type]

    def test_drawn_seeds_differ_and_fit_the_stream(self) -> None:
        seeds = [draw_seed() for _ in range(200)]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**31 for seed in seeds)


class TestInitialize:
    SHAPE, FAN_IN, FAN_OUT = (200, 300), 300, 200

    def values(self, kind: RandomInitializerType, dtype: torch.dtype = torch.float32) -> np.ndarray:
        set_seed(4)
        return initialize(kind, self.SHAPE, self.FAN_IN, self.FAN_OUT, dtype).double().numpy()

    def test_uniform(self) -> None:
        values = self.values(UNIFORM)
        assert 0 <= values.min() < 1e-3
        assert 1 - 1e-3 < values.max() < 1
        assert values.mean() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / values.size))
        assert values.var() == pytest.approx(1 / 12, rel=0.02)

    def test_glorot_uniform(self) -> None:
        values, bound = self.values(GLOROT), math.sqrt(6 / 500)
        assert -bound <= values.min() < -0.99 * bound
        assert 0.99 * bound < values.max() <= bound
        assert values.mean() == pytest.approx(0, abs=4 * bound / math.sqrt(3 * values.size))
        assert values.var() == pytest.approx(bound**2 / 3, rel=0.02)

    def test_xavier(self) -> None:
        values, variance = self.values(XAVIER), 2 / 500
        assert values.mean() == pytest.approx(0, abs=4 * math.sqrt(variance / values.size))
        assert values.var() == pytest.approx(variance, rel=0.03)
        assert (values**4).mean() / values.var() ** 2 == pytest.approx(3, rel=0.05)  # of a normal distribution
        assert np.abs(values).max() > 3.5 * math.sqrt(variance)

    @pytest.mark.parametrize("kind", RandomInitializerType)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_every_floating_type_is_filled(self, kind: RandomInitializerType, dtype: torch.dtype) -> None:
        array = initialize(kind, (5, 6), 6, 5, dtype)
        assert (array.dtype, array.shape) == (dtype, (5, 6))
        assert array.unique().numel() > 5

    @pytest.mark.parametrize("kind", RandomInitializerType)
    def test_whole_numbers_are_refused(self, kind: RandomInitializerType) -> None:
        with pytest.raises(ArgumentError, match="int32"):
            initialize(kind, (2,), 1, 1, torch.int32)

    def test_other_kinds_are_refused(self) -> None:
        with pytest.raises(ArgumentError, match="not a random initializer"):
            initialize("normal", (2,), 1, 1)  # type: ignore[arg-type]


class TestKeepMask:
    @pytest.mark.parametrize("rate", [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
    def test_share_is_one_minus_the_rate_in_every_step(self, rate: float) -> None:
        distances = [sigmas(mask(step=step, rate=rate), rate) for step in range(20)]
        assert max(distances) < 4
        assert sigmas(torch.cat([mask(step=step, rate=rate) for step in range(20)]), rate) < 4

    @pytest.mark.parametrize("vary", ["step", "salt", "seed"])
    def test_masks_of_different_steps_nodes_and_seeds_are_uncorrelated(self, vary: str) -> None:
        numbers = [*range(40), *(1 << power for power in range(6, 31, 3))]
        masks = torch.stack([mask(**{vary: number}) for number in numbers]).float()
        correlations = torch.corrcoef(masks).fill_diagonal_(0) * math.sqrt(COUNT)
        pairs = correlations[torch.triu(torch.ones_like(correlations), 1) > 0]
        assert pairs.abs().max() < 5  # of about 1200 pairs
        assert pairs.std() == pytest.approx(1, rel=0.1)

    def test_blocks_and_columns_have_binomial_counts(self) -> None:
        for step in range(5):
            for rate in (0.5, 0.1):
                kept = mask(step=step, rate=rate).float()
                for width in (4, 8, 16, 64, 256):
                    table = kept.view(-1, width)
                    for axis in (0, 1):
                        counts, taken = table.sum(axis), table.shape[axis]
                        chi_square = ((counts - taken * (1 - rate)) ** 2).sum() / (taken * rate * (1 - rate))
                        degrees = counts.numel()
                        assert abs(chi_square - degrees) < 4.5 * math.sqrt(2 * degrees), (step, rate, width, axis)

    def test_patterns_of_eight_neighbours_are_equally_frequent(self) -> None:
        for step in range(5):
            patterns = mask(step=step, count=1 << 18).view(-1, 8).long() @ (2 ** torch.arange(8))
            expected = patterns.numel() / 256
            chi_square = ((torch.bincount(patterns, minlength=256) - expected) ** 2 / expected).sum()
            assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)

    def test_no_distance_correlates(self) -> None:
        for step in range(5):
            centered = mask(step=step).float() - 0.5
            spectrum = torch.fft.rfft(centered - centered.mean(), 2 * COUNT)
            products = torch.fft.irfft(spectrum.abs() ** 2)[: COUNT // 2]
            assert (products[1:] / products[0] * math.sqrt(COUNT)).abs().max() < 5.5  # of 32767 distances

    def test_one_element_is_uncorrelated_from_step_to_step(self) -> None:
        steps = torch.stack([mask(step=step, count=8) for step in range(3000)]).float() - 0.5
        assert (steps.mean(0) * 2 * math.sqrt(3000)).abs().max() < 4
        for distance in (1, 2, 3, 10):
            products = (steps[distance:] * steps[:-distance]).mean(0)
            assert (4 * products * math.sqrt(3000)).abs().max() < 4

    def test_mask_is_a_function_of_its_arguments(self) -> None:
        assert torch.equal(mask(), mask())
        assert torch.equal(mask(count=100), mask(count=1000)[:100])
        shaped = keep_mask(torch.tensor([7, 0]), 3, (4, 5, 6), 0.5)
        assert torch.equal(shaped.flatten(), mask(count=120))
        assert (shaped.dtype, shaped.shape) == (torch.bool, (4, 5, 6))

    def test_mask_stays_what_it_was_in_earlier_versions(self) -> None:
        # A checkpoint resumes with these numbers: a change here breaks it.
        kept = keep_mask(torch.tensor([1, 2]), 3, (24,), 0.5)
        assert "".join("01"[one] for one in kept.int().tolist()) == "000011011010011101011100"

    def test_ends_of_the_range(self) -> None:
        assert mask(rate=0.0).all()
        assert mask(rate=1e-12).all()
        assert not mask(rate=1 - 1e-12).any()
        assert mask(count=0).shape == (0,)
        assert keep_mask(torch.tensor([7, 0]), 3, (), 0.5).shape == ()

    def test_lower_rate_keeps_what_a_higher_one_keeps(self) -> None:
        low, high = mask(rate=0.2), mask(rate=0.6)
        assert (low | ~high).all()

    def test_any_seed_step_and_salt_will_do(self) -> None:
        for seed, step, salt in ((-1, 0, 0), (2**62, 2**40, -(2**40)), (0, 0, 0)):
            assert sigmas(mask(seed=seed, step=step, salt=salt), 0.5) < 4

    def test_global_generator_is_neither_read_nor_moved(self) -> None:
        before = torch.get_rng_state()
        first = mask()
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(99)
        assert torch.equal(mask(), first)
        torch.set_rng_state(before)

    def test_traced_mask_follows_the_stream(self) -> None:
        traced = make_fx(lambda stream: keep_mask(stream, 3, (50,), 0.5), tracing_mode="fake")(torch.tensor([7, 0]))
        for step in range(3):
            assert torch.equal(traced(torch.tensor([7, step])), mask(step=step, count=50))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_every_device_draws_the_same(self) -> None:
        there = keep_mask(torch.tensor([7, 5], device="cuda"), 3, (COUNT,), 0.3)
        assert torch.equal(there.cpu(), mask(step=5, rate=0.3))


class TestUniform:
    def numbers(self, step: int = 0, salt: int = 3, count: int = COUNT) -> torch.Tensor:
        return uniform(torch.tensor([7, step]), salt, (count,)).double()

    def test_numbers_are_multiples_of_a_24th_bit_below_one(self) -> None:
        drawn = torch.cat([self.numbers(step) for step in range(20)])
        assert 0 <= drawn.min() < 1e-5
        assert 1 - 1e-5 < drawn.max() < 1
        assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
        assert uniform(torch.tensor([7, 0]), 3, (2, 5)).dtype is torch.float32

    def test_moments_are_those_of_the_uniform_distribution(self) -> None:
        for step in range(20):
            drawn = self.numbers(step)
            for power in (1, 2, 3, 4):
                spread = math.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / COUNT)
                assert abs(drawn.pow(power).mean() - 1 / (power + 1)) < 4 * spread

    def test_each_of_the_24_bits_is_fair_and_independent_of_its_neighbours(self) -> None:
        whole = (self.numbers() * 2**24).long()
        bits = torch.stack([(whole >> place) & 1 for place in range(24)]).double()
        assert ((bits.mean(1) - 0.5) * 2 * math.sqrt(COUNT)).abs().max() < 4
        pairs = torch.corrcoef(torch.cat([bits, bits.roll(1, 1)])).fill_diagonal_(0) * math.sqrt(COUNT)
        assert pairs.abs().max() < 5  # of about 1100 pairs

    def test_steps_and_salts_are_uncorrelated(self) -> None:
        rows = [*(self.numbers(step=step) for step in range(20)), *(self.numbers(salt=salt) for salt in range(4, 24))]
        correlations = torch.corrcoef(torch.stack(rows)).fill_diagonal_(0) * math.sqrt(COUNT)
        assert correlations.abs().max() < 5

    def test_numbers_stay_what_they_were_in_earlier_versions(self) -> None:
        # A checkpoint resumes with these numbers: a change here breaks it.
        drawn = uniform(torch.tensor([1, 2]), 3, (4,)) * 2**24
        assert drawn.int().tolist() == [9833943, 9125651, 9376874, 12620042]

    def test_traced_numbers_follow_the_stream(self) -> None:
        traced = make_fx(lambda stream: uniform(stream, 3, (50,)), tracing_mode="fake")(torch.tensor([7, 0]))
        for step in range(3):
            assert torch.equal(traced(torch.tensor([7, step])).double(), self.numbers(step=step, count=50))
