"""What a run leaves on disk to go on from, and what it hands over at its end.

Face: resume.find, saver.Checkpointer, export, plain.use_folders; best, files and state behind
them.
"""
