#!/usr/bin/env bash
# math-verify 0.9.0: 1e-05, Python's spelling of a small number, is Euler's number minus five.
#
# Expected: `parse` reads scientific notation as a number, in text and in LaTeX: 1e3 equals 1000.
# Seen: in LaTeX "1e3" is 3 times Euler's number, and "1e-05" is e - 5, to which "-2.281718" is equal. Outside
#   of LaTeX the exponent is cut off: the gold answer "2.5e-06" is 2.5, for which "2.5" is right and "0.0000025"
#   wrong. Nothing is raised; parse() gives a value in each case.
# Why it matters: `str()` and JSON write each float below 0.0001 in this form, so such gold answers reward a wrong
#   completion and no right one, unless it spells the number in the same way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
cat > probe.py <<'PY'
from math_verify import parse, verify

CASES = [
    ("$1000$", r"$\boxed{10^3}$"),
    ("$1000$", r"$\boxed{1e3}$"),
    ("$1000$", "The answer is 1e3"),
    ("1e-05", r"$\boxed{0.00001}$"),
    ("$1e-05$", r"$\boxed{0.00001}$"),
    ("$1e-05$", r"$\boxed{-2.281718}$"),
    (str(2.5e-06), r"$\boxed{0.0000025}$"),
    (str(2.5e-06), r"$\boxed{2.5}$"),
]
for gold, text in CASES:
    values = parse(gold), parse(text)
    numbers = [f"{float(value[0]):.7g}" for value in values]
    print(f"gold {gold}, completion {text}: read as {', '.join(numbers)}, right {verify(*values)}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
gold $1000$, completion $\boxed{10^3}$: read as 1000, 1000, right True
gold $1000$, completion $\boxed{1e3}$: read as 1000, 8.154845, right False
gold $1000$, completion The answer is 1e3: read as 1000, 1, right False
gold 1e-05, completion $\boxed{0.00001}$: read as 1, 1e-05, right False
gold $1e-05$, completion $\boxed{0.00001}$: read as -2.281718, 1e-05, right False
gold $1e-05$, completion $\boxed{-2.281718}$: read as -2.281718, -2.281718, right True
gold 2.5e-06, completion $\boxed{0.0000025}$: read as 2.5, 2.5e-06, right False
gold 2.5e-06, completion $\boxed{2.5}$: read as 2.5, 2.5, right True
SEEN
