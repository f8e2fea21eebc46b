"""Checkpoints, resuming, and the exported model.

Face: resume.find_checkpoint, checkpointer.Checkpointer, export, hf_folder.with_folders.
layout and sharded_state serve them.
"""
