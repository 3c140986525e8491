"""The block manager embedded in an engine."""
