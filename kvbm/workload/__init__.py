"""What the system is run with: traces, generators, the simulation, child processes, the probe."""
