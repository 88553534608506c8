"""`python -m zfabric` is the same as the command `zfabric`."""

import sys

from zfabric.cli import main

if __name__ == "__main__":
    sys.exit(main())
