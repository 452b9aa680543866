"""Entry point of `python -m jaxroll`, which is the command `jaxroll`."""

import sys

from jaxroll import lifeline
from jaxroll.control.cli import main

if __name__ == "__main__":
    with lifeline.ending():
        sys.exit(main())
