"""Commands that run the scripts or plan them, each `python -m experiments.NAME`.

On your model: `chat` completions of typed prompts; `explain` one step, number by number; `models`
what is right for it; `plan` memory and work of a run; `sample_pairs` pairs from its samples. `runs`
has the drivers of many runs, `evidence` what the project's claims rest on. `common` and the scripts
import nothing from here.
"""
