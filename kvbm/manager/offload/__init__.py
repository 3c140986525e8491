"""Which blocks go to a colder tier, when, and how."""
