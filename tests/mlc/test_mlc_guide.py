"""The porting guide tells the truth: its Python programs run and reach what they say."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "porting-from-swift.md").read_text()


def test_the_programs_of_the_guide_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(programs) == len(re.findall(r"```swift\n", GUIDE)) == 3
    names: dict = {}
    line, classifier, phases = (compile(program, "porting-from-swift.md", "exec") for program in programs)
    exec(line, names)
    assert np.allclose(names["line"], [13, 15, 17, 19], atol=1e-2)
    exec(classifier, names)
    assert names["accuracy"] > 0.85  # the last digits of the collection are the hardest
    exec(phases, names)
    assert np.abs(names["error"]).max() < 0.05 and names["raw"].shape == (1, 1)


def test_the_guide_names_what_exists() -> None:
    import stepgraph as sg

    for name in set(re.findall(r"sg\.(\w+)", GUIDE)):
        assert hasattr(sg, name), name
    assert {path.stem for path in (ROOT / "examples" / "mlc").glob("*.py")} >= {"linear_regression", "image_fitting"}
