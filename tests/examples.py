"""How many examples a property is tried on: all with the profile "nightly", a third of them with that of `make
test`.
"""

from __future__ import annotations

from hypothesis import settings


def examples(whole: int) -> int:
    """For `max_examples`. `tests/conftest.py` loads the profile before any test module is imported."""
    return whole if settings.get_current_profile_name() == "nightly" else whole // 3
