"""What the project's claims rest on: the records with their tables, and comparisons with others.

`make` the recorded figures, `tables` their places in the pages; `bench` speed against TRL;
`optimum` where objectives end; `one_file` the whole chain in plain PyTorch.
"""
