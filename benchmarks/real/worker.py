"""One contender in a process of its own: reads requests as lines of JSON and answers each with one line.

Its memory, caches and compiler are therefore its own. `turns.py` is the other end.
"""

import gc
import importlib
import json
import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.real.contender import Contender
from benchmarks.real.contenders import CAPTURED, CONTENDERS
from benchmarks.real.models import MODELS, SMALL

MARK = "answer: "  # libraries print, too
MEMORY = "out of memory"
PEAK_STEPS, SETTLING = 3, 2
KERNELS = 100  # the longest that a profile names


class Worker:
    """Trains with one contender as it is asked to; every method is a request."""

    def __init__(self, model: str, contender: str, device: str, small: bool, batch: int | None) -> None:
        torch.set_float32_matmul_precision("high")  # what stays float32 may use TF32, for everybody
        for compiler in ("stepgraph.public", "torch._dynamo", "torch._inductor.compile_fx"):
            importlib.import_module(compiler)  # loading is not what is timed
        self.device, self.model = device, (SMALL if small else MODELS)[model].of_batch(batch)
        self.contender: Contender = CONTENDERS[contender].place(self.model, device)
        self.inputs, self.labels = self.model.batch(0, device)

    def start(self) -> dict[str, Any]:
        """Everything up to the end of the first step; the weights are there before."""
        self._forget_peak()
        began = time.perf_counter()
        self.contender.make()
        self.made = time.perf_counter() - began
        self.contender.remember()
        self.began = time.perf_counter() - self.made
        self._step()
        found = {"first_step": time.perf_counter() - self.began}
        self.last_peak = self.most = self.contender.peak()
        return found

    def settle(self, seconds: float) -> dict[str, Any]:
        """Steps until they have their final form, but not longer than some seconds."""
        while not self.contender.settled and time.perf_counter() - self.began < seconds:
            self._reset_peak()
            before = self.contender.mode
            self._step()
            peak = self.contender.peak()
            if CAPTURED not in before or self.contender.mode != before:  # a replay allocates nothing
                self.last_peak = peak
            self.most = _larger(self.most, peak)
        found = {"ready": time.perf_counter() - self.began, "settled": self.contender.settled}
        return found | {"steps_until_ready": self.contender.steps, "peak_until_ready": self.most}

    def memory(self) -> dict[str, Any]:
        """The most memory of a step, and what stays between steps once the allocator has given back the rest.

        The allocator counts the memory of a CUDA graph only while it is captured.
        """
        self._forget_peak()
        for _ in range(PEAK_STEPS):
            self._step()
        data = sum(one.nbytes for one in (*self.inputs.values(), self.labels))  # in the peak, but in no plan
        before = self.most if self.contender.hides_memory else self.last_peak
        found: dict[str, Any] = {"peak": _larger(before, self.contender.peak()), "data": data}
        if self.device == "cuda":
            torch.cuda.empty_cache()
            found["kept"] = torch.cuda.memory_reserved()
        return found | self.contender.facts()

    def losses(self, count: int) -> dict[str, Any]:
        """The first losses from the first weights, each of another batch."""
        self.contender.reset()
        found = []
        for step in range(count):
            self._load(step)
            self.contender.step(self.inputs, self.labels)
            found.append(self.contender.loss)
        self._load(0)
        return {"losses": found}

    def turn(self, count: int) -> dict[str, Any]:
        """Seconds of one step, over `count` steps; then memory that is not in use is given back."""
        for _ in range(SETTLING):
            self._step()
        began = time.perf_counter()
        for _ in range(count):
            self.contender.step(self.inputs, self.labels)
        self.contender.wait()
        seconds = (time.perf_counter() - began) / count
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {"seconds": seconds}

    def kernels(self, count: int) -> dict[str, Any]:
        """What a step consists of: each kernel with calls and milliseconds per step, the longest first."""
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA] if self.device == "cuda" else [activity.CPU]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(count):
                self._step()
        found = [
            (one.key, one.count / count, (one.self_device_time_total or one.self_cpu_time_total) / count / 1e3)
            for one in profile.key_averages()
        ]
        return {"kernels": sorted(found, key=lambda row: -row[2])[:KERNELS]}

    def where(self) -> dict[str, Any]:
        """What the numbers depend on."""
        import stepgraph

        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        versions = {"stepgraph": stepgraph.__version__, "torch": torch.__version__}
        return {"device": name, "versions": versions}

    def _step(self) -> None:
        self.contender.step(self.inputs, self.labels)
        self.contender.wait()

    def _load(self, step: int) -> None:
        """Another batch, in the same memory."""
        inputs, labels = self.model.batch(step, self.device)
        for name, array in inputs.items():
            self.inputs[name].copy_(array)
        self.labels.copy_(labels)

    def _forget_peak(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._reset_peak()

    def _reset_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


def _larger(one: dict[str, int] | None, other: dict[str, int] | None) -> dict[str, int] | None:
    """The larger of both numbers of two peaks; None on a device that does not count."""
    return None if one is None or other is None else {name: max(size, other[name]) for name, size in one.items()}


def answer(worker: Worker | None, request: dict[str, Any]) -> tuple[Worker | None, dict[str, Any]]:
    """What a request results in; an error is an answer, too."""
    try:
        if worker is None:
            return Worker(**request), {}
        return worker, getattr(worker, request.pop("do"))(**request)
    except Exception as error:  # whatever a library raises becomes a row of the table
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = MEMORY if MEMORY in str(error) else f"{type(error).__name__}: {lines[0][:200]}"
        return worker, {"failed": reason}


def main() -> None:
    """Answers requests until there are no more; the first says who the worker is."""
    worker: Worker | None = None
    for line in sys.stdin:
        worker, found = answer(worker, json.loads(line))
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
