"""HBM: the device tier, owned by kvbm or by the engine."""
