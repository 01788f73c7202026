"""When a request ends by its own tokens: end of sequence, a stop token, its length. Stop strings are text and
matched in the API process. Floor 0.

`min_tokens` is not looked at: the sampler masks stop tokens until then, so none is sampled too early.
"""

from kvctl.core.request import FinishReason, Request


def stop_token_set(request: Request) -> frozenset[int]:
    """The tokens that end this request."""
    params = request.sampling_params
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | request.eos_token_ids


def finish_of(request: Request, token_id: int) -> tuple[FinishReason, int | None] | None:
    """Why the request ends with `token_id`, its newest token; None if it goes on. The int is the stop token."""
    params = request.sampling_params
    if token_id in request.eos_token_ids and not params.ignore_eos:
        return FinishReason.STOP, None
    if token_id in params.stop_token_ids:
        return FinishReason.STOP, token_id
    if len(request.token_ids) >= request.token_limit:
        return FinishReason.LENGTH, None
    return None
