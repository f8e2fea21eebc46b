"""What a run leaves on disk to go on from, and what it hands over at its end.

Face: saver (find, Checkpointer), export.finish, bad_step; files, state and best behind them.
"""
