"""What the cache and the scheduler are told, validated once. Each class gets only its own.

Knows nothing of models or devices; what is found out later (how many blocks fit) is not written here.
Names and defaults are vLLM's, so that its users need not learn new ones. Floor 0.
"""

from dataclasses import dataclass
from typing import Literal

from kvctl.errors import ConfigError

HashAlgo = Literal["sha256", "xxhash"]
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How KV blocks are cut, hashed and kept.

    Raises:
        ConfigError: an impossible value.
    """

    block_size: int = 16  # tokens
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: HashAlgo = "sha256"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"--block-size is {self.block_size}", hint="Give 1 or more tokens; 16 is usual.")
        if self.prefix_caching_hash_algo not in ("sha256", "xxhash"):
            raise ConfigError(
                f"--prefix-caching-hash-algo is {self.prefix_caching_hash_algo!r}",
                hint="Choose sha256 or xxhash.",
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one step and of one request.

    Raises:
        ConfigError: an impossible value or combination.
    """

    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int = 256  # requests running at once
    max_num_batched_tokens: int = 2048  # tokens computed in one step, over all requests
    policy: SchedulingPolicy = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one request in one step; 0: no such limit
    scheduler_reserve_full_isl: bool = True  # admit only when the whole sequence has room
    watermark: float = 0.0  # share of all blocks kept free when admitting beside running requests

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}", hint="Give 1 or more.")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"--scheduling-policy is {self.policy!r}", hint="Choose fcfs or priority.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is under --max-num-seqs {self.max_num_seqs}",
                hint="Each running request needs one token a step: raise the first or lower the second.",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt of {self.max_model_len} tokens cannot run in a step of "
                f"{self.max_num_batched_tokens}",
                hint="Raise --max-num-batched-tokens, lower --max-model-len, or leave chunked prefill on.",
            )
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            raise ConfigError(
                f"--long-prefill-token-threshold is {self.long_prefill_token_threshold}",
                hint=f"Give 0 (off) to {self.max_model_len} (the model's length).",
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"--watermark is {self.watermark}", hint="Give a share of the blocks, 0 to under 1.")
