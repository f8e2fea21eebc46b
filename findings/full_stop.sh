#!/usr/bin/env bash
# verl 0.9.1: the rule-based rewards take a right answer with a full stop behind it for a wrong one.
#
# Expected: gsm8k, math_dapo and math_reward forgive what ends a sentence, a "$", 5.0 for 5, and another spelling
#   of the same fraction (1/2 and \frac12, with a sign too); x = 1 is not y = 1.
# Seen: "#### 5." and "the answer is 5." have 0, in gsm8k's flexible mode too, and "Answer: 10." has -1. "#### 5,"
#   is right in the strict mode and wrong in the flexible one, "#### $5" the other way round. math_reward knows
#   1/2 and not -1/2, 0.5 and not 0.50, and "x=1" is right where "y=1" is asked for.
# Why it matters: the reward is one of punctuation. A policy that writes whole sentences scores 0 and learns to
#   leave the full stop out; the curve shows mathematics.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-deps verl==0.9.1
cat > probe.py <<'PY'
import importlib.util
import sysconfig
from pathlib import Path

FOLDER = Path(sysconfig.get_path("purelib")) / "verl/utils/reward_score"


def load(name):
    """A module of verl without its package, which imports ray."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gsm8k, dapo, boxed = (load(name).compute_score for name in ("gsm8k", "math_dapo", "math_reward"))
print("gsm8k for 5: strict, flexible")
for end in ("5", "5 apples", "5.", "5, I think", "$5", "**5**", "5.0"):
    text = f"Two and three. #### {end}"
    scores = float(gsm8k(text, "5")), float(gsm8k(text, "5", method="flexible"))
    print(f"  {text!r}: {scores[0]}, {scores[1]}")
print(f"  'The answer is 5.': flexible {float(gsm8k('The answer is 5.', '5', method='flexible'))}")
print("math_dapo")
for text, gold in [("10", "10"), ("10 dollars", "10"), ("10.", "10"), ("10.0", "10"), ("1/2", "\\frac12")]:
    print(f"  'Answer: {text}' for {gold}: {dapo(f'Answer: {text}', gold)['score']}")
print("math_reward")
half = "\\frac{1}{2}"
pairs = [("1/2", half), ("-1/2", f"-{half}"), ("0.5", half), ("0.50", half), ("5.", "5"), ("$5$", "5")]
for text, gold in [*pairs, ("x=1", "y=1")]:
    box = f"\\boxed{{{text}}}"
    print(f"  {box} for {gold}: {boxed(f'So it is {box}', gold)}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
gsm8k for 5: strict, flexible
  'Two and three. #### 5': 1.0, 1.0
  'Two and three. #### 5 apples': 1.0, 1.0
  'Two and three. #### 5.': 0.0, 0.0
  'Two and three. #### 5, I think': 1.0, 0.0
  'Two and three. #### $5': 0.0, 1.0
  'Two and three. #### **5**': 0.0, 1.0
  'Two and three. #### 5.0': 0.0, 0.0
  'The answer is 5.': flexible 0.0
math_dapo
  'Answer: 10' for 10: 1.0
  'Answer: 10 dollars' for 10: 1.0
  'Answer: 10.' for 10: -1.0
  'Answer: 10.0' for 10: -1.0
  'Answer: 1/2' for \frac12: -1.0
math_reward
  \boxed{1/2} for \frac{1}{2}: 1.0
  \boxed{-1/2} for -\frac{1}{2}: 0.0
  \boxed{0.5} for \frac{1}{2}: 1.0
  \boxed{0.50} for \frac{1}{2}: 0.0
  \boxed{5.} for 5: 0.0
  \boxed{$5$} for 5: 0.0
  \boxed{x=1} for y=1: 1.0
SEEN
