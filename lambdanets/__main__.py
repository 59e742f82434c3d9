"""Entry point of `python -m lambdanets`."""

import sys

from lambdanets.cli import main

sys.exit(main())
