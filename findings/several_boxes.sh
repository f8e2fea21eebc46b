#!/usr/bin/env bash
# math-verify 0.9.0: a boxed step before the right answer makes it wrong, unless both are in dollar signs.
#
# Expected: the last \boxed counts, as in most rules of MATH; a boxed intermediate result does no harm.
# Seen: so it is in dollar signs, and across paragraphs. Where the last box has none, boxes with a sentence
#   between them are joined into the set of their values: {3, 7} is wrong for 7, and right for "3, 7".
# Why it matters: whether a completion is rewarded depends on its dollar signs and on the distance of two boxes.
#   A policy that boxes each step of a short solution gets 0 for right answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
cat > probe.py <<'PY'
from math_verify import parse, verify

CASES = {
    "one": r"So \boxed{7}.",
    "two in dollar signs": r"First $\boxed{3}$, and so $\boxed{7}$.",
    "two without": r"First \boxed{3}, and so \boxed{7}.",
    "the last one without": r"First $\boxed{3}$, and so \boxed{7}.",
    "a longer sentence between": r"First \boxed{3}, and we add four to it, which makes it \boxed{7}.",
    "a paragraph between": r"First \boxed{3}." + "\n\nNow we add the four that were left.\n\n" + r"So \boxed{7}.",
    "the same twice": r"So \boxed{7}, that is \boxed{7}.",
    "with a unit": r"So \boxed{7}, or \boxed{7\text{ apples}}.",
}
for name, text in CASES.items():
    value = parse(text)
    right = [verify(parse(gold), value) for gold in ("$7$", "$3, 7$")]
    print(f"{name}: read as {value[0]}; right for 7 {right[0]}, for the pair 3, 7 {right[1]}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
one: read as 7; right for 7 True, for the pair 3, 7 False
two in dollar signs: read as 7; right for 7 True, for the pair 3, 7 False
two without: read as {3, 7}; right for 7 False, for the pair 3, 7 True
the last one without: read as {3, 7}; right for 7 False, for the pair 3, 7 True
a longer sentence between: read as {3, 7}; right for 7 False, for the pair 3, 7 True
a paragraph between: read as 7; right for 7 True, for the pair 3, 7 False
the same twice: read as 7; right for 7 True, for the pair 3, 7 False
with a unit: read as {7}; right for 7 True, for the pair 3, 7 False
SEEN
