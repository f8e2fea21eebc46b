"""Why and how a run ends before its last step.

Face: signals (asked to stop), failures (one rank says what ended it).
"""
