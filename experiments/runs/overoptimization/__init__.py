"""Over-optimisation: gold against proxy reward over the distance from SFT."""
