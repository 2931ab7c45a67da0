"""`python -m moesaic.launch_router …` is `moesaic router …`."""

import sys

from moesaic.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))
