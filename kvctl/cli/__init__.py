"""Floor 4: commands. Each parses options, builds a config, calls the library and prints."""
