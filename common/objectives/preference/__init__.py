"""Preference losses of DPO, each a file with a function of its name."""
