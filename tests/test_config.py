"""Configuration: typed overrides, combinations that mislead refused, the papers' defaults."""

import pathlib
import re

import pytest

from sao_jax import loader
from sao_jax.checks import check
from sao_jax.config import AdvantageConfig, Config, ConfigError, PackingConfig, PolicyConfig

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"


def settings(config: Config) -> dict:
  return dict(loader.leaves(config))


@pytest.mark.parametrize(
  ("path", "value", "expected"),
  [
    ("critic.lr", 1, 1.0),
    ("critic.lr", "1e-4", 1e-4),
    ("critic.enabled", False, False),
    ("critic.enabled", "true", True),
    ("num_steps", 3, 3),
    ("packing.lengths", (32, 64), (32, 64)),
    ("packing.lengths", "(32,64)", (32, 64)),
    ("packing.lengths", "32", (32,)),
    ("packing.lengths", "()", ()),
    ("critic.trainable", r"('ffn/(w_gate_up|w_down)','value_head')",
     ("ffn/(w_gate_up|w_down)", "value_head")),
    ("critic.trainable", "value_head", ("value_head",)),
    ("name", "a=b --c", "a=b --c"),
    ("task.prompt", "{question}\n= ", "{question}\n= "),
  ],
)  # fmt: skip
def test_override_is_typed_like_its_field(path, value, expected):
  config = loader.override(Config(), {path: value})
  got = settings(config)[path]
  assert got == expected
  assert type(got) is type(expected)


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    ("critic.lr", "abc", "config.critic.lr = 'abc': expected a number"),
    ("critic.lr", None, "expected a number"),
    ("num_steps", 1.5, "config.num_steps = 1.5: expected an integer"),
    ("critic.enabled", "maybe", "expected true or false"),
    ("packing.lengths", "('a',)", "expected a tuple of int, such as"),
    ("packing.lengths", (32, 0.5), "expected a tuple of int"),
    ("critic.trainable", "a b,", "expected a tuple of str"),
    ("name", True, "config.name = True: expected a text"),
    ("seed", True, "expected an integer"),
  ],
)
def test_override_of_another_type_is_refused_with_both(path, value, message):
  with pytest.raises(ConfigError) as error:
    loader.override(Config(), {path: value})
  assert message in str(error.value)


@pytest.mark.parametrize(
  ("path", "nearest"),
  [
    ("critc.lr", "critic.lr"),
    ("critic.learning_rate", "critic."),
    ("rolout.max_stalenes", "rollout.max_staleness"),
    ("max_staleness", "rollout.max_staleness"),
    ("model.num_layer", "model.num_layers"),
    ("polcy.lr", "policy.lr"),
    ("seeds", "seed"),
  ],
)
def test_nearest_setting_comes_first(path, nearest):
  first = loader.suggest(path, list(settings(Config())))[0]
  assert first.startswith(nearest)


def test_every_mistyped_setting_finds_its_way_back():
  paths = list(settings(Config()))
  for path in paths:
    for position in (0, len(path) // 2, len(path) - 1):
      if path[position] == ".":
        continue
      typo = path[:position] + path[position + 1 :]
      if typo in paths or typo.endswith(".") or len(path.rsplit(".", 1)[-1]) < 4:
        continue
      assert path in loader.suggest(typo, paths), typo


def test_override_leaves_the_original_alone():
  config = Config()
  loader.override(config, {"critic.lr": 1.0, "packing.lengths": (64,)})
  assert config == Config()


def test_unknown_setting_without_a_neighbour_lists_the_parts():
  with pytest.raises(ConfigError, match="A config has: name, run_dir"):
    loader.override(Config(), {"zzz": 1})


def test_load_checks_like_the_command_line(tmp_path):
  path = tmp_path / "c.py"
  path.write_text("from sao_jax.config import Config\ndef get_config():\n  return Config()\n")
  assert loader.load(str(path), {"seed": 3}) == Config(seed=3)
  with pytest.raises(ConfigError, match="importance ratio"):
    loader.load(str(path), {"rollout.top_p": 0.9})


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("x = 1", "no get_config"),
    ("def get_config():\n  return {}", "returned a dict"),
    ("x = 1\ndef get_config(:\n", r"c.py: line 2: SyntaxError: "),
    ("x = 1\ny = z\n", r"c.py: line 2: NameError: name 'z' is not defined"),
    (
      "from sao_jax.config import Config\n\ndef get_config():\n  return Config(sed=1)\n",
      r"c.py: line 4: TypeError: .*'sed'",
    ),
  ],
)
def test_file_that_is_no_config_is_refused(text, message, tmp_path):
  path = tmp_path / "c.py"
  path.write_text(text)
  with pytest.raises(ConfigError, match=message):
    loader.read(str(path))


REFUSED = [
  ({"rollout.top_p": 0.9}, "rollout.top_p = 0.9"),
  ({"rollout.top_k": 20}, "rollout.top_k = 20"),
  ({"rollout.temperature": 0.0}, "temperature above 0"),
  ({"rollout.max_staleness": -1}, "0 or more"),
  ({"batch_size": 0}, "1 or more"),
  ({"policy.lr": -1.0}, "0 or more"),
  ({"policy.clip_norm": 0.0}, "more than 0"),
  ({"policy.minibatches": 0}, "1 or more"),
  ({"advantage.lambda_": 5.0}, "1 or less"),
  ({"env.name": "foo"}, "math_tool"),
  ({"critic.only_steps": 100}, "never be trained"),
  ({"evaluate.problems": 1000}, "task.eval_size"),
  ({"value_pretrain.rollouts": 64}, "less than one batch"),
  ({"weights.upcycle_experts": 4}, "pretrained weights"),
  ({"mesh.fsdp": 3}, "do not split over the 3 devices"),
  ({"critic.min_explained_variance": 0.2}, "value pretraining, which is off"),
  ({"sft.epochs": 2}, "without sft.path"),
  ({"chat.tokenizer": "x.json"}, "no effect"),
  (
    {
      "advantage.name": "batch_mean",
      "critic.enabled": False,
      "rollout.truncation": "bootstrap",
    },
    "value of the truncated state",
  ),
  ({"batch_size": 10, "group_size": 4}, "not a multiple of group_size = 4"),
  ({"env.max_tokens": 300, "rollout.max_len": 256}, "exceeds rollout.max_len = 256"),
  ({"packing.lengths": (16, 32)}, "below env.max_tokens"),
  ({"loss.name": "a3po", "policy.minibatches": 2}, "no trust region"),
  ({"critic.enabled": False}, "needs the critic"),
  ({"critic.updates_per_step": 0}, "never updated"),
  ({"loss.name": "dpo"}, "choose one of dis, ppo, decoupled_ppo"),
  ({"model.experts_per_token": 9}, "exceeds model.num_experts"),
  ({"model.num_heads": 4, "model.num_kv_heads": 3}, "not a multiple of"),
  ({"loss.name": "dis", "loss.alpha_at_zero": 1.0}, "loss.alpha_at_zero = 1.0 has no effect"),
  ({"env.answer": "boxed"}, "env.answer = 'boxed' with chat.format = 'char'"),
  ({"rollout.max_running": 289}, "Set rollout.max_running = 288 or less"),
  ({"rollout.max_running": 288, "evaluate.every": 5}, "Set rollout.max_running = 287 or less"),
  (
    {"rollout.max_running": 4, "group_size": 8},
    "rollout.max_running = 4 is less than group_size = 8",
  ),
  ({"packing.lengths": (0, 64)}, "packing.lengths = (0, 64): each must be 1 or more"),
  ({"evaluate.top_p": 0.0}, "evaluate.top_p = 0.0: must be more than 0"),
  ({"model.head_dim": 15}, "model.head_dim = 15 is odd"),
  ({"critic.trainable": ("ffn/(",)}, "critic.trainable = 'ffn/(' is no regular expression"),
  ({"value_pretrain.trainable": ("*",)}, "value_pretrain.trainable = '*' is no regular"),
  ({"seed": -1}, "seed = -1: must be 0 or more"),
  ({"seed": 99999999999999999999}, "seed = 99999999999999999999: must be 0 or more and at most"),
  ({"task.shuffle_seed": -1}, "task.shuffle_seed = -1"),
  ({"num_steps": 2**31}, "num_steps = 2147483648: must be below 2^31"),
  ({"policy.b1": 1.0}, "policy.b1 = 1.0: must be below 1"),
  ({"sft.b2": 0.99999999}, "sft.b2 = 0.99999999: must be below 1"),
  ({"critic.eps": 0.0}, "critic.eps = 0.0: must be 1e-30 or more"),
  ({"rollout.temperature": 1e-7}, "rollout.temperature = 1e-07: the engine samples at 1e-06"),
  ({"evaluate.temperature": 1e7}, "evaluate.temperature = 10000000.0: the engine samples at"),
  ({"name": ""}, "the run's folder needs a name"),
  ({"run_dir": __file__}, "is a file; choose another run_dir"),
  ({"run_dir": f"{__file__}/x"}, "is a file; choose another run_dir"),
  ({"policy.micro_batches": 3}, "do not split"),
  ({"critic.micro_batches": 3}, "do not split"),
  (
    {"env.name": "online_writing"},
    "task.source = 'arithmetic': 'online_writing' and 'writing' need",
  ),
  ({"task.source": "writing"}, "env.name = 'math_tool' with task.source = 'writing'"),
  ({"env.judge": "a:b"}, "env.judge = 'a:b' has no effect with env.name = 'math_tool'"),
  ({"task.phase_length": 5}, "task.phase_length = 5 has no effect with env.name = 'math_tool'"),
]
WRITING_REFUSED = [
  (
    {"env.tool": True},
    "env.tool = True has no effect with env.name = 'online_writing': set env.tool =",
  ),
  ({"env.max_turns": 2}, "env.max_turns = 2 has no effect"),
  ({"env.grade": "math"}, "env.grade = 'math' has no effect"),
  ({"task.difficulty": 4}, "task.difficulty = 4 has no effect"),
  ({"env.judge": "judge.py"}, "env.judge = 'judge.py': 'rules', or 'package.module:factory'"),
  ({"env.judge": ":make"}, "env.judge = ':make'"),
  ({"env.judge": "a.b:"}, "env.judge = 'a.b:'"),
  ({"task.styles": ()}, "task.styles = (): one or more of cute, chuunibyou, classical, academic"),
  ({"task.styles": ("cute", "goth")}, "task.styles = ('cute', 'goth'): one or more of cute"),
  ({"task.phase_length": 0}, "task.phase_length = 0: must be 1 or more"),
  (
    {"value_pretrain.rollouts": 9999},
    "value_pretrain.rollouts = 9999 exceeds task.phase_length = ",
  ),
  ({"evaluate.problems": 33}, "evaluate.problems = 33 exceeds task.eval_size = 32"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_combination_is_refused_with_the_reason(overrides, message):
  with pytest.raises(ConfigError) as error:
    check(loader.override(Config(), overrides))
  assert message in str(error.value)


@pytest.mark.parametrize(("overrides", "message"), WRITING_REFUSED)
def test_writing_that_would_not_do_what_it_says_is_refused(overrides, message):
  with pytest.raises(ConfigError) as error:
    loader.load(str(CONFIGS / "online_writing.py"), overrides)
  assert message in str(error.value)


def test_another_judge_may_know_other_styles():
  changes = {"env.judge": "my_judges.style:make", "task.styles": ("goth", "cute")}
  config = loader.load(str(CONFIGS / "online_writing.py"), changes)
  assert config.task.styles == ("goth", "cute")


FLOATS = [path for path, value in settings(Config()).items() if isinstance(value, float)]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39"])
@pytest.mark.parametrize("path", FLOATS)
def test_numbers_that_are_not_finite_are_refused(path, value):
  if (path, value) in {("critic.min_explained_variance", "-inf"), ("loss.eps_high", "inf")}:
    assert check(loader.override(Config(), {path: value}))
    return
  with pytest.raises(ConfigError, match=re.escape(f"{path} = ")):
    check(loader.override(Config(), {path: value}))


def test_a_value_of_another_type_in_a_file_is_refused():
  for changes, message in (
    ({"seed": 1.5}, "seed = 1.5: expected int, not float"),
    ({"name": None}, "name = None: expected str, not NoneType"),
    ({"tensorboard": 1}, "tensorboard = 1: expected bool, not int"),
    ({"packing": PackingConfig(lengths=[64])}, "expected tuple[int, ...], not list"),
  ):
    with pytest.raises(ConfigError, match=re.escape(message)):
      check(Config(**changes))
  check(Config(advantage=AdvantageConfig(reward_bias=0), policy=PolicyConfig(weight_decay=0)))


def test_temperatures_of_an_evaluation():
  for value in (-1.0, 0.0, 1e-6, 1e6):
    check(loader.override(Config(), {"evaluate.temperature": value}))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_is_allowed(path):
  loader.load(str(path))


PAPER_DEFAULTS = {
  "group_size": 1,  # one rollout per prompt
  "rollout.temperature": 1.0,
  "rollout.top_p": 1.0,
  "loss.name": "dis",
  "loss.eps_low": 0.3,  # ratio in (0.7, 6.0): mathematics
  "loss.eps_high": 5.0,
  "loss.average": "token",
  "loss.alpha_at_zero": 0.0,
  "advantage.name": "gae",
  "advantage.skip_observations": True,
  "advantage.alpha": 1.5,  # λ = 1 − 1/(1.5·l)
  "advantage.gamma": 1.0,
  "advantage.normalize": "none",
  "policy.lr": 1e-6,
  "critic.lr": 5e-6,
  "critic.updates_per_step": 2,
  "critic.lambda_": 1.0,
  "critic.warmup_steps": 10,
  "critic.trainable": (r"ffn/(w_gate_up|w_down)", r"value_head"),
}


def test_defaults_are_the_papers():
  got = settings(Config())
  assert {path: got[path] for path in PAPER_DEFAULTS} == PAPER_DEFAULTS


def test_every_setting_has_a_type_that_can_be_overridden():
  for path, value in settings(Config()).items():
    assert settings(loader.override(Config(), {path: value}))[path] == value, path


def test_default_config_is_allowed():
  config = Config()
  assert check(config) is config
