"""`python -m ddtree_check` is `ddtree-check`."""

import sys

from .cli.main import main

sys.exit(main())
