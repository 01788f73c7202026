"""Layers the decoder models are built of."""
