"""Floor 0: arrivals, lengths, prompts and traces, shared by bench and the simulator. Seeded, no clock."""
