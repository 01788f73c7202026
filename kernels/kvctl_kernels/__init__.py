"""Attention, cache and sampling kernels: one signature each, plain torch in `reference`. Imports no triton."""
