"""Pure core: facts, their wire, the fold and the decisions. No I/O, clock, randomness, threads or logging."""
