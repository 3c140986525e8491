"""Erasure: what is to be gone everywhere, how each place sees to it, and what everybody reports."""
