"""Speed and memory of every stage against TRL: `make bench`, which runs `__main__`."""
