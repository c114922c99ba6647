"""`benchmarks.real`: both forms of a model are the same, and what the program makes of what its contenders say."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import stepgraph as sg
from benchmarks.real import turns
from benchmarks.real.__main__ import Wanted, main, options
from benchmarks.real.contender import Contender
from benchmarks.real.contenders import CAPTURED, OURS, Eager, FromTransformers, Imported, Stepgraph, in_jax
from benchmarks.real.models import MODELS, SMALL, Model
from benchmarks.real.report import summed_up, table
from benchmarks.real.turns import Failed, in_short, middle, rounds, surroundings
from benchmarks.real.worker import MEMORY, Worker, answer

SLOW = {"resnet50": pytest.mark.deep}  # 53 convolutions to record and compile
STEPS = 3
TOLERANCES = {"resnet50": 5e-4}  # of sums of gradients: rounding grows with depth


class Plain(Stepgraph):
    """Without measuring kernels, which would take longer than the test."""

    settings: ClassVar = {"deterministic": True}


class PlainImport(Imported):
    settings: ClassVar = {"deterministic": True}


class PlainTransformers(FromTransformers):
    settings: ClassVar = {"deterministic": True}


def trained(contender: Contender, model: Model) -> list[float]:
    """The losses of some steps, each of another batch."""
    losses = []
    for step in range(STEPS):
        contender.step(*model.batch(step, "cpu"))
        losses.append(contender.loss)
    return losses


def made(kind: type[Contender], model: Model) -> Any:
    contender = kind(model, "cpu")
    contender.make()
    contender.remember()
    return contender


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SMALL])
def test_a_model_is_the_same_in_stepgraph_and_in_pytorch(name: str) -> None:
    model = SMALL[name]
    ours, eager = made(Plain, model), made(Eager, model)
    losses = trained(ours, model)
    assert losses == pytest.approx(trained(eager, model), rel=1e-5)
    buffers, state = ours.training.progress().buffers, eager.optimizer.state
    momenta, parameters = ours.wiring.values(lambda one: buffers[one][0]), ours.wiring.values(sg.Tensor.torch)
    theirs = dict(eager.module.named_parameters())
    assert parameters.keys() == theirs.keys()
    for key, parameter in theirs.items():
        momentum = state[parameter]["exp_avg"]
        assert (momenta[key] - momentum).norm() <= TOLERANCES.get(name, 5e-5) * momentum.norm(), key
        if not key.endswith("attention.joint.bias"):  # biases of keys change no loss: AdamW follows rounding there
            close = {"rtol": 1e-4, "atol": 0.02 * model.learning_rate}
            torch.testing.assert_close(parameters[key], parameter.detach(), **close, msg=key)
    ours.reset()
    assert trained(ours, model) == losses  # from the first weights, with an optimizer that knows nothing


@pytest.mark.deep
def test_gpt2_is_the_same_in_jax() -> None:
    pytest.importorskip("optax")
    model = SMALL["gpt2"]
    twin, eager = made(in_jax, model), made(Eager, model)  # type: ignore[arg-type]
    losses = trained(twin, model)
    assert losses == pytest.approx(trained(eager, model), rel=1e-5)
    twin.reset()
    assert trained(twin, model) == losses
    twin.wait()
    assert twin.settled and twin.peak() is None


@pytest.mark.deep
@pytest.mark.parametrize(
    "kind, name", [*((PlainImport, name) for name in SMALL if name != "resnet50"), (PlainTransformers, "gpt2")]
)
def test_an_imported_model_is_the_same(kind: type[Contender], name: str) -> None:
    if kind is PlainTransformers:
        pytest.importorskip("transformers")
    model = SMALL[name]
    assert trained(made(kind, model), model) == pytest.approx(trained(made(Eager, model), model), rel=1e-5)


@pytest.mark.parametrize(
    "name, parameters, flops",
    [
        ("gpt2", 124_475_904, 798_031_872),  # per token: 6 · 123.6 M weights of products, and attention
        ("vit", 86_567_656, 3 * 2 * 17_563_828_224),
        ("resnet50", 25_557_032, 3 * 2 * 4_089_184_256),
    ],
)
def test_a_model_has_the_size_it_is_known_for(name: str, parameters: int, flops: int) -> None:
    model = MODELS[name]
    assert model.parameter_count == parameters
    assert model.flops == flops * model.units


def test_data_are_the_same_at_every_call_and_new_at_every_step() -> None:
    for model in SMALL.values():
        (inputs, labels), (again, _), (others, _) = (model.batch(step, "cpu") for step in (4, 4, 5))
        for key, array in inputs.items():
            assert torch.equal(array, again[key]) and not torch.equal(array, others[key])
        assert len(labels) == model.batch_size
    hidden, masked = SMALL["bert"].batch(0, "cpu")[0]["hidden"], SMALL["bert"].batch(0, "cpu")[1] >= 0
    assert hidden.any() and masked.any() and not (hidden & masked).any()


def row(*seconds: float, ours: tuple[float, ...] = (), size: int = 0, losses: tuple[float, ...] = (2.0, 1.0)) -> dict:
    found: dict[str, Any] = {"rounds": list(seconds), "losses": list(losses), "first_step": 1.0, "ready": 2.0}
    found |= {"ours": list(ours)} if ours else {}
    return found | ({"peak": {"allocated": size, "reserved": size}} if size else {})


def test_the_headline_compares_with_the_fastest_and_with_the_smallest_peer() -> None:
    rows = {
        OURS: row(1.0, 1.0, 1.0, 2.0, 2.0, 2.0, size=6, losses=(2.0, 1.1)),
        "eager": row(2.0, 2.0, 2.0, ours=(1.0, 1.0, 1.0), size=8),
        "compile": row(3.0, 3.0, 3.0, ours=(2.0, 2.0, 2.0), size=12),
        "unfused": row(1.0, ours=(1.0,), size=1),  # ours, so never the best peer
        "reduce": {"failed": MEMORY},
    }
    model = SMALL["gpt2"]
    found = summed_up(model, rows, "NVIDIA H200")
    assert found["fastest_peer"] == "compile" and found["ratio_to_fastest"] == [1.5, 1.5, 1.5]  # of the same rounds
    assert found["smallest_peer"] == "eager" and found["memory_to_smallest"] == 0.75
    ours = found["contenders"][OURS]
    assert ours["loss_distance"] == pytest.approx(0.1) and ours["step_ms"] == [1000, 1500, 2000]
    assert ours["share_of_sheet"] == pytest.approx(model.flops / 1.5 / 989e12)
    assert summed_up(model, rows, "another")["contenders"][OURS]["share_of_sheet"] is None
    assert f"reduce: {MEMORY}" in str(table("gpt2", model, rows, found).caption)


def test_peers_are_compared_with_another_of_our_forms_if_asked() -> None:
    rows = {"unfused": row(1.0, size=6), "eager": row(2.0, ours=(1.0,), size=8)}
    found = summed_up(SMALL["gpt2"], rows, "NVIDIA H200", "unfused")
    assert found["ours"] == "unfused" and found["fastest_peer"] == "eager" and found["memory_to_smallest"] == 0.75
    given = options(["--ours", "unfused", "--peers", "eager"])
    assert list(Wanted.of("vit", given).problems) == ["unfused", "eager"]


def test_a_table_shows_memory_and_times_and_what_did_not_become_ready() -> None:
    sizes = {"allocated": 3 << 30, "reserved": 4 << 30}
    ours = row(1.0) | {"peak": sizes, "kept": 1 << 30, "peak_until_ready": {"allocated": 5 << 30}, "plan": 2 << 30}
    ours |= {"data": 1 << 29, "settled": False}
    ours["warm"] = {"first_step": 0.5, "ready": 0.7, "settled": True}
    found = summed_up(SMALL["gpt2"], {OURS: ours}, "NVIDIA H200")
    drawn = table("gpt2", SMALL["gpt2"], {OURS: ours}, found)
    cells = [next(iter(column.cells)) for column in drawn.columns]
    assert cells[5:12] == ["3.00", "4.00", "1.00", "5.00", "2.50", "1.0 s, warm 0.5 s", "> 2.0 s, warm 0.7 s"]
    assert in_short(ours) == (
        "first step after 1.0 s, ready after 2.0 s, not in its final form, peak 3.00 GiB of 4.00 reserved, "
        "1.00 kept, plan 2.00 GiB, loss 2.0000 to 1.0000"
    )


class Turns:
    """A contender whose turns take known times; None: it fails."""

    def __init__(self, *seconds: float | None) -> None:
        self.seconds, self.counts = list(seconds), list[int]()

    def ask(self, within: float, /, do: str, count: int) -> dict[str, Any]:
        self.counts.append(count)
        found = self.seconds.pop(0)
        if found is None:
            raise Failed(MEMORY)
        return {"seconds": found}


def test_rounds_go_on_without_a_contender_that_fails() -> None:
    ours, other = Turns(0.05, 1.0, 2.0, 3.0), Turns(0.2, 4.0, None)
    times, failed = rounds({OURS: ours, "eager": other}, count=3, seconds=60)  # type: ignore[dict-item]
    assert times == {OURS: [1.0, 2.0, 3.0]} and failed == {"eager": MEMORY}
    assert ours.counts == [3, 10, 10, 10]  # half a second of the first
    times, _ = rounds({OURS: Turns(1.0, 1.0)}, count=3, seconds=0)  # type: ignore[dict-item]
    assert times == {OURS: [1.0]}  # one round at least


class Captured:
    """A contender whose steps allocate known amounts: the fifth is captured, later ones are replays of it."""

    amounts = (9, 7, 7, 8, 5, 1)
    device, peak = "cuda", Contender.peak

    def __init__(self, settles_at: int, hides: bool) -> None:
        self.steps, self.most, self.settles_at, self.hides_memory = 0, 0, settles_at, hides

    def step(self, *_: Any) -> None:
        self.most = max(self.most, self.amounts[min(self.steps, 5)])
        self.steps += 1

    @property
    def settled(self) -> bool:
        return self.steps >= self.settles_at

    @property
    def mode(self) -> str:
        return CAPTURED if self.steps >= 5 else "traced"

    def make(self) -> None: ...

    remember = wait = make

    def facts(self) -> dict[str, Any]:
        return {"plan": 5}


@pytest.mark.parametrize("settles_at, hides, most", [(5, False, 5), (7, False, 5), (7, True, 9)])
def test_the_peak_of_a_captured_step_is_that_of_its_capture(
    settles_at: int, hides: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = Captured(settles_at, hides)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: contender.most)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 10 * contender.most)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 6)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(contender, "most", 0))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    worker: Any = object.__new__(Worker)
    vars(worker).update(device="cuda", contender=contender, inputs={"x": torch.empty(2)}, labels=torch.empty(1))
    worker.start()
    found = worker.settle(60)
    assert found["steps_until_ready"] == settles_at and found["peak_until_ready"] == {"allocated": 9, "reserved": 90}
    assert worker.memory() == {"peak": {"allocated": most, "reserved": 10 * most}, "kept": 6, "data": 12, "plan": 5}


def test_a_contender_has_as_many_threads_as_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(turns, "_cores", lambda: [0, 1, 2, 3])
    assert surroundings(tmp_path, [2, 3])["OMP_NUM_THREADS"] == "2"
    for everything in ([0, 1, 2, 3], None):
        assert "OMP_NUM_THREADS" not in surroundings(tmp_path, everything)
    assert surroundings(tmp_path, None)["XDG_CACHE_HOME"] == str(tmp_path / "xdg_cache_home")


def test_an_error_is_an_answer() -> None:
    class Broken:
        def start(self) -> None:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

        def settle(self) -> None:
            raise ValueError("first line\nsecond line")

    broken: Any = Broken()
    assert answer(broken, {"do": "start"})[1] == {"failed": MEMORY}
    assert answer(broken, {"do": "settle"})[1] == {"failed": "ValueError: first line"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--models", "gpt3"], "there is no model 'gpt3'"),
        (["--peers", "mxnet"], "there is no peer 'mxnet'"),
        (["--modes", "default"], "there is no mode 'default'"),
        (["--at-once", "0"], "--at-once is 0"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(arguments)
    assert words in capsys.readouterr().err


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here; --device cpu --small"):
        main(["--models", "vit"])


def test_a_model_has_its_usual_peers_and_those_that_are_asked_for() -> None:
    usual = [OURS, "unfused", "eager", "compile"]
    assert list(Wanted.of("vit", options([])).problems) == usual
    assert {"imported", "transformers"} < set(Wanted.of("gpt2", options([])).problems)
    given = options(["--peers", "eager,stream", "--modes", "reduce", "--device", "cpu"])
    found = Wanted.of("unet", given).problems
    assert found == {OURS: "", "eager": "", "stream": "not for unet", "reduce": "not for cpu"}


def test_of_several_times_the_middle_one_counts() -> None:
    rows: list[dict[str, Any]] = [{"ready": 3.0, "first_step": 1.0}, {"failed": "no memory"}, {"ready": 2.0}]
    assert middle(rows) == {"ready": 3.0, "first_step": 1.0, "each": [3.0, None, 2.0]}
    assert middle(rows[1:2]) == {"failed": "no memory", "each": [None]}
    assert [options(given).warm for given in ([], ["--warm"], ["--warm", "3"])] == [0, 1, 3]


@pytest.mark.deep
def test_the_program_measures_small_models_and_goes_on_with_its_file(tmp_path: Any) -> None:
    path = tmp_path / "real.json"
    arguments = ["--small", "--device", "cpu", "--rounds", "2", "--losses", "3", "--warm", "2", "--json", str(path)]
    main([*arguments, "--models", "gpt2", "--peers", "eager,transformers", "--at-once", "2"])
    first = json.loads(path.read_text())["models"]["gpt2"]
    assert first["fastest_peer"] == "eager" and len(first["rows"]["eager"]["rounds"]) == 2
    assert all(one["loss_distance"] < 1e-5 for one in first["contenders"].values())
    assert first["rows"][OURS]["warm"]["ready"] == max(first["rows"][OURS]["warm"]["each"]) > 0
    assert "--warm 2 --models gpt2" in first["command"]  # without the file
    main([*arguments, "--models", "gpt2,unet,bert", "--peers", "eager", "--together", "--profile"])
    found = json.loads(path.read_text())["models"]
    assert found["gpt2"] == first and list(found) == ["gpt2", "unet", "bert"]
    assert found["bert"]["at_once"] == 4 and found["bert"]["contenders"]["eager"]["ratio"]
    assert all(calls > 0 and ms >= 0 for _, calls, ms in found["unet"]["rows"][OURS]["kernels"])
    assert all(row["warm"]["ready"] > 0 for row in found["bert"]["rows"].values())
    main([*arguments, "--models", "gpt2,bert", "--together"])  # nothing is left to measure
    assert json.loads(path.read_text())["models"] == found
