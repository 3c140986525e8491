"""Copies between tiers, and how their bytes move."""
