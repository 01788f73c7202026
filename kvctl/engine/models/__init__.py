"""Decoder models and the registry of supported architectures."""
