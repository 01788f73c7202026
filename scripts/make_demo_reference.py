"""Ask transformers, in float32, what the demo model says; write it down for the tests.

    python scripts/make_demo_reference.py MODEL_FOLDER [OUTPUT.json]

MODEL_FOLDER is the converted demo model (`kvctl serve` leaves it in the user's cache folder). Run it again only when
the conversion changes: the tests compare the engine's greedy tokens and log probabilities with this file.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

MAX_NEW_TOKENS = 128
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "To make a good cup of tea, first",
    "In 1969, the first humans",
    "Q: What is the difference between a list and a tuple in Python?\nA:",
    "The quick brown fox",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5, 6, 7,",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM users WHERE",
    "The mitochondria is",
    "import numpy as np\n\n",
    "Shakespeare wrote many plays, among them",
    "If it rains tomorrow,",
    "Der schnellste Weg nach Berlin",
    "Ingredients:\n- 2 cups of flour\n- 1 teaspoon of salt\n",
    "It was the best of times,",
    "<html>\n<head>\n<title>",
]
CHATS = [
    "What is the tallest mountain on Earth?",
    "Write a haiku about autumn leaves.",
    "Explain recursion to a five-year-old.",
    "Translate 'good morning' into Spanish, French and Italian.",
]
TEXT = """The history of computing began long before electronic machines. Merchants used the abacus to add and
subtract, sailors carried printed tables of logarithms, and astronomers hired rooms full of people, called computers,
to work out the positions of the planets. In the nineteenth century Charles Babbage designed an engine of gears that
could follow a program on punched cards; Ada Lovelace saw that such an engine might one day compose music. The first
electronic computers filled whole halls. They were built from thousands of vacuum tubes, which failed so often that
engineers walked up and down with trolleys of spare parts. Transistors replaced the tubes in the 1950s, and integrated
circuits replaced single transistors ten years later. Since then the number of transistors on a chip has doubled about
every two years. A telephone today holds more computing power than all the machines that guided the first astronauts
to the Moon. What comes next is harder to say: 17 percent of experts asked in a survey expected quantum computers to
matter within 5 years, 42 percent within 10 years, and the rest later or never."""


def main() -> None:
    folder = Path(sys.argv[1])
    target = Path(sys.argv[2] if len(sys.argv) > 2 else "tests/data/demo_model_reference.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in CHATS
    ]
    greedy = []
    for prompt in PROMPTS + chats:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        greedy.append({"prompt_token_ids": ids, "token_ids": output[0, len(ids) :].tolist()})
    text_ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    with torch.inference_mode():
        logprobs = model(torch.tensor([text_ids])).logits[0].log_softmax(dim=-1)
    chosen = logprobs[:-1].gather(1, torch.tensor(text_ids[1:]).unsqueeze(1)).squeeze(1)
    reference = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "greedy": greedy,
        "text_token_ids": text_ids,
        "text_logprobs": [round(value, 5) for value in chosen.tolist()],  # of text_token_ids[1:]
    }
    target.write_text(json.dumps(reference, separators=(",", ":")).replace('{"prompt', '\n{"prompt') + "\n")
    print(f"{len(greedy)} prompts, {len(text_ids)} tokens of text -> {target}")


if __name__ == "__main__":
    main()
