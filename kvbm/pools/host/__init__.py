"""HOST: pinned memory of this machine."""
