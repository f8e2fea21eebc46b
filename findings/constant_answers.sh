#!/usr/bin/env bash
# reasoning-gym 0.1.25: in two data sets an answer that ignores the question is paid nearly in full.
#
# Expected: `score_answer` pays a constant answer as often as it is right: half the time for yes and no,
#   seldom for a probability. A rounded answer is paid more than a wild one.
# Seen: game_of_life_halting pays 1 for every text that is not empty, since `bool("False")` is True. coin_flip
#   pays for the common beginning of two numerals, measured by the shorter one: "0" scores 1 for every
#   probability below 1, 0.94 on average, where "0.5" has 0.61. For 0.375 the answers 0.4 and 0.9 are paid alike.
# Why it matters: with these rewards a policy learns to answer "0" to everything, and the curve looks like
#   mastery. The mean of a mixture of data sets hides it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet reasoning-gym==0.1.25
cat > probe.py <<'PY'
import statistics

import reasoning_gym

for name in ("game_of_life_halting", "coin_flip", "circuit_logic"):
    data = reasoning_gym.create_dataset(name, seed=7, size=200)
    entries = [data[i] for i in range(200)]
    right = statistics.mean(data.score_answer(str(entry["answer"]), entry) for entry in entries)
    print(f"{name}: right answers {right:.2f}, for example {[str(e['answer']) for e in entries[:3]]}")
    for answer in ("", "True", "False", "I do not know", "0", "0.5", "1"):
        scores = [data.score_answer(answer, entry) for entry in entries]
        print(f"  always {answer!r}: {statistics.mean(scores):.2f}")
flips = reasoning_gym.create_dataset("coin_flip", seed=7, size=200)
entry = next(e for e in (flips[i] for i in range(200)) if e["answer"] == "0.375")
for answer in ("0.375", "0.3752", "0.37", "0.4", "0", "0.9"):
    print(f"coin_flip, 0.375 is right, {answer}: {flips.score_answer(answer, entry):.2f}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
game_of_life_halting: right answers 1.00, for example ['True', 'False', 'True']
  always '': 0.00
  always 'True': 1.00
  always 'False': 1.00
  always 'I do not know': 1.00
  always '0': 1.00
  always '0.5': 1.00
  always '1': 1.00
coin_flip: right answers 1.00, for example ['0.109375', '0.65625', '0.828125']
  always '': 0.00
  always 'True': 0.00
  always 'False': 0.00
  always 'I do not know': 0.00
  always '0': 0.94
  always '0.5': 0.61
  always '1': 0.06
circuit_logic: right answers 1.00, for example ['0', '0', '0']
  always '': 0.00
  always 'True': 0.00
  always 'False': 0.00
  always 'I do not know': 0.00
  always '0': 0.61
  always '0.5': 0.00
  always '1': 0.39
coin_flip, 0.375 is right, 0.375: 1.00
coin_flip, 0.375 is right, 0.3752: 1.00
coin_flip, 0.375 is right, 0.37: 1.00
coin_flip, 0.375 is right, 0.4: 0.67
coin_flip, 0.375 is right, 0: 1.00
coin_flip, 0.375 is right, 0.9: 0.67
SEEN
