"""Decides which tokens of which requests the next step computes. The one writer of request states.

One rule for everything: each request's `num_computed_tokens` catches up with its `num_tokens` under a token
budget; first the running requests in order of admission, then the waiting ones in queue order. Knows no tensors,
no clock and no text. Floor 0.

- A running request that finds no block preempts: the latest admitted (fcfs) or the least important (priority)
  gives up all its blocks and goes back to the queue, to be computed again. A step that preempted admits nobody.
- The first waiting request that is refused blocks stops the line: nobody passes it.
- A request is admitted only when its whole sequence would have room (`scheduler_reserve_full_isl`).
- Cost of a step: O(running requests), whatever their context and however many wait.

Steps may overlap: `schedule` may plan step n+1 before `update` has the tokens of step n. A token that is being sampled
counts as there (`num_in_flight`), it is just not known yet; steps must be executed and updated in the order they were
planned. What a step in flight writes for a request that has ended lands in blocks nobody reads before they are written
again by a later step.
"""

from kvctl.core.config import SchedulerConfig
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.request import FinishReason, Request, RequestStatus, WaitingReason
from kvctl.core.request_queue import make_queue
from kvctl.core.step import EngineOutput, ModelRunnerOutput, SchedulerOutput, SchedulerStats
from kvctl.core.step_plan import StepPlan
from kvctl.core.stopping import finish_of, stop_token_set
from kvctl.errors import InvalidRequest, InvariantViolation


class Scheduler:
    """Plans steps over the requests it was given and keeps their KV blocks.

    Args:
        kv_cache_manager: owned by the caller, driven by this scheduler only.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.running: list[Request] = []  # in order of admission
        self.waiting = make_queue(config.policy)
        self._capacity_tokens = kv_cache_manager.capacity_tokens(config.max_model_len)  # at most that length
        self._finished_ids: list[str] = []  # the runner has not been told yet
        self._preempted_ids: list[str] = []  # likewise
        self._ghosts: dict[str, int] = {}  # ended requests -> tokens that steps in flight still sample for them
        # Who lacked blocks when it was tried last, how many were free then, and how many of its tokens were cached.
        self._refused: tuple[Request, int, int] | None = None
        self._stats = SchedulerStats()

    # ---- requests in and out ----

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: an id in use, no tokens, or a prompt that can never fit; nothing was queued.
        """
        prompt = request.num_prompt_tokens
        if request.request_id in self.requests or request.request_id in self._ghosts:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if prompt == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if prompt >= self.config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens, the model takes {self.config.max_model_len} with the output",
                hint="Shorten it, or start with a larger --max-model-len.",
                param="input_tokens",
            )
        if prompt >= self._capacity_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens, the whole KV cache takes {self._capacity_tokens} with the output",
                hint="Shorten it, or give the cache more memory (--kv-cache-memory-bytes).",
                param="input_tokens",
            )
        request.token_limit = min(request.token_limit, self._capacity_tokens)
        request.stop_token_ids = stop_token_set(request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; its blocks are free when this returns. False: no such request (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request, FinishReason.ABORT, None)
        return True

    def _finish(self, request: Request, reason: FinishReason, stop_token_id: int | None) -> None:
        """Free everything; the caller takes the request out of its list or queue."""
        if request.status is RequestStatus.RUNNING:
            self._finished_ids.append(request.request_id)  # others are unknown to the runner
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.stop_reason = stop_token_id
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        if request.num_in_flight:
            self._ghosts[request.request_id] = request.num_in_flight

    def _lay_ghost(self, request_id: str) -> None:
        left = self._ghosts.pop(request_id, 0) - 1
        if left > 0:
            self._ghosts[request_id] = left

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    # ---- one step ----

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Empty only if there is no unfinished request, or none can be advanced."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if plan.preempted_ids:
            self._set_waiting_reason(WaitingReason.PREEMPTION)
        elif self.waiting:
            self._schedule_waiting(plan)
        output = plan.output()
        self._preempted_ids += plan.preempted_ids
        if plan.request_ids:  # an empty plan is not executed: the runner hears of these with the next one
            output.finished_request_ids, self._finished_ids = self._finished_ids, []
            output.preempted_request_ids, self._preempted_ids = self._preempted_ids, []
        self._stats.num_scheduled_tokens += output.total_num_scheduled_tokens
        self._stats.num_prefill_tokens += plan.num_prefill_tokens
        return output

    def _schedule_running(self, plan: StepPlan) -> None:
        running = self.running
        add_id, add_count = plan.request_ids.append, plan.counts.append
        left = plan.left_tokens
        index = 0
        while left > 0 and index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            total = len(request.token_ids) + request.num_in_flight
            if total >= request.token_limit:
                index += 1  # its last token is being sampled: nothing follows
                continue
            missing = total - computed
            if missing == 1 and request.num_prompt_tokens <= computed < request.allocated_tokens - 1:
                # Nearly all steps of nearly all requests: a generated token, whose block neither fills nor is missing.
                request.num_computed_tokens = total
                request.num_in_flight += 1
                add_id(request.request_id)
                add_count(1)
                left -= 1
                index += 1
                continue
            plan.left_tokens = left
            index = self._schedule_slowly(plan, index, min(missing, self._chunk_limit(), left))
            left = plan.left_tokens
        plan.left_tokens = left

    def _schedule_slowly(self, plan: StepPlan, index: int, num_tokens: int) -> int:
        """Schedule `running[index]`, preempting others (or itself) until it has its blocks. Returns the next index."""
        request = self.running[index]
        while (blocks := self.kv_cache_manager.allocate_slots(request, num_tokens)) is None:
            victim = self._victim()
            victim_index = self.running.index(victim)
            self._preempt(plan, victim, victim_index)
            if victim is request:
                return index  # what follows it now stands at its index (fcfs: nothing)
            if victim_index < index:
                index -= 1
        if blocks[0]:
            plan.new_blocks[request.request_id] = blocks
        plan.put(request, num_tokens)
        return index + 1

    def _chunk_limit(self) -> int:
        """Most tokens one request may take in a step. A lone request may take all: nobody waits behind it."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and len(self.requests) > 1:
            return threshold
        return self.config.max_num_batched_tokens

    def _victim(self) -> Request:
        if self.config.policy == "priority":  # the latest admitted of equals, as children of one request are
            return max(reversed(self.running), key=lambda request: (request.priority, request.arrival_s))
        return self.running[-1]

    def _preempt(self, plan: StepPlan, victim: Request, victim_index: int) -> None:
        """Take a running request's blocks and queue it again, undoing its part of this step's plan if it has one."""
        del self.running[victim_index]
        if plan.take_back(victim):  # priority only: it stands before the request that needs blocks
            self.kv_cache_manager.unregister_uncomputed(victim, victim.num_computed_tokens)
        self.kv_cache_manager.free(victim)
        victim.move_to(RequestStatus.PREEMPTED)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._stats.num_preemptions += 1
        plan.preempted_ids.append(victim.request_id)
        self.waiting.put_back(victim)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config = self.config
        manager = self.kv_cache_manager
        watermark = int(config.watermark * manager.pool.num_blocks)
        reason = None
        while self.waiting:
            if plan.left_tokens == 0:
                reason = WaitingReason.TOKEN_BUDGET
            elif len(self.running) >= config.max_num_seqs:
                reason = WaitingReason.MAX_NUM_SEQS
            elif manager.pool.num_free_blocks == 0:
                reason = WaitingReason.KV_BLOCKS  # even a full hit computes its last block anew
            if reason:
                break
            request = self.waiting.peek()
            if request.num_in_flight:  # preempted while its newest token is being sampled: that one must be known
                reason = WaitingReason.PREEMPTION
                break
            if self._is_still_refused(request):
                reason = WaitingReason.KV_BLOCKS
                break
            prefix = manager.find_cached_prefix(request)
            missing = request.num_tokens - prefix.num_tokens
            if not config.enable_chunked_prefill and missing > plan.left_tokens:
                reason = WaitingReason.TOKEN_BUDGET
                break
            num_tokens = min(missing, self._chunk_limit(), plan.left_tokens)
            miss_reasons = manager.miss_reasons(request, prefix)  # before allocating evicts what it looks at
            blocks = manager.allocate_slots(
                request,
                num_tokens,
                prefix,
                reserve_tokens=request.num_tokens if config.scheduler_reserve_full_isl else 0,
                watermark_blocks=watermark if self.running else 0,
            )
            if blocks is None:
                self._refused = (request, manager.pool.num_free_blocks, prefix.num_tokens)
                reason = WaitingReason.KV_BLOCKS
                break
            self.waiting.remove(request)
            self._start(plan, request, prefix.num_tokens, num_tokens, miss_reasons)
        if reason:
            self._set_waiting_reason(reason)

    def _is_still_refused(self, request: Request) -> bool:
        """Whether a request that lacked blocks certainly still does. O(1): a long one is not looked up every step.

        As long as nobody is admitted, blocks that become free and a longer cached prefix are all that can help it.
        """
        if self._refused is None or not self.config.scheduler_reserve_full_isl:  # without: a smaller chunk may fit
            return False
        refused, num_free_blocks, num_cached_tokens = self._refused
        return (
            refused is request
            and self.kv_cache_manager.pool.num_free_blocks <= num_free_blocks
            and not self.kv_cache_manager.prefix_may_have_grown(request, num_cached_tokens)
        )

    def _start(
        self, plan: StepPlan, request: Request, num_cached: int, num_tokens: int, miss_reasons: dict[str, int]
    ) -> None:
        stats = self._stats
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
            stats.prefix_cache_queries += request.num_tokens
            stats.prefix_cache_hits += num_cached
            for reason, tokens in miss_reasons.items():
                stats.prefix_miss_reasons[reason] = stats.prefix_miss_reasons.get(reason, 0) + tokens
        else:  # found again or computed again: neither is news about the prefix cache
            stats.num_recomputed_tokens += request.num_tokens - num_cached
        self._refused = None
        request.move_to(RequestStatus.RUNNING)
        request.waiting_reason = None
        self.running.append(request)
        plan.admit(request, num_cached, num_tokens, self.kv_cache_manager.block_tables(request))

    def _set_waiting_reason(self, reason: WaitingReason) -> None:
        self.waiting.peek().waiting_reason = reason

    def waiting_reason(self, request_id: str) -> WaitingReason | None:
        """Why a waiting request does not run: what it, or the one at the head of its line, is short of.

        None for a request that runs, has ended, or has not been tried yet.
        """
        request = self.requests.get(request_id)
        if request is None or request.status is RequestStatus.RUNNING:
            return None
        return self.waiting.peek().waiting_reason

    # ---- after the step ----

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the sampled tokens, end what is finished and free its blocks. One output per sampled token."""
        outputs: list[EngineOutput] = []
        add_output = outputs.append
        requests = self.requests
        any_finished = False
        for request_id, token_id in zip(plan.request_ids, result.sampled_token_ids, strict=True):
            if token_id is None:
                continue
            request = requests.get(request_id)
            if request is None:
                self._lay_ghost(request_id)  # ended or aborted while the step ran
                continue
            token_ids = request.token_ids
            token_ids.append(token_id)
            request.num_in_flight -= 1
            output = EngineOutput(request_id, [token_id])
            add_output(output)
            if token_id in request.stop_token_ids or len(token_ids) >= request.token_limit:
                self._end(request, token_id, output)
                any_finished = True
            if len(token_ids) == request.num_prompt_tokens + 1:
                output.num_cached_tokens = request.num_cached_tokens
                output.prompt_logprobs = result.prompt_logprobs.get(request_id)
        if result.logprobs:
            for output in outputs:
                output.logprobs = result.logprobs.get(output.request_id)
        if any_finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return outputs

    def _end(self, request: Request, token_id: int, output: EngineOutput) -> None:
        finish = finish_of(request, token_id)
        assert finish is not None  # the fast test in update() looks at the same tokens and lengths
        output.finish_reason, output.stop_reason = finish
        output.num_preemptions = request.num_preemptions
        output.num_cached_tokens = request.num_cached_tokens
        if request.status is RequestStatus.PREEMPTED:
            self.waiting.remove(request)
        self._finish(request, *finish)

    def take_stats(self) -> SchedulerStats:
        """State of now, and the increments since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        pool = self.kv_cache_manager.pool
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)
        if self.waiting:
            reason = self.waiting.peek().waiting_reason
            stats.waiting_by_reason = {reason.value if reason else "new": len(self.waiting)}
        stats.num_free_blocks = pool.num_free_blocks
        stats.num_usable_blocks = pool.num_usable_blocks
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any request holds blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Verify blocks, tables and queues. O(blocks + requests); for tests and debugging.

        Raises:
            InvariantViolation: names the first thing that does not hold.
        """
        self.kv_cache_manager.check_integrity()
        running = {request.request_id for request in self.running}
        places = [request.request_id for line in (self.running, self.waiting) for request in line]
        if len(places) != len(set(places)) or set(places) != set(self.requests):
            raise InvariantViolation("a request stands in two places, or in none")
        if self.kv_cache_manager.holders != running:
            raise InvariantViolation("those that hold blocks are not those that run")
        for request in self.requests.values():
            if (request.status is RequestStatus.RUNNING) != (request.request_id in running):
                raise InvariantViolation(f"{request} stands where its state does not belong")
            known_soon = request.num_tokens + request.num_in_flight
            if request.num_in_flight < 0 or request.num_computed_tokens > known_soon:
                raise InvariantViolation(f"{request} counts {request.num_in_flight} tokens in flight")
