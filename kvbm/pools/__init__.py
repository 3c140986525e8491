"""The bytes of one tier."""
