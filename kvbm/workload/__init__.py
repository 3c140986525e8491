"""What we run the system with: traces, generators, simulation, demo."""
