"""Training of small models: a config file, a differentiable forward pass, a loop that can be killed, an export."""
