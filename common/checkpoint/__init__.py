"""What a run leaves on disk to go on from, and what it hands over at its end.

Face: resume.find, checkpointer.Checkpointer, export, hf_folder.use_folders; best, layout and
sharded_state behind them.
"""
