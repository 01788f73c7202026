"""Plans become tensors: compared with AttentionMetadata.from_lists, which is written the slow and readable way."""

import numpy as np
import pytest
import torch

from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import NewRequestData, SchedulerOutput
from kvctl.engine.input_batch import InputBatch
from kvctl.engine.sampler import Sampler
from kvctl_kernels.metadata import AttentionMetadata

BLOCK_SIZE = 4
VOCAB_SIZE = 50


def make_batch(num_groups=1, max_num_seqs=4):
    sampler = Sampler(VOCAB_SIZE)
    return InputBatch(
        max_num_seqs=max_num_seqs,
        max_model_len=32,
        block_size=BLOCK_SIZE,
        num_groups=num_groups,
        device=torch.device("cpu"),
        new_sampling_row=lambda new: sampler.new_row(
            new.sampling_params, new.token_ids, new.num_prompt_tokens, new.eos_token_ids
        ),
    )


def new(request_id, token_ids, *tables, num_prompt_tokens=None, num_computed_tokens=0, **params):
    return NewRequestData(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt_tokens or len(token_ids),
        sampling_params=SamplingParams(temperature=0, **params),
        eos_token_ids=frozenset(),
        block_tables=tuple(list(table) for table in tables),
        num_computed_tokens=num_computed_tokens,
    )


def plan(counts, new_requests=(), new_block_ids=None, finished=(), preempted=()):
    return SchedulerOutput(
        request_ids=list(counts),
        num_scheduled_tokens=list(counts.values()),
        total_num_scheduled_tokens=sum(counts.values()),
        new_requests=list(new_requests),
        new_block_ids=new_block_ids or {},
        finished_request_ids=list(finished),
        preempted_request_ids=list(preempted),
    )


def build(batch, a_plan):
    batch.apply(a_plan)
    return batch.build(a_plan)


def assert_same(ours, expected):
    width = min(ours.block_tables.shape[1], expected.block_tables.shape[1])
    assert torch.equal(ours.block_tables[:, :width], expected.block_tables[:, :width])
    assert ours.block_tables.dtype == torch.int32 and ours.block_tables.is_contiguous()
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        mine, theirs = getattr(ours, name), getattr(expected, name)
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype, name
    for name in ("num_decode_requests", "max_query_len", "max_seq_len"):
        assert getattr(ours, name) == getattr(expected, name), name
    assert list(ours.query_lens_list) == expected.query_lens_list
    assert list(ours.seq_lens_list) == expected.seq_lens_list


def test_prompts_chunks_and_single_tokens_share_a_step_single_tokens_first():
    batch = make_batch()
    a, b = list(range(10, 19)), list(range(20, 26))
    first = build(batch, plan({"a": 9, "b": 4}, [new("a", a, [3, 4, 5]), new("b", b, [6])]))
    assert first.token_ids.tolist() == a + b[:4]
    assert first.positions.tolist() == [*range(9), *range(4)]
    assert_same(first.metadata[0], AttentionMetadata.from_lists([[3, 4, 5], [6, 0, 0]], [9, 4], [9, 4], BLOCK_SIZE))
    assert first.logit_rows.tolist() == [8]  # b's prompt is not through yet
    assert [state.request_id for state in first.sampled] == ["a"]
    assert first.sampled_plan_indices == [0]
    batch.advance(first, [42])

    second_plan = plan({"b": 2, "a": 1, "c": 3}, [new("c", [30, 31, 32], [7])], {"b": ([8],)})
    second = build(batch, second_plan)
    assert second.token_ids.tolist() == [42, 24, 25, 30, 31, 32]
    assert second.positions.tolist() == [9, 4, 5, 0, 1, 2]
    assert_same(
        second.metadata[0],
        AttentionMetadata.from_lists([[3, 4, 5], [6, 8, 0], [7, 0, 0]], [1, 2, 3], [10, 6, 3], BLOCK_SIZE),
    )
    assert second.logit_rows.tolist() == [0, 2, 5]
    assert second.sampled_plan_indices == [1, 0, 2]  # back to the plan's order
    batch.advance(second, [43, 44, 45])

    third = build(batch, plan({"a": 1, "b": 1, "c": 1}))
    assert third.token_ids.tolist() == [43, 44, 45]
    assert third.positions.tolist() == [10, 6, 3]
    assert third.logit_rows is None  # every token's successor is sampled


def test_a_prefix_hit_starts_behind_the_cached_tokens():
    batch = make_batch()
    inputs = build(batch, plan({"a": 3}, [new("a", range(10, 21), [3, 4, 5], num_computed_tokens=8)]))
    assert inputs.positions.tolist() == [8, 9, 10]
    assert inputs.token_ids.tolist() == [18, 19, 20]
    assert inputs.metadata[0].slot_mapping.tolist() == [20, 21, 22]


def test_each_group_has_its_own_blocks_and_the_null_block_is_never_written():
    batch = make_batch(num_groups=2)
    inputs = build(batch, plan({"a": 6}, [new("a", range(10, 16), [3, 4], [0, 9])]))
    assert inputs.metadata[0].slot_mapping.tolist() == [12, 13, 14, 15, 16, 17]
    assert inputs.metadata[1].slot_mapping.tolist() == [-1, -1, -1, -1, 36, 37]


def test_a_preempted_request_comes_back_with_all_its_tokens_in_another_row():
    batch = make_batch(max_num_seqs=2)
    inputs = build(batch, plan({"a": 3, "b": 2}, [new("a", [1, 2, 3], [3]), new("b", [4, 5], [4])]))
    batch.advance(inputs, [6, 7])
    again = new("b", [4, 5, 7], [5], num_prompt_tokens=2)
    inputs = build(batch, plan({"a": 1, "b": 3}, [again], preempted=["b"]))
    assert inputs.token_ids.tolist() == [6, 4, 5, 7]
    assert len(batch) == 2
    batch.advance(inputs, [8, 9])
    inputs = build(batch, plan({"b": 1}, finished=["a", "never-heard-of"]))
    assert inputs.token_ids.tolist() == [9]
    assert len(batch) == 1
    build(batch, plan({"b": 1, "c": 1}, [new("c", [11], [6])]))  # a's row is free again


def test_a_shorter_request_in_a_used_row_sees_nothing_of_the_one_before():
    batch = make_batch(max_num_seqs=1)
    batch.advance(build(batch, plan({"a": 9}, [new("a", range(10, 19), [3, 4, 5])])), [1])
    inputs = build(batch, plan({"b": 2}, [new("b", [7, 8], [6])], finished=["a"]))
    assert inputs.token_ids.tolist() == [7, 8]
    assert inputs.metadata[0].slot_mapping.tolist() == [24, 25]
    batch.advance(inputs, [9])
    inputs = build(batch, plan({"b": 1}))
    assert inputs.positions.tolist() == [2] and inputs.metadata[0].slot_mapping.tolist() == [26]


def test_prompt_pieces_name_the_tokens_that_follow():
    batch = make_batch()
    wanted = new("a", range(10, 17), [3, 4], prompt_logprobs=0)
    inputs = build(batch, plan({"a": 4}, [wanted]))
    (piece,) = inputs.prompt_pieces
    assert (piece.first, piece.last, piece.targets, piece.is_end) == (0, 4, [11, 12, 13, 14], False)
    batch.advance(inputs, [])
    (piece,) = build(batch, plan({"a": 3})).prompt_pieces
    assert (piece.first, piece.last, piece.targets, piece.is_end) == (0, 2, [15, 16], True)


def test_the_last_position_of_the_longest_sequence_has_room():
    batch = make_batch()
    inputs = build(batch, plan({"a": 31}, [new("a", range(31), list(range(1, 9)))]))
    batch.advance(inputs, [5])
    inputs = build(batch, plan({"a": 1}))
    assert inputs.positions.tolist() == [31]
    batch.advance(inputs, [6])


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_the_slow_way(seed):
    rng = np.random.default_rng(seed)
    batch = make_batch(num_groups=2, max_num_seqs=6)
    known = {}  # request id -> [tokens, computed, tables]
    next_id, next_block = 0, 1
    for _ in range(40):
        finished = [r for r in known if len(known[r][0]) > 28 or rng.random() < 0.1]
        for request_id in finished:
            del known[request_id]
        fresh, extended, counts = [], {}, {}
        while len(known) < 6 and rng.random() < 0.5:
            tokens = rng.integers(1, VOCAB_SIZE, rng.integers(1, 20)).tolist()
            known[f"r{next_id}"] = [tokens, 0, ([], [])]
            fresh.append(f"r{next_id}")
            next_id += 1
        for request_id, (tokens, computed, tables) in known.items():
            counts[request_id] = int(rng.integers(1, len(tokens) - computed + 1))
            missing = -(-(computed + counts[request_id]) // BLOCK_SIZE) - len(tables[0])
            blocks = tuple(list(range(next_block + g * missing, next_block + (g + 1) * missing)) for g in range(2))
            next_block += 2 * missing
            for table, added in zip(tables, blocks, strict=True):
                table.extend(added)
            if request_id not in fresh and missing:
                extended[request_id] = blocks
        if not counts:
            continue
        news = [new(r, known[r][0], *known[r][2]) for r in fresh]
        inputs = build(batch, plan(counts, news, extended, finished))
        order = sorted(counts, key=lambda r: counts[r] != 1)
        expected_tokens = [t for r in order for t in known[r][0][known[r][1] : known[r][1] + counts[r]]]
        assert inputs.token_ids.tolist() == expected_tokens
        for group in range(2):
            expected = AttentionMetadata.from_lists(
                [known[r][2][group] for r in order],
                [counts[r] for r in order],
                [known[r][1] + counts[r] for r in order],
                BLOCK_SIZE,
            )
            assert_same(inputs.metadata[group], expected)
        done = [r for r in order if known[r][1] + counts[r] == len(known[r][0])]
        assert [state.request_id for state in inputs.sampled] == done
        sampled = rng.integers(1, VOCAB_SIZE, len(done)).tolist()
        batch.advance(inputs, sampled)
        for request_id in order:
            known[request_id][1] += counts[request_id]
        for request_id, token in zip(done, sampled, strict=True):
            known[request_id][0].append(token)
