"""`python -m ddtree_check` is `ddtree-check`."""

import sys

from .cli import main

sys.exit(main())
