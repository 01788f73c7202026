"""Users, comparisons, recommendations and advice: what is claimed to fit fits when asked again."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.cli.size_page import recommended_part
from kvctl.engine.gguf_config import SUPPORTED
from kvctl.engine.models.registry import SUPPORTED_ARCHITECTURES
from kvctl.model.hardware import all_hardware, find_hardware
from kvctl.sizing.advice import advise
from kvctl.sizing.recommend import KVCTL_ARCHITECTURES, Demand, choose, compare, obstacle, recommend, serve_command
from kvctl.sizing.request import SizedModel, SizeRequest, WeightFiles, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.sizing.users import users_fit


def request(name: str = "meta-llama/Llama-3.1-8B-Instruct", gpu: str | None = "l40s", **choices) -> SizeRequest:
    return SizeRequest(model=load_model(name), hardware=find_hardware(gpu) if gpu else None, **choices)


def test_the_most_users_fit_and_one_more_does_not() -> None:
    answer = size_up(request(max_model_len=8192))
    most = users_fit(answer, 1, 8192)
    assert most is not None and most.max_users > 1
    for users, fits in ((most.max_users, True), (most.max_users + 1, False)):
        found = users_fit(answer, users, 8192)
        assert found is not None and found.fits is fits


def test_a_shared_prefix_is_charged_once() -> None:
    answer = size_up(request(max_model_len=8192))
    alone, shared = users_fit(answer, 10, 8192), users_fit(answer, 10, 8192, shared=4096)
    assert alone is not None and shared is not None
    assert shared.needed_blocks == 256 + 10 * 256
    assert alone.needed_blocks == 10 * 512
    assert shared.max_users > alone.max_users


def test_the_longest_context_of_so_many_users_fits() -> None:
    answer = size_up(request())
    found = users_fit(answer, 16, 4096)
    assert found is not None
    again = users_fit(answer, 16, found.max_context_tokens)
    assert again is not None and again.fits


def test_a_comparison_keeps_the_order_and_larger_cards_hold_more() -> None:
    gpus = [find_hardware(n) for n in ("l40s", "a100-80g", "h200")]
    rows = compare(request(gpu=None), Demand(4, 16_384), gpus, ["bf16", "fp8"])
    assert [r.label for r in rows] == [f"{g.id} {k}" for g in gpus for k in ("bf16", "fp8")]
    held = [r.users.max_users for r in rows if r.users]
    assert held[0] < held[2] < held[4]
    assert held[1] == pytest.approx(2 * held[0], abs=2)


def test_the_recommendation_fits_and_no_cheaper_single_card_does() -> None:
    demand = Demand(20, 8192)
    machines = [p for p in all_hardware() if not p.is_cpu]
    best = recommend(request(gpu=None, engine="vllm"), demand, machines)
    assert best is not None and best.fits and best.usd_per_hour is not None
    cheaper = [p for p in machines if p.usd_per_hour and sum(p.usd_per_hour) / 2 < best.usd_per_hour]
    for row in compare(request(gpu=None, engine="vllm", max_model_len=8192), demand, cheaper, ["auto", "fp8"]):
        if row.request.kv_dtype == "auto":
            assert not row.fits


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert recommend(request(gpu=None), Demand(10_000, 100_000), [find_hardware("t4")]) is None


def test_commands_carry_the_choice_and_kvctl_says_what_it_cannot() -> None:
    best = recommend(
        request("meta-llama/Llama-3.1-70B-Instruct", None, engine="vllm"), Demand(4, 8192), [find_hardware("h100")]
    )
    assert best is not None
    line = serve_command(best, "vllm serve")
    assert line.startswith("vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 8192")
    assert f"--tensor-parallel-size {best.request.parallel.tensor}" in line
    assert obstacle(best, "kvctl serve") == "it runs on one GPU"


def test_advice_for_what_does_not_fit_names_a_length_that_does() -> None:
    tight = request("Qwen/Qwen2.5-7B-Instruct", "rtx-4090")
    answer = size_up(replace(tight, max_model_len=131_072))
    assert answer.fits is False
    length = next(line for line in advise(answer) if line.startswith("--max-model-len"))
    assert size_up(replace(tight, max_model_len=int(length.split()[1]))).fits


def test_advice_on_hybrids_warns_of_large_blocks() -> None:
    lines = advise(size_up(request("Qwen/Qwen3.5-35B-A3B", "h100", engine="vllm", quantization="fp8")))
    assert any("1,056 tokens" in line for line in lines) or any("no capacity" in line for line in lines)


def test_advice_without_memory_says_what_to_add() -> None:
    assert "--gpu" in advise(size_up(request(gpu=None)))[0]


def test_the_families_that_kvctl_serve_is_said_to_take_are_the_engines() -> None:
    assert (*SUPPORTED_ARCHITECTURES, *SUPPORTED) == KVCTL_ARCHITECTURES


@pytest.mark.parametrize(
    ("name", "gpu", "problem"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "l40s", None),
        ("Qwen/Qwen3-32B-FP8", "h100", "it has no quantized weights"),
        ("deepseek-ai/DeepSeek-V2-Lite", "h100", "it does not serve DeepseekV2ForCausalLM"),
        ("Qwen/Qwen2.5-7B-Instruct", "mi300x", "it runs on NVIDIA GPUs and CPUs"),
    ],
)
def test_kvctl_serve_is_recommended_only_where_it_can_run(name: str, gpu: str, problem: str | None) -> None:
    choice = choose(request(name, gpu, max_model_len=8192), Demand(1, 8192), gpu)
    assert choice.fits
    assert obstacle(choice, "kvctl serve") == problem
    assert obstacle(choice, "vllm serve") is None


def test_a_recommended_command_can_be_pasted_whole() -> None:
    """A shell joins the printed lines into the one command."""
    choice = choose(request("Qwen/Qwen2.5-7B-Instruct", "l4", kv_dtype="fp8"), Demand(20, 8000), "l4")
    printed = [line.plain for line in recommended_part(choice)][1:]
    assert max(len(line) for line in printed) <= 80
    joined = "\n".join(printed).replace("\\\n", " ").split("\n")
    assert [shlex.split(line) for line in joined] == [
        shlex.split(serve_command(choice, program)) for program in ("kvctl serve", "vllm serve")
    ]


def test_commands_name_a_local_model_as_it_was_given(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    config = Path("profiles/models/Qwen/Qwen2.5-0.5B-Instruct.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
    for given in (folder, folder / "config.json"):
        sized = SizeRequest(model=load_model(str(given)), hardware=find_hardware("l4"))
        assert shlex.split(serve_command(choose(sized, Demand(), "l4"), "kvctl serve"))[2] == str(folder)


def test_kvctl_serve_holds_a_gguf_file_unpacked_and_llama_cpp_as_it_is() -> None:
    shape = load_model("HuggingFaceTB/SmolLM2-135M-Instruct").shape
    model = SizedModel("smol", shape, "file", WeightFiles(91_000_000, 134_515_008, "GGUF header", is_gguf=True))
    held = {
        engine: size_up(SizeRequest(model=model, engine=engine, hardware=find_hardware("l4"))).weights
        for engine in ("kvctl", "llama.cpp")
    }
    assert held["kvctl"] is not None and held["kvctl"].total_bytes == 134_515_008 * 2
    assert held["llama.cpp"] is not None and held["llama.cpp"].total_bytes == 91_000_000


def test_advice_for_too_many_users_is_about_that_many_users() -> None:
    """On a T4, FP8 weights would make the model fit, but nine users and not twenty; and no T4 runs them."""
    asked, demand = request("Qwen/Qwen2.5-7B-Instruct", "t4", max_model_len=8000, engine="vllm"), Demand(20, 8000)
    answer = size_up(asked)
    lines = advise(answer, demand, users_fit(answer, 20, 8000))
    assert not any("fp8" in line for line in lines)
    assert "--tensor-parallel-size 2 fits." in lines
    for tensor, fits in ((1, False), (2, True)):
        more = replace(asked, parallel=replace(asked.parallel, tensor=tensor))
        assert choose(more, demand, "").fits is fits


def test_advice_for_kvctl_says_which_changes_are_not_its_own() -> None:
    lines = advise(size_up(request("meta-llama/Llama-3.1-70B-Instruct", "h100")))
    assert "--tensor-parallel-size 4 fits. With vllm serve: kvctl serve splits and quantizes no weights." in lines


def test_users_need_seats_and_not_only_memory() -> None:
    """Twenty fit into the memory; with four seats four run at once."""
    for seats, fits in ((None, True), (4, False), (20, True)):
        answer = size_up(request("Qwen/Qwen2.5-7B-Instruct", "l4", max_model_len=2000, max_num_seqs=seats))
        fit = users_fit(answer, 20, 2000)
        assert fit is not None and fit.fits is fits
        assert fit.max_users == (4 if seats == 4 else 20 if seats == 20 else fit.max_users)


def test_advice_for_too_few_seats_is_more_seats() -> None:
    answer = size_up(request("Qwen/Qwen2.5-7B-Instruct", "l4", max_model_len=2000, max_num_seqs=4))
    assert advise(answer, Demand(20, 2000), users_fit(answer, 20, 2000)) == ["--max-num-seqs 20 fits."]


def test_a_command_has_a_seat_for_every_user() -> None:
    choice = choose(request("Qwen/Qwen2.5-0.5B-Instruct", "h100"), Demand(2000, 512), "h100")
    assert choice.fits
    words = serve_command(choice, "kvctl serve").split()
    assert int(words[words.index("--max-num-seqs") + 1]) >= 2000
