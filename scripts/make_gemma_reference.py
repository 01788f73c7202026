"""Ask transformers, in float32, about Gemma 3 270M past its sliding window; write it down for the tests.

    python scripts/make_gemma_reference.py MODEL_FOLDER [OUTPUT.json]

MODEL_FOLDER is the model that `tests/engine/test_gemma.py` downloads and converts.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

PROMPT_TOKENS = 640  # the window is 512
TEXT_TOKENS = 760
MAX_NEW_TOKENS = 40


def main() -> None:
    folder = Path(sys.argv[1])
    target = Path(sys.argv[2] if len(sys.argv) > 2 else "tests/data/gemma3_270m_reference.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (Path(__file__).parents[1] / "LICENSE").read_text()
    ids = [2, *tokenizer(text, add_special_tokens=False).input_ids][:TEXT_TOKENS]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    chosen = logprobs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    prompt = ids[:PROMPT_TOKENS]
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    reference = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "text_token_ids": ids,
        "text_logprobs": [round(value, 5) for value in chosen.tolist()],  # of text_token_ids[1:]
        "num_prompt_tokens": len(prompt),
        "token_ids": output[0, len(prompt) :].tolist(),
    }
    target.write_text(json.dumps(reference, separators=(",", ":")) + "\n")
    print(f"{len(ids)} tokens of text, {MAX_NEW_TOKENS} generated -> {target}")
    print(tokenizer.decode(reference["token_ids"]), sum(reference["text_logprobs"]) / len(ids))


if __name__ == "__main__":
    main()
