"""`python -m flash_qla info | check`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
