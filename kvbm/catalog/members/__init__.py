"""Who is in the cluster: instances that are heard, silent, gone, or were away."""
