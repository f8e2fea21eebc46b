"""Commands that run the scripts or plan them, each `python -m experiments.NAME`.

`one_file` the whole chain in plain PyTorch, to read first; `replicate` a recipe over seeds,
compared with published values; `sweep` variants of a chain; `overoptimization` gold against proxy
reward; `sample_pairs` pairs from samples of a policy; `explain` one step, number by number;
`exercises` one-line changes of the code; `chat` completions of typed prompts; `optimum` where
objectives end; `plan` memory and work of a run; `bench` speed and quality against TRL;
`records.make` the recorded figures. They share `stages.py` (a run made once) and `outcomes.py`
(means over seeds). `common` and the scripts import nothing from here.
"""
