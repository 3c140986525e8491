"""`kvbm doctor`: what a machine and a configuration lack.

Probes find facts in bounded time; pure functions judge them.
"""

from kvbm.doctor.run import DoctorOptions, examine, main

__all__ = ["DoctorOptions", "examine", "main"]
