"""``python -m fi_dcp_compat``."""

import sys

from .cli import main

sys.exit(main())
