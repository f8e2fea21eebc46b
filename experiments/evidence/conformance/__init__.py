"""What TRL, verl, OpenRLHF and torchrl compute for the same objective, on golden cases.

`cases.json` has the cases: inputs, value and gradient worked out by hand, how each library is
called (one that is not named has no such function), and why it differs. A library is a `Case` whose
methods, one per family of cases, call the library's code and hold no formula.
"""
