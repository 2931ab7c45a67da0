"""`python -m moesaic.launch_server …` is `moesaic serve …`."""

import sys

from moesaic.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
