"""`python -m kvbm` is the `kvbm` command."""

from kvbm.cli import main

raise SystemExit(main())
