"""Share of its tolerance that each comparison of the suite uses, with each set of CPU instructions.

    python -m tests.tolerances              # the whole suite, three times
    python -m tests.tolerances tests/pairs  # any arguments of pytest

Other instructions sum in another order. A comparison that uses over a third of its tolerance here
may exceed it on another machine: derive its tolerance from what is compared, or use float64. Seen
are approx, assert_close, allclose, isclose, and asserts of a number below one of at most 0.1.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._comparison import NumberPair

SETTINGS = {  # ATEN_CPU_CAPABILITY, and the same for oneDNN and MKL
    "default": {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "": {},  # the machine's
}
TESTS = Path(__file__).parent
NUMBER = r"(?:tensor\(|np\.float64\()?(\d[\d.]*(?:e[-+]?\d+)?)"
BELOW = re.compile(rf"{NUMBER}\S* <=? \(?{NUMBER}\)?(?: \* {NUMBER})?")
Key = tuple[str, str]  # test, line
largest: dict[Key, list[float]] = {}  # share, difference, magnitude


def record(actual: Any, expected: Any, tolerance: Any, line: str = "") -> None:
    """Note the largest share among the elements; comparisons by the product are left out."""
    frame, ours = sys._getframe(1), (str(TESTS), str(TESTS.parent / "common"))
    while not line and frame.f_back:
        name = frame.f_code.co_filename
        if name.startswith(ours) and name != __file__:
            line = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    values = [torch.as_tensor(x).detach().double().flatten() for x in (actual, expected, tolerance)]
    actual, expected, tolerance = torch.broadcast_tensors(*values)
    shares = (actual - expected).abs() / tolerance
    shares[~(shares <= 1)] = 0.0  # a failure reports itself, and a control is expected to differ
    if line.startswith(str(TESTS)) and shares.numel():
        i = int(shares.argmax())
        entry = [float(x[i]) for x in (shares, (actual - expected).abs(), expected.abs())]
        key = (os.environ["PYTEST_CURRENT_TEST"].split(" (")[0], line[len(str(TESTS)) + 1 :])
        largest[key] = max(largest.get(key, entry), entry)


def watched(function: Callable[..., Any], rtol: float, atol: float) -> Callable[..., Any]:
    """The same comparison, recorded."""

    def compare(actual: Any, expected: Any, *args: Any, **limits: Any) -> Any:
        relative = limits.get("rtol", limits.get("rel_tol", rtol))
        absolute = limits.get("atol", limits.get("abs_tol", atol))
        size = torch.as_tensor(expected).detach().double().abs()
        record(actual, expected, absolute + relative * size)
        return function(actual, expected, *args, **limits)

    return compare


def pytest_configure() -> None:
    """Record every comparison; asserts are compiled anew, with their values."""
    sys.pycache_prefix = os.environ["TOLERANCES"] + ".cache"
    torch.isclose = watched(torch.isclose, 1e-5, 1e-8)  # assert_close calls it
    torch.allclose = watched(torch.allclose, 1e-5, 1e-8)
    np.testing.assert_allclose = watched(np.testing.assert_allclose, 1e-7, 0.0)
    math.isclose = watched(math.isclose, 1e-9, 0.0)
    scalar, compare = type(pytest.approx(1.0)), NumberPair.compare
    equal = scalar.__eq__

    def approx(self: Any, actual: Any) -> bool:
        if isinstance(actual, int | float) and isinstance(self.expected, int | float):
            record(actual, self.expected, self.tolerance)
        return equal(self, actual)

    def numbers(self: Any) -> None:
        record(self.actual, self.expected, self.atol + self.rtol * abs(self.expected))
        compare(self)

    scalar.__eq__, NumberPair.compare = approx, numbers


def pytest_assertion_pass(item: pytest.Item, lineno: int, expl: str) -> None:
    """Record `number < limit`, as in `abs(a - b) <= 1e-5 * scale`."""
    for number, limit, scale in BELOW.findall(expl.split("\n")[0]):
        if 0 < float(limit) <= 0.1:
            record(float(number), 0, float(limit) * float(scale or 1), f"{item.path}:{lineno}")


def pytest_sessionfinish() -> None:
    """Append what this process has seen."""
    with open(os.environ["TOLERANCES"], "a") as file:
        file.writelines(json.dumps([*key, *entry]) + "\n" for key, entry in largest.items())


def main() -> None:
    """Run the suite with each setting; print what uses over a third of its tolerance in any."""
    seen: dict[Key, list[Any]] = {}
    status = 0
    options = ["-p", "tests.tolerances", "-o", "enable_assertion_pass_hook=true", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in SETTINGS.items():
            path = Path(folder, name or "own")
            path.touch()
            env = os.environ | setting | {"TOLERANCES": str(path)}
            env |= {"ATEN_CPU_CAPABILITY": name} if name else {}
            status |= subprocess.run([sys.executable, "-m", "pytest", *options], env=env).returncode
            for test, line, *entry in map(json.loads, path.read_text().splitlines()):
                seen[test, line] = max(seen.get((test, line), []), [*entry, path.name])
    print(f"{'share':>6} {'difference':>10} {'magnitude':>10}  set      line, test")
    for (test, line), (share, *sizes, name) in sorted(seen.items(), key=lambda row: row[1]):
        if share > 1 / 3:
            print(f"{share:6.2f} {sizes[0]:10.1e} {sizes[1]:10.1e}  {name:8} {line} {test}")
    print(f"{len(seen)} comparisons")
    sys.exit(status)


if __name__ == "__main__":
    main()
