"""The parts that strategies give to processes: who computes, who holds parameters, who applies."""
