"""Attention of one batch: its shapes, its random pages, and the textbook answer in float64."""

import dataclasses
from dataclasses import dataclass

import torch

from kvctl_kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class Case:
    """Heads, pages and lengths. `shared`: tokens of a prefix that all requests have in common (0: none)."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    shared: int = 0
    page: int = 16

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def label(self) -> str:
        """Kind, heads, dtypes, requests x context, and what is special."""
        kind = "cascade" if self.shared else "decode" if max(self.query_lens) == 1 else "prefill"
        names = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((self.dtype, self.kv_dtype))]
        special = f" window {self.window}" if self.window else ""
        special += f" cap {self.soft_cap:g}" if self.soft_cap else ""
        size = f"{len(self.seq_lens)}x{self.seq_lens[0]}"
        return f"{kind} {self.heads}/{self.kv_heads}x{self.head_dim} {' '.join(names)} {size}{special}"

    @property
    def num_blocks(self) -> int:
        """Of the cache, with the null block."""
        return sum(-(-length // self.page) for length in self.seq_lens) + 1

    def query(self, device: torch.device) -> torch.Tensor:
        """Random queries of all tokens."""
        return torch.randn(sum(self.query_lens), self.heads, self.head_dim, device=device).to(self.dtype)

    def pages(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pages of K and of V."""
        shape = (self.num_blocks, self.kv_heads, self.page, self.head_dim)
        return torch.randn(shape, device=device).to(self.kv_dtype), torch.randn(shape, device=device).to(self.kv_dtype)

    def metadata(self, device: torch.device) -> AttentionMetadata:
        """What the kernels are told of the batch; the pages are shuffled."""
        order = (torch.randperm(self.num_blocks - 1) + 1).tolist()
        rows = []
        for length in self.seq_lens:
            count = -(-length // self.page)
            row, order = order[:count], order[count:]
            common = self.shared // self.page
            rows.append([*rows[0][:common], *row[common:]] if rows else row)
        meta = AttentionMetadata.from_lists(rows, self.query_lens, self.seq_lens, self.page, device)
        if not self.shared:
            return meta
        prefix = torch.tensor([0, len(rows), self.shared], dtype=torch.int32, device=device)
        return dataclasses.replace(meta, shared_prefix=prefix)

    def attention64(
        self, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        """Textbook attention in float64 on the host."""
        k, v = k.float().cpu().double(), v.float().cpu().double()
        tables, query = meta.block_tables.cpu().long(), query.cpu().double()
        outputs, token = [], 0
        for row, (query_len, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            blocks = tables[row, : -(-length // self.page)]
            key, value = (
                x[blocks].permute(1, 0, 2, 3).reshape(self.kv_heads, -1, self.head_dim)[:, :length]
                .repeat_interleave(self.heads // self.kv_heads, dim=0)
                for x in (k, v)
            )  # fmt: skip
            scores = query[token : token + query_len].transpose(0, 1) @ key.transpose(1, 2) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            own, other = torch.arange(length - query_len, length)[:, None], torch.arange(length)[None, :]
            hidden = other > own
            if self.window is not None:
                hidden |= other <= own - self.window
            scores = scores.masked_fill(hidden, float("-inf"))
            outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
            token += query_len
        return torch.cat(outputs)
