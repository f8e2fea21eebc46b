"""Recorded figures: `make` makes them anew, the others turn them into tables and pictures."""
