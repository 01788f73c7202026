"""Floor 2: the torch side of the engine, and the door between its process and the API process."""
