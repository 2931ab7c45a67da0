"""`python -m moesaic …` is `moesaic …`."""

import sys

from moesaic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
