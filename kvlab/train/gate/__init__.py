"""Training of gates: recorded queries and keys, losses, a student that reads what the gate picks."""
