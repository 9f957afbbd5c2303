"""``python -m kvq`` is the command line."""

import sys

from kvq.cli.main import main

sys.exit(main())
