"""Why and how a run ends before its last step.

Face: signals (asked to stop), failures (where a rank failed, and whether another is the cause).
"""
