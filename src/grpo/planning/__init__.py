"""What a run would need of a machine, computed before anything is rented: memory, communication, arithmetic."""
