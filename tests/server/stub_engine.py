"""An engine without a model for the server's own tests: it answers with the prompt, token by token.

The real engine behind the same API is what tests/e2e uses; here every delivery is under the test's control.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import TokenLogprobs
from kvctl.engine.config import EngineInfo
from kvctl.engine.request_output import RequestOutput
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import EngineDead

INFO = EngineInfo(
    model_folder="/models/stub",
    architecture="StubForCausalLM",
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    linear_backend="torch",
    num_blocks=101,
    block_size=16,
    kv_cache_bytes=1 << 20,
    kv_cache_dtype="bfloat16",
    weight_bytes=1 << 20,
    kv_tokens=1600,
    max_concurrency=6.25,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    enable_prefix_caching=True,
    num_threads=1,
    load_s=0.1,
)


class StubEngine:
    """Echoes the prompt. `delay_s` passes before each token; `die()` makes every stream fail."""

    def __init__(self, tokenizer: Tokenizer, *, delay_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.delay_s = delay_s
        self.info = INFO
        self.is_alive = True
        self.stall: str | None = None
        self.running: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams, int, str | None]] = []
        self.num_delivered = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def die(self) -> None:
        self.is_alive = False

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if not self.is_alive:
            raise EngineDead("the engine is dead")
        self.seen.append((list(prompt_token_ids), params, priority, cache_salt))
        self.running.add(request_id)
        return self._run(list(prompt_token_ids), params, request_id)

    def _logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        others = [(token_id + i) % 256 for i in range(count)]
        return TokenLogprobs([token_id, *others], [-0.5, *(-0.5 - i for i in range(count))], 1)

    async def _run(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            for position in range(params.max_tokens):
                await asyncio.sleep(self.delay_s)
                if not self.is_alive:
                    raise EngineDead("the engine died")
                token = prompt[position % len(prompt)]
                for index in range(params.n):
                    is_last = position == params.max_tokens - 1
                    self.num_delivered += 1
                    output = RequestOutput(
                        request_id,
                        prompt,
                        index=index,
                        text_delta=self.tokenizer.token_text(token),
                        token_ids_delta=[token],
                        finish_reason=FinishReason.LENGTH if is_last else None,
                        num_cached_tokens=len(prompt) // 16 * 16,
                        finished=is_last and index == params.n - 1,
                    )
                    if params.logprobs is not None:
                        output.logprobs_delta = [self._logprobs(token, params.logprobs)]
                    if params.prompt_logprobs is not None and position == index == 0:
                        output.prompt_logprobs = [
                            None,
                            *(self._logprobs(t, params.prompt_logprobs) for t in prompt[1:]),
                        ]
                    yield output
        finally:
            self.running.discard(request_id)
