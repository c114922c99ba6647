"""What `stepgraph.mlc` costs: the same compiled step, called natively and through the face, in turns.

    python -m benchmarks.face [--models cnn,demo] [--rounds 40] [--device cpu] [--threads 1] [--json FILE]

Both call one compiled training graph, so they run the very same kernels. Through the face a step also wraps its batch
in new `MLCTensorData`, as programs do; both have a handler. The ratio is the face's time ÷ the native call's of the
same round: 1.05 means that the face costs 5%.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import stepgraph.mlc as MLCompute
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import MODELS
from stepgraph.mlc.face import face_of


def calls(model: str, device: str) -> dict[str, Callable[[], Any]]:
    """The native call and the one through the face, over one compiled graph."""
    made = Stepgraph(MODELS[model], device, dropout=True)
    arrays = [array for one in (made.inputs, made.labels) for array in one.values()]
    host = [array.cpu().numpy() if isinstance(array, torch.Tensor) else array for array in arrays]
    face, batch = face_of(made.training), host[0].shape[0]
    execute = face.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
    wrap = MLCompute.MLCTensorData.dataWithBytesNoCopy_length_

    def handler(result: Any, error: Any, seconds: float) -> None:
        assert error is None

    def through_the_face() -> None:
        inputs, labels = (wrap(array, array.nbytes) for array in host)
        assert execute({"inputs": inputs}, {"labels": labels}, None, batch, 0, handler)

    def natively() -> None:
        made.training.execute({"inputs": host[0]}, {"labels": host[1]}, batch_size=batch, completion=handler)

    return {"native": natively, "face": through_the_face}


def seconds(call: Callable[[], Any], count: int) -> float:
    """Time of one call, from `count` in a row."""
    call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="cnn,demo")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = {}
    for model in options.models.split(","):
        both = calls(model, options.device)
        count = max(3, min(200, round(0.1 / seconds(both["native"], 3))))
        times: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(options.rounds):
            for name in sorted(both, reverse=bool(turn % 2)):
                times[name].append(seconds(both[name], count))
        ratios = [face / native for face, native in zip(times["face"], times["native"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        native, face = (1e3 * statistics.median(times[name]) for name in ("native", "face"))
        results[model] = {"times": times, "ratios": ratios, "median": median, "quartiles": [low, high]}
        shown = (
            f"{model:5} native {native:8.3f} ms   face {face:8.3f} ms   ratio {median:.3f} ({low:.3f} to {high:.3f})"
        )
        Console().print(shown, highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, **results}, indent=1))


if __name__ == "__main__":
    main()
