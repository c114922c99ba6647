"""The porting guide tells the truth: each program has its port, what it names exists (test_docs runs the ports)."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "porting-from-swift.md").read_text()


def test_every_swift_program_has_its_port() -> None:
    assert len(re.findall(r"```python\n", GUIDE)) == len(re.findall(r"```swift\n", GUIDE)) == 3


def test_the_guide_names_what_exists() -> None:
    import stepgraph as sg

    for name in set(re.findall(r"sg\.(\w+)", GUIDE)):
        assert hasattr(sg, name), name
    assert {path.stem for path in (ROOT / "examples" / "mlc").glob("*.py")} >= {"linear_regression", "image_fitting"}
