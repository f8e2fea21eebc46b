"""The code that the five stages share."""

import os

PARENT = os.getppid()  # before the long imports: the process that started this one
