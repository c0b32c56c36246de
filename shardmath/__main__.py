"""`python -m shardmath`."""

import sys

from shardmath.display.cli import main

sys.exit(main())
