"""Records what transformers makes of SmolLM2's GGUF file: token ids of texts and logits of a prompt.

Needs torch, transformers and gguf, which the project does not:

    python tests/models/record_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import pathlib
import sys

OUTPUT = pathlib.Path(__file__).parent / "recorded" / "smollm2.json"
PROMPT = "12 + 7 = 19\n45 + 38 = 83\n21 + 34 = 55\nThe capital of France is Paris."
TEXTS = [
  "",
  " ",
  "\n",
  "\n\n",
  "\t\n  x",
  "12 + 7 = 19\n45 + 38 = 83\n21 + 34 = ",
  "1234567890 3.14159 -17 1,000,000",
  "Tom has 3 boxes with 4 apples each. He eats 2. How many are left?",
  "I'm you're he'd they've we'll it's DON'T",
  "def f(x):\n    return x**2 + 1  # squares\n",
  "Größe naïve café Ελληνικά русский 日本語 한국어 العربية",
  "emoji 🙂 👩‍🔬 and  double  spaces   triple",
  "<|im_start|>user\nWhat is 7 * 8?<|im_end|>\n<|im_start|>assistant\n",
  "<|endoftext|><repo_name>x<file_sep>",
  "<|im_start |> <|im_star",
  r"$\frac{a}{b} \leq \boxed{\sqrt{2}}$",
  "e\u0301 \u00e9 \u200b \ufeff \x00 \x7f",
  "AaBbCc_snake_case camelCase kebab-case https://x.org/a?b=c&d=%20",
]


def main(path: str) -> None:
  import torch
  import transformers

  folder, name = str(pathlib.Path(path).parent), pathlib.Path(path).name
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.float32
  ).eval()
  ids = tokenizer.encode(PROMPT, add_special_tokens=False)
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0]
  top = logits.topk(4)
  record = {
    "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    "texts": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in TEXTS],
    "prompt_ids": ids,
    "top_ids": top.indices.tolist(),
    "top_logits": [[round(x, 5) for x in row] for row in top.values.tolist()],
    "logsumexp": [round(x, 5) for x in logits.logsumexp(-1).tolist()],
  }
  OUTPUT.parent.mkdir(exist_ok=True)
  OUTPUT.write_text(json.dumps(record, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
  main(sys.argv[1])
