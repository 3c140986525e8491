"""Engines: the words of one engine on one side, ours on the other. Nothing else knows an engine."""
