"""Training of a gate for learned eviction through the model: keys that fade, losses, steps that can be killed and continued."""
