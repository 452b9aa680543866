"""`python -m jaxroll` is the command `jaxroll`."""

import sys

from jaxroll.control.cli import main

if __name__ == "__main__":
    sys.exit(main())
