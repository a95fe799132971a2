"""Value pretraining on labelled solutions: GSM8K's example solutions, a small critic from scratch.

GSM8K (github.com/openai/grade-school-math, MIT) brings 5,276 solutions that four models gave to its
1,319 test questions, 38 % of them right: ``example_model_solutions.jsonl``, one question a line as
``{"question", "ground_truth", "<model>": {"solution", "is_correct"}, …}``.  Fetch that file yourself,
gzip it or not.  An eighth of the questions is held out; ``max_solutions`` sets the size of the corpus.
The words come from SmolLM2's tokenizer, which is written once::

    python -c "from sao_jax.models import gguf, pretrained as p; \\
      gguf.tokenizer(gguf.GGUFFile(p.fetch_smollm2())).save('tokenizer.json')"
    for size in 400 1400 0; do
      sao-jax pretrain-value --config=configs/gsm8k_value.py --config.run_dir=runs/value-$size \\
        --config.value_pretrain.path=example_model_solutions.jsonl.gz \\
        --config.value_pretrain.max_solutions=$size
    done

The embeddings are random, wide and stay as they are: trained ones learn the questions by heart, and
so do more epochs.

Measured, six seeds, each with a split of its own (two x86 cores that other jobs shared; half a minute
to five minutes a run).  Explained variance over the action tokens of some 620 held-out solutions::

    trained on   mean    seeds 0 … 5
           400   .000   -.002   .005  -.002   .005  -.008   .005
         1,400   .008    .000   .009   .020   .013   .003   .005
     all 4,400   .020    .020   .034   .037   .030   .024  -.025

It rises with the corpus in five of six; the settings were chosen on the split of seed 0.  It is the
data, not the updates: 400 solutions for eleven epochs, as many updates as all of them get, end at -.31
and -.33 (seeds 2 and 1).  The numbers are small because little of this can be known to a model that
has read nothing else.
"""

from sao_jax import config as c


def get_config() -> c.Config:
  return c.Config(
    name="gsm8k_value",
    model=c.ModelConfig(
      vocab_size=49152,
      d_model=1024,
      num_layers=1,
      num_heads=1,
      num_kv_heads=1,
      head_dim=64,
      d_ff=256,
      num_experts=0,
      tie_embeddings=True,
    ),
    chat=c.ChatConfig(format="chatml", tokenizer="tokenizer.json"),
    # A prompt and its solution; 4 % of the solutions are longer and left out.
    env=c.EnvConfig(max_tokens=352),
    rollout=c.RolloutConfig(max_len=352),
    packing=c.PackingConfig(lengths=(256, 352), max_segments=1),
    value_pretrain=c.ValuePretrainConfig(
      lr=3e-4,
      warmup_steps=20,
      schedule="cosine",
      epochs=1,
      batch_size=16,
      trainable=(r"layers/", r"value_head"),
    ),
  )
