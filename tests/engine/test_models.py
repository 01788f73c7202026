"""Every served family on tiny random models: the engine's tokens and log probabilities against transformers'."""

import pytest
import torch

from tests.support import engine_runs, tiny_models

NUM_NEW_TOKENS = 40
PROMPT_LENGTHS = (1, 5, 16, 33, 70)  # one token, within and at a block's edge, past every window (24 tokens)


@pytest.fixture(autouse=True)
def _no_yarn_advice():
    """transformers warns that our tiny yarn factor is unusual."""
    previous = tiny_models.transformers.utils.logging.get_verbosity()
    tiny_models.transformers.utils.logging.set_verbosity_error()
    yield
    tiny_models.transformers.utils.logging.set_verbosity(previous)


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


def generated_by_transformers(model, prompt, num_tokens):
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def greedy_continuation_check(model, prompt, token_ids):
    """One pass of transformers over prompt and answer: each answer token must be its most likely one there.

    The same statement as "generate gives these tokens", at a fortieth of the time.
    """
    text = prompt + token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([text])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == token_ids
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("tiny", tiny_models.ALL, ids=lambda tiny: tiny.name)
def test_greedy_tokens_and_all_log_probabilities_equal_transformers(tiny, tiny_folder):
    model, folder = tiny_folder(tiny)
    for kernels in ("torch", "auto"):
        engine = engine_runs.start(folder, cpu_kernels=kernels)
        results = engine.run(prompts(), engine_runs.greedy(NUM_NEW_TOKENS))
        for prompt, result in zip(prompts(), results, strict=True):
            expected = greedy_continuation_check(model, prompt, result.token_ids)
        assert len(set(results[-1].token_ids)) > 2  # the model says something: equal tokens mean something

        text = prompts()[-1] + results[-1].token_ids
        (scored,) = engine.run([text], engine_runs.greedy(1, prompt_logprobs=-1))
        entries = scored.prompt_logprobs[1:]
        ours = torch.empty(len(entries), tiny_models.VOCAB_SIZE)
        ours.scatter_(1, torch.tensor([e.token_ids for e in entries]), torch.tensor([e.logprobs for e in entries]))
        torch.testing.assert_close(ours, expected[:-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_tokens_equal_those_of_transformers_generate(tiny, tiny_folder):
    model, folder = tiny_folder(tiny)
    results = engine_runs.start(folder).run(prompts()[2:4], engine_runs.greedy(30))
    for prompt, result in zip(prompts()[2:4], results, strict=True):
        assert result.token_ids == generated_by_transformers(model, prompt, 30)


def test_dynamic_rope_equals_transformers_past_the_trained_length(tiny_folder):
    tiny = tiny_models.TinyModel(
        "llama-dynamic-rope",
        tiny_models._llama(
            max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        ),
    )
    model, folder = tiny_folder(tiny)
    (result,) = engine_runs.start(folder).run([prompts()[3]], engine_runs.greedy(60))  # 33 + 60 > 64
    assert result.token_ids == generated_by_transformers(model, prompts()[3], 60)


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(tiny, dtype, tiny_folder):
    model, folder = tiny_folder(tiny)
    if dtype == "float16" and tiny is tiny_models.GEMMA3:
        with pytest.raises(engine_runs.ConfigError, match="float16"):
            engine_runs.start(folder, dtype=dtype)
        return
    text = prompts()[-1]
    (scored,) = engine_runs.start(folder, dtype=dtype).run([text], engine_runs.greedy(1, prompt_logprobs=0))
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0].log_softmax(dim=-1)
    errors = [
        abs(entry.logprobs[0] - expected[position, entry.token_ids[0]].item())
        for position, entry in enumerate(scored.prompt_logprobs[1:])
    ]
    assert sum(errors) / len(errors) < (0.1 if dtype == "bfloat16" else 0.02)


def test_a_model_saved_with_vision_names_serves_its_text_part(tiny_folder, tmp_path):
    from kvctl.engine.json_file import read_json_object

    model, folder = tiny_folder(tiny_models.GEMMA3_TIED)
    config = read_json_object(folder / "config.json")
    for prefix in ("language_model.model.", "model.language_model."):
        target = tmp_path / prefix
        target.mkdir()
        tiny_models.write_renamed(folder, target, lambda name, p=prefix: p + name.removeprefix("model."))
        tiny_models.write_config(
            target, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
        )
        (result,) = engine_runs.start(target).run([prompts()[3]], engine_runs.greedy(20))
        greedy_continuation_check(model, prompts()[3], result.token_ids)
