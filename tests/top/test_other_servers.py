"""Pages as SGLang, TGI, llama.cpp and TensorRT-LLM write them: read by their names, diagnosed where they say enough."""

import pytest

from kvctl.metrics.exposition import parse_page
from kvctl.metrics.server_names import SERVER_NAMES, Server
from kvctl.top.reading import read_engines
from kvctl.top.verdict import Limit
from tests.top.series import histogram, snapshot_of, verdict_of


def sglang(prompt, output, waiting=12, usage=0.3, prefix="sglang:"):
    label = 'engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"'
    values = {
        "num_running_reqs": 16,
        "num_queue_reqs": waiting,
        "token_usage": usage,
        "num_used_tokens": usage * 100_000,
        "max_total_num_tokens": 100_000,
        "max_running_requests": 16,
        "num_retracted_reqs": 0,
        "cache_hit_rate": 0.0,
        "prompt_tokens_total": prompt,
        "generation_tokens_total": output,
        "cached_tokens_total": prompt / 2,
    }
    own = "".join(f"{prefix}{name}{{{label}}} {value}\n" for name, value in values.items())
    copy = f'{prefix}num_running_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"}} 16\n'
    return own + copy


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_sglang_with_full_seats_gets_its_own_flag(prefix):
    pages = [sglang(n * 1000, n * 400, prefix=prefix) for n in range(4)]
    now = snapshot_of(*pages)
    assert now.server is Server.SGLANG
    assert now.running == 16  # the copy of the second tensor-parallel rank is not a second server
    assert now.kv_used_tokens == 30_000
    assert now.prefix_hit_rate == 0.5  # from the counters, not from the gauge that is reset at every decode
    assert now.generation_tokens_per_s == 400
    finding = verdict_of(*pages).finding
    assert finding.limit is Limit.MAX_NUM_SEQS
    assert finding.advice[0].flag_for(Server.SGLANG).startswith("--max-running-requests ")


def test_tgi_is_read_by_its_names():
    def page(n):
        return (
            f"tgi_queue_size 5\ntgi_batch_current_size 8\ntgi_request_success {n}\n"
            + histogram("tgi_request_queue_duration", (0.1, 1.0), (0, n, 0), n * 0.5)
            + histogram("tgi_request_generated_tokens", (100.0, 1000.0), (0, n, 0), n * 200.0)
            + histogram("tgi_request_input_length", (100.0, 1000.0), (0, n, 0), n * 300.0)
        )

    pages = [page(n * 4) for n in range(4)]
    now = snapshot_of(*pages)
    assert now.server is Server.TGI
    assert (now.running, now.waiting) == (8, 5)
    assert now.generation_tokens_per_s == 800
    assert now.queue_s.mean == 0.5
    assert now.request_size.tokens == 500
    finding = verdict_of(*pages).finding
    assert finding.limit is Limit.MAX_NUM_SEQS  # inferred from the flat top; no KV figures to say otherwise
    assert finding.advice[0].flag_for(Server.TGI).startswith("--max-batch-size ")


def test_llama_cpp_is_read_by_its_names():
    def page(n):
        return (
            "llamacpp:requests_processing 4\nllamacpp:requests_deferred 9\n"
            f"llamacpp:tokens_predicted_total {n}\nllamacpp:prompt_tokens_total {n}\nllamacpp:n_decode_total {n}\n"
        )

    pages = [page(n * 40) for n in range(4)]
    now = snapshot_of(*pages)
    assert now.server is Server.LLAMA_CPP
    assert (now.running, now.waiting, now.kv_usage) == (4, 9, None)
    assert now.steps_per_s == 40
    finding = verdict_of(*pages).finding
    assert finding.limit is Limit.MAX_NUM_SEQS
    assert finding.advice[0].flag_for(Server.LLAMA_CPP) == "--parallel 13"


def test_tensorrt_llm_is_read_by_its_names():
    def page(n):
        return (
            'trtllm_kv_cache_utilization{model_name="m"} 0.99\ntrtllm_num_requests_running{model_name="m"} 30\n'
            'trtllm_num_requests_waiting{model_name="m"} 4\n'
            f'trtllm_request_success_total{{model_name="m",finished_reason="stop"}} {n}\n'
        )

    pages = [page(n) for n in range(4)]
    now = snapshot_of(*pages)
    assert now.server is Server.TRTLLM
    assert (now.running, now.waiting, now.kv_usage, now.finished_per_s) == (30, 4, 0.99, 1)
    assert verdict_of(*pages).limit is Limit.KV_BLOCKS


def test_old_vllm_names_are_still_understood():
    now = snapshot_of('vllm:num_requests_running{model_name="m"} 1\nvllm:gpu_cache_usage_perc{model_name="m"} 0.25\n')
    assert now.kv_usage == 0.25


def test_data_parallel_engines_are_kept_apart_and_what_has_no_engine_goes_to_all():
    page = parse_page(
        "".join(
            f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {10 + i}\n'
            f'vllm:cache_config_info{{engine="{i}",block_size="16",num_gpu_blocks="{100 * (i + 1)}"}} 1\n'
            for i in range(3)
        )
        + "process_cpu_seconds_total 5\nkvctl:max_num_seqs 64\nkvctl:max_model_len 1024\n"
    )
    readings = read_engines(page, 0.0)
    assert [r.engine for r in readings] == ["0", "1", "2"]
    assert [r.gauges["running"] for r in readings] == [10, 11, 12]
    assert [r.settings.capacity_tokens for r in readings] == [1600, 3200, 4800]
    assert {r.gauges["max_num_seqs"] for r in readings} == {64}
    assert {r.counters["cpu_seconds"] for r in readings} == {5}


def test_every_kvctl_name_that_top_reads_is_one_that_serve_exposes():
    from kvctl.metrics.definitions import METRICS, MetricKind

    exposed = {definition.exposed_name for definition in METRICS.values()}
    histograms = {d.exposed_name for d in METRICS.values() if d.kind is MetricKind.HISTOGRAM}
    names = SERVER_NAMES[Server.KVCTL]
    read = {
        s.name for table in (names.gauges, names.counters, names.timings) for choice in table.values() for s in choice
    }
    assert {name for name in read if name.startswith("kvctl:")} <= exposed
    assert {s.name for choice in names.timings.values() for s in choice if s.name.startswith("kvctl:")} <= histograms
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:iteration_tokens_total"} <= exposed & read
