"""`python -m exeplan` is the console script `exeplan`."""

import sys

from exeplan.cli import main

sys.exit(main())
