"""The stream → the index and SQL: messages are read in order, holes and forks are found, and what was read is kept."""
