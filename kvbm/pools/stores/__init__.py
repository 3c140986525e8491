"""Where objects lie: bytes under names, for pools of cluster reach."""
