"""Probes that run as processes of their own, because a dead disk or driver may hold their thread for good.

Standard library only.
"""
