"""Share of its tolerance that each comparison of the suite uses, with each set of CPU instructions.

    python -m tests.tolerances tests/pairs  # any arguments of pytest; none: the whole suite

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
from numbers import Real
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
TESTS = str(Path(__file__).parent) + os.sep
PROJECT = (TESTS, TESTS.replace("tests", "common"))
NUMBER = r"(?:tensor\(|np\.float64\()?(\d[\d.]*(?:e[-+]?\d+)?)"
BELOW = re.compile(rf"{NUMBER}\S* <=? \(?{NUMBER}\)?(?: \* {NUMBER})?")
largest: dict[tuple[str, str], list[float]] = {}  # test, line: share, difference, magnitude


def record(actual: Any, expected: Any, tolerance: Any) -> None:
    """Note the largest share among the elements; comparisons by the product are left out."""
    frame: Any = sys._getframe(1)
    while frame and not frame.f_code.co_filename.removesuffix(__file__).startswith(PROJECT):
        frame = frame.f_back
    both = [torch.as_tensor(x).detach().double().flatten() for x in (actual, expected)]
    difference, size = (both[0] - both[1]).abs(), both[1].abs()
    shares = difference / torch.as_tensor(tolerance).flatten()
    shares[~(shares <= 1)] = 0.0  # a failure reports itself, and a control is expected to differ
    if frame and frame.f_code.co_filename.startswith(TESTS) and shares.numel():
        i = int(shares.argmax())
        line = f"{frame.f_code.co_filename.removeprefix(TESTS)}:{frame.f_lineno}"
        key = (os.environ.get("PYTEST_CURRENT_TEST", "on import").split(" (")[0], line)
        entry = [float(x.expand_as(shares)[i]) for x in (shares, difference, size)]
        largest[key] = max(largest.get(key, entry), entry)


def watched(function: Callable[..., Any], rtol: float, atol: float) -> Callable[..., Any]:
    def compare(actual: Any, expected: Any, **limits: Any) -> Any:
        relative = limits.get("rtol", limits.get("rel_tol", rtol))
        absolute = limits.get("atol", limits.get("abs_tol", atol))
        size = torch.as_tensor(expected).detach().double().abs()
        record(actual, expected, absolute + relative * size)
        return function(actual, expected, **limits)

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
        if isinstance(actual, Real) and isinstance(self.expected, Real):
            record(actual, self.expected, self.tolerance)
        return equal(self, actual)

    def numbers(self: Any) -> None:
        record(self.actual, self.expected, self.atol + self.rtol * abs(self.expected))
        compare(self)

    scalar.__eq__, NumberPair.compare = approx, numbers


def pytest_assertion_pass(expl: str) -> None:
    """Record `number < limit`, as in `abs(a - b) <= 1e-5 * scale`."""
    for number, limit, scale in BELOW.findall(expl.split("\n")[0]):
        if 0 < float(limit) <= 0.1:
            record(float(number), 0.0, float(limit) * float(scale or 1))


def pytest_sessionfinish() -> None:
    """Append what this process has seen."""
    with open(os.environ["TOLERANCES"], "a") as file:
        file.writelines(json.dumps([*key, *entry]) + "\n" for key, entry in largest.items())


def main() -> None:
    """Run the suite with each setting; print what uses over a third of its tolerance in any."""
    rows: dict[tuple[str, str], list[Any]] = {}
    options = ["-p", "tests.tolerances", "-o", "enable_assertion_pass_hook=true", *sys.argv[1:]]
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in SETTINGS.items():
            path = Path(folder, name or "own")
            env = os.environ | setting | {"TOLERANCES": str(path)}
            env |= {"ATEN_CPU_CAPABILITY": name} if name else {}
            status |= subprocess.run([sys.executable, "-m", "pytest", *options], env=env).returncode
            for test, line, *entry in map(json.loads, path.read_text().splitlines()):
                rows[test, line] = max(rows.get((test, line), []), [*entry, path.name])
    print(f"of {len(rows)} comparisons:\n share difference  magnitude  set      line, test")
    for (test, line), (share, difference, size, name) in sorted(rows.items(), key=lambda x: x[1]):
        if share > 1 / 3:
            print(f"{share:6.2f} {difference:10.1e} {size:10.1e}  {name:8} {line} {test}")
    sys.exit(status)


if __name__ == "__main__":
    main()
