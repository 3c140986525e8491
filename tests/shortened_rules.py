"""The rules of deploy/prometheus in seconds instead of minutes, for tests that make real faults.

Only numbers are changed, each by a substitution below that says how often it applies.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

WAIT_S, WINDOW_S = 6, 20  # `for` of all, and windows of rates
# What is looked for, what takes its place, and how often. What is 30 s old, or 10,000 messages behind, comes too late
# for a test.
SUBSTITUTIONS = (
    (r"^(        for: )\d+[mh]$", rf"\g<1>{WAIT_S}s", 35),
    (r"\[(?:5|10)m\]", f"[{WINDOW_S}s]", 19),
    (r"(_(?:age|lag)_seconds > )30$", r"\g<1>6", 2),
    (r"(_stored_sequence > )10000$", r"\g<1>20", 1),
    (r"(_published_offset > )100000$", r"\g<1>5", 1),
)


def shortened(text: str) -> str:
    """The text of a file of rules. Raises AssertionError: a substitution applies more or less often than it says."""
    for pattern, new, count in SUBSTITUTIONS:
        text, found = re.subn(pattern, new, text, flags=re.MULTILINE)
        assert found == count, f"{pattern} is there {found} times, and {count} were to be"
    return text


def but_for_numbers(text: str) -> list[dict[str, Any]]:
    """The rules of a file without how long they wait, and with every number and duration of an expression alike."""
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    return [rule | {"for": "", "expr": re.sub(r"(?<![\w.])\d[\d.e]*[smhd]?\b", "N", rule["expr"])} for rule in rules]
