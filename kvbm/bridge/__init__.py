"""Engines without our code → our stream."""
