"""`python -m kvbm` is the `kvbm` command."""

from kvbm_ledger.commands import main

raise SystemExit(main())
