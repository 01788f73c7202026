"""kvctl: knows where every byte of KV cache goes. Importing it never imports torch."""

TYPE_CHECKING = False  # type checkers know better; importing `typing` would be half of the time this takes
__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from kvctl.core.sampling_params import SamplingParams
    from kvctl.engine.llm import LLM

_LAZY = {"LLM": "kvctl.engine.llm", "SamplingParams": "kvctl.core.sampling_params"}


def __getattr__(name: str) -> object:
    """Import `LLM` and `SamplingParams` on first use (PEP 562): the engine is heavy, the package is not."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvctl' has no attribute {name!r}")
