"""Makes prompt texts of a wanted length in tokens without a tokenizer, each different from its first word on.

A text is a run of common English words, each one token in most vocabularies. What a server really counts is learned
from its `usage` (`TokenRate`): tokens = overhead + words * rate. Texts are cut from one seeded stream of words, so
that making one costs microseconds. Equal keys give equal texts: that is how shared prefixes and traces with block
hashes are made. Pure; shared by bench and simulator. Floor 0.
"""

import hashlib
import random
from dataclasses import dataclass, replace
from functools import lru_cache

# Common words of one syllable: with the space before it, each is one token for the BPE and unigram vocabularies in
# wide use. Where it is not so, `TokenRate` says how many tokens a word costs.
_WORD_LIST = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old "
    "see two way who boy did its let put say she too use dad mom big red run sun top car cat dog hot ice job "
    "key law lot map men net oil own pay per raw sea set six ten try war win yes age air arm art ask bad bag "
    "bar bed bit box bus buy cup cut ear eat egg end eye far few fly fun gas god gun hit kid leg lie low met "
    "mix"
)
WORDS = _WORD_LIST.split()
_NUM_ROUNDS = 509  # orders of the words to choose from
_SPARE_WORDS = 3
_MAX_STOPS = 24
_SHUFFLED_WORDS = 12  # at the start of a text: 10^24 orders, so no two texts begin alike


@dataclass(frozen=True)
class TokenRate:
    """What words cost at one server: tokens = overhead_tokens + num_words * tokens_per_word."""

    overhead_tokens: float = 0.0  # of a chat template or a start token
    tokens_per_word: float = 1.0
    verified_words: int = 0  # a prompt of so many words was counted ...
    verified_tokens: int = 0  # ... and had so many tokens

    @property
    def is_one_token_per_word(self) -> bool:
        """Whether lengths come out exact by themselves."""
        return self.tokens_per_word == 1.0

    def words_below(self, num_tokens: int) -> int:
        """How many words stay a little below so many tokens, so that full stops can make up the rest."""
        spare = 0 if self.is_one_token_per_word else _SPARE_WORDS
        return max(1, int((num_tokens - self.overhead_tokens) / self.tokens_per_word + 1e-9) - spare)

    def is_exact_at(self, num_tokens: int) -> bool:
        """Whether the verified prompt is short of so many tokens by no more than full stops can make up."""
        missing = num_tokens - self.verified_tokens
        return bool(self.verified_words) and 0 <= missing <= min(self.verified_words, _MAX_STOPS)

    def words_near_verified(self, num_tokens: int) -> int:
        """How many words would be right, judged from the verified prompt."""
        change = (num_tokens - self.verified_tokens) / self.tokens_per_word
        return max(1, self.verified_words + int(change // 1) - _SPARE_WORDS)

    def split(self, num_tokens: int) -> tuple[int, int]:
        """(words, full stops) of a prompt of so many tokens; exact near the verified length, else the best estimate."""
        if self.is_exact_at(num_tokens):
            return self.verified_words, num_tokens - self.verified_tokens
        num_words = self.words_below(num_tokens)
        return num_words, max(0, round(num_tokens - self.overhead_tokens - num_words * self.tokens_per_word))

    def words_within(self, num_tokens: int) -> int:
        """How many words a part of a prompt (a shared prefix) needs: no overhead."""
        return max(1, round(num_tokens / self.tokens_per_word))

    def verified(self, num_words: int, counted_tokens: int) -> "TokenRate":
        """This rate after a prompt of so many words was counted."""
        return replace(self, verified_words=num_words, verified_tokens=counted_tokens)

    @classmethod
    def from_probes(cls, few: tuple[int, int], many: tuple[int, int]) -> "TokenRate | None":
        """Fit (words, tokens) of two probes; None when they make no sense."""
        (words_1, tokens_1), (words_2, tokens_2) = few, many
        if words_2 <= words_1 or tokens_2 <= tokens_1:
            return None
        rate = (tokens_2 - tokens_1) / (words_2 - words_1)
        return cls(max(0.0, tokens_1 - words_1 * rate), rate)


class PromptMaker:
    """Texts from one seed. Texts of equal length hold the same words in another order, so they cost equal tokens
    wherever a word costs the same at every place."""

    def __init__(self, seed: int, rate: TokenRate | None = None, *, key_seed: int | None = None) -> None:
        self.seed = seed
        self._key_seed = seed if key_seed is None else key_seed  # makers with the same one share keyed texts
        self.rate = rate or TokenRate()
        self._rng = random.Random(f"prompts-{seed}")
        self._rounds = _rounds()

    def prompt(self, num_tokens: int) -> str:
        """A unique text that is a whole prompt of so many tokens, with the overhead; exact where words cost alike."""
        num_words, num_stops = self.rate.split(num_tokens)
        return _with_stops(self.unique(num_words), num_stops)

    def rest_of_prompt(self, num_tokens: int, num_words_before: int) -> str:
        """A unique text that makes a whole prompt of so many tokens together with the words before it."""
        num_words, num_stops = self.rate.split(num_tokens)
        return _with_stops(self.unique(max(1, num_words - num_words_before)), num_stops)

    def part(self, num_tokens: int) -> str:
        """A unique text of so many tokens, to follow others."""
        return self.unique(self.rate.words_within(num_tokens))

    def unique(self, num_words: int) -> str:
        """A text whose first words are drawn anew: no cache of prefixes knows it."""
        return self._text(num_words, self._rng)

    def keyed(self, key: object, num_words: int) -> str:
        """The text of a key: always the same for the same key, key seed and length."""
        digest = hashlib.blake2b(f"{self._key_seed}/{key}".encode(), digest_size=8).digest()
        return self._text(num_words, random.Random(int.from_bytes(digest, "big")))

    def _text(self, num_words: int, rng: random.Random) -> str:
        full, rest = divmod(num_words, len(WORDS))
        head = WORDS[:] if full else WORDS[:rest]
        for i in range(min(_SHUFFLED_WORDS, len(head) - 1)):
            j = int(rng.random() * (len(head) - i)) + i
            head[i], head[j] = head[j], head[i]
        parts = [" ".join(head)] if head else []
        if full > 1:
            start = int(rng.random() * _NUM_ROUNDS)
            parts += [self._rounds[(start + i) % _NUM_ROUNDS] for i in range(full - 1)]
        if full and rest:
            parts.append(_tail(rest))
        return " ".join(parts)


def _with_stops(text: str, num_stops: int) -> str:
    """Put a full stop, one token nearly everywhere, behind each of the last words."""
    if num_stops <= 0:
        return text
    words = text.split(" ")
    for i in range(1, min(num_stops, len(words)) + 1):
        words[-i] += "."
    return " ".join(words)


@lru_cache(maxsize=1)
def _rounds() -> list[str]:
    shuffler = random.Random("rounds")
    return [" ".join(shuffler.sample(WORDS, len(WORDS))) for _ in range(_NUM_ROUNDS)]


@lru_cache(maxsize=len(WORDS))
def _tail(num_words: int) -> str:
    return " ".join(WORDS[:num_words])
