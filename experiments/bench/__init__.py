"""Speed and memory of every stage beside TRL: `make bench`, which runs `__main__`."""
