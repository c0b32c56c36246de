"""`python -m shardmath`."""

import sys

from shardmath.cli import main

sys.exit(main())
