"""What the native parts must do, to be read: the ledger, the cluster index, the router, the coding of blocks.

Nothing in production imports it but `kvbm-replay --reference`, by `assembly/readable.py`; a contract holds that.

Each module has the stem of its twin in `native/`. Property tests hold both to the same answers, and the simulator may
run either.
"""
