"""`python -m ctxcache`."""

import sys

from ctxcache.cli import main

sys.exit(main())
