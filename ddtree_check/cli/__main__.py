"""`python -m ddtree_check.cli` is `ddtree-check`."""

import sys

from .main import main

sys.exit(main())
