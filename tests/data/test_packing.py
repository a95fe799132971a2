"""Packing: hand-made cases for every row shape, and properties over random episodes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.config import Config, EnvConfig, PackingConfig, RolloutConfig
from sao_jax.data.packing import BatchSpec, PackingError, length_ladder, pack, unpack
from sao_jax.types import Batch, Episode, Trajectory, Version

NOW = Version(0, 5)


def trajectory(
  shape: str,
  *,
  rewards: dict[int, float] | None = None,
  version: int | list[int] = 5,
  truncated: bool = False,
  segment: int = 0,
) -> Trajectory:
  """``shape`` spells the row: p prompt, a action, o observation."""
  mask = np.array([c == "a" for c in shape])
  versions = np.full(len(shape), -1, np.int32)
  versions[mask] = version
  placed = np.zeros(len(shape), np.float32)
  for position, value in (rewards or {}).items():
    placed[position] = value
  size = len(shape)
  return Trajectory(
    task_id="task",
    episode_id="episode",
    segment=segment,
    group=0,
    tokens=np.arange(10, 10 + size, dtype=np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, -np.arange(1, size + 1) / 8, 0).astype(np.float32),
    policy_version=versions,
    temperature=np.where(mask, 0.5, 1).astype(np.float32),
    rewards=placed,
    truncated=truncated,
  )


def episode(*trajectories: Trajectory, serial: int = 0, sample: int = 0, group: int = 0) -> Episode:
  return Episode(
    episode_id=f"{serial}.{sample}",
    task_serial=serial,
    sample=sample,
    attempt=0,
    group=group,
    trajectories=trajectories,
    status="truncated" if trajectories[-1].truncated else "done",
    reward=float(sum(t.rewards.sum() for t in trajectories)),
    metrics={"turns": 1.0},
  )


def config(batch_size: int = 2, **parts) -> Config:
  defaults = {"env": EnvConfig(max_tokens=8), "packing": PackingConfig(max_segments=2)}
  return Config(batch_size=batch_size, **{**defaults, **parts})


def test_one_trajectory_by_hand():
  batch, metrics = pack([episode(trajectory("ppaaoa", rewards={5: 1.0}))], NOW, config())
  assert batch.tokens.shape == (2, 8)
  assert batch.tokens[0].tolist() == [10, 11, 12, 13, 14, 15, 0, 0]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
  assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [0] * 8]
  assert batch.action_mask[0].tolist() == [False, False, True, True, False, True, False, False]
  assert batch.loss_mask[0].tolist() == batch.action_mask[0].tolist()
  assert batch.rewards[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
  assert batch.discounts[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
  assert batch.temperature[0].tolist() == [1, 1, 0.5, 0.5, 1, 0.5, 1, 1]
  np.testing.assert_allclose(batch.rollout_logprobs[0, 2:6], [-0.375, -0.5, 0, -0.75])
  assert not batch.bootstrap.any()
  assert batch.num_actions.tolist() == [3, 0, 0, 0]
  assert batch.returns.tolist() == [1, 0, 0, 0]
  assert batch.episode.tolist() == [0, -1, -1, -1]
  assert batch.group.tolist() == [0, -1, -1, -1]
  assert metrics["batch/fill"] == 6 / 16
  assert metrics["episode/turns"] == 1.0


@pytest.mark.parametrize(
  ("shape", "last"),
  [("pa", 1), ("paaaaaaa", 7), ("paoaoooo", 3), ("pppppppa", 7), ("paooooo", 1), ("papapapa", 7)],
)
def test_the_last_action_keeps_its_reward_and_ends_the_discount(shape, last):
  batch, _ = pack([episode(trajectory(shape, rewards={last: 0.75}))], NOW, config())
  assert batch.rewards[0, last] == 0.75
  assert batch.rewards.sum() == 0.75
  assert batch.discounts[0, last] == 0
  assert (batch.discounts[0, :last] == 1).all()


def test_stale_tokens_leave_only_the_policy_loss():
  row = trajectory("paaaa", version=[2, 3, 4, 5])
  cfg = config(rollout=RolloutConfig(max_staleness=2))
  batch, metrics = pack([episode(row)], NOW, cfg)
  assert batch.staleness[0].tolist() == [0, 3, 2, 1, 0, 0, 0, 0]
  assert batch.loss_mask[0].tolist() == [False, False, True, True, True, False, False, False]
  assert batch.action_mask[0].sum() == batch.value_mask[0].sum() == batch.num_actions[0] == 4
  assert metrics["staleness/max"] == 3
  assert metrics["staleness/trained_max"] == 2
  assert metrics["staleness/masked_share"] == 0.25


@pytest.mark.parametrize("truncation", ["terminal", "mask", "bootstrap"])
@pytest.mark.parametrize("shape", ["paaa", "paoo", "paaaaaaa"])
def test_truncation_is_a_named_choice(truncation, shape):
  cfg = config(rollout=RolloutConfig(truncation=truncation))
  rows = [
    episode(trajectory(shape, truncated=True)),
    episode(trajectory("pa"), serial=1, group=1),
  ]
  batch, _ = pack(rows, NOW, cfg)
  trained = 0 if truncation == "mask" else shape.count("a")
  assert batch.loss_mask[0].sum() == batch.value_mask[0].sum() == trained
  assert batch.action_mask[0].sum() == shape.count("a")
  assert batch.loss_mask[1].sum() == 1
  expected = np.zeros((2, 8))
  if truncation == "bootstrap":
    expected[0, len(shape) - 1] = 1
  np.testing.assert_array_equal(batch.bootstrap, expected)


def test_reward_scale_and_bias_apply_to_the_return():
  cfg = config()
  cfg.advantage.reward_scale, cfg.advantage.reward_bias = 10.0, -0.5
  batch, metrics = pack([episode(trajectory("paoa", rewards={1: 0.25, 3: 0.75}))], NOW, cfg)
  assert batch.rewards[0, :4].tolist() == [0, 2.5, 0, 2.5]
  assert batch.returns[0] == 5.0  # 10 · (1 − 0.5)
  assert metrics["episode/reward"] == 1.0


@pytest.mark.parametrize("choice", ["share", "last"])
def test_segments_share_the_return_of_their_episode(choice):
  cfg = config(batch_size=1, rollout=RolloutConfig(segment_reward=choice))
  first = trajectory("paa", rewards={2: 0.5})
  second = trajectory("ppaa", rewards={3: 1.0}, segment=1)
  batch, _ = pack([episode(second, first)], NOW, cfg)
  assert batch.segment_ids[0].tolist() == [2, 2, 2, 2, 1, 1, 1, 0]  # one row: the longest first
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
  assert batch.rewards[0].tolist() == [0, 0, 0, 1.5, 0, 0, 1.5 if choice == "share" else 0, 0]
  assert batch.discounts[0].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
  assert batch.returns.tolist() == [1.5 if choice == "share" else 0, 1.5]
  assert batch.episode.tolist() == [0, 0]
  assert batch.num_actions.tolist() == [2, 2]


def test_order_and_groups_do_not_depend_on_arrival():
  rows = [
    episode(trajectory("pa"), serial=7, sample=1, group=7),
    episode(trajectory("paa"), serial=3, sample=0, group=3),
    episode(trajectory("paaa"), serial=7, sample=0, group=7),
    episode(trajectory("paaaa"), serial=3, sample=1, group=3),
  ]
  batch, _ = pack(rows, NOW, config(batch_size=4))
  again, _ = pack(rows[::-1], NOW, config(batch_size=4))
  assert batch.num_actions.tolist() == [2, 4, 3, 1, 0, 0, 0, 0]
  assert batch.group.tolist() == [0, 0, 1, 1, -1, -1, -1, -1]
  for field in dataclasses.fields(Batch):
    np.testing.assert_array_equal(getattr(batch, field.name), getattr(again, field.name))


def test_pad_token_inside_a_trajectory_is_no_padding():
  row = trajectory("paa", rewards={2: 1.0})
  row.tokens[2] = 0  # pad == eos: the final EOS has the id of the padding
  batch, _ = pack([episode(row)], NOW, config())
  assert batch.segment_ids[0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
  assert batch.loss_mask[0, 2]


def test_refusals_name_numbers_and_the_way_out():
  fine = trajectory("pa")
  with pytest.raises(PackingError, match=r"9 tokens, the longest row 8.*packing.lengths"):
    pack([episode(trajectory("p" + "a" * 8))], NOW, config())
  with pytest.raises(PackingError, match=r"5 trajectories of 1 episodes.*room for 4.*max_segments"):
    pack([episode(*[trajectory("pa", segment=i) for i in range(5)])], NOW, config())
  with pytest.raises(PackingError, match=r"version 6, later than version 5"):
    pack([episode(trajectory("pa", version=6))], NOW, config())
  with pytest.raises(PackingError, match=r"incarnation 0, training is in 1"):
    pack([episode(fine)], Version(1, 5), config())
  with pytest.raises(PackingError, match=r"no action"):
    pack([episode(trajectory("pp"))], NOW, config())
  with pytest.raises(PackingError, match=r"action at position 0"):
    pack([episode(trajectory("aa"))], NOW, config())
  with pytest.raises(PackingError, match=r"rewards at positions \[2\]"):
    pack([episode(trajectory("pao", rewards={2: 1.0}))], NOW, config())
  with pytest.raises(PackingError, match=r"no trajectory"):
    pack([dataclasses.replace(episode(fine), trajectories=())], NOW, config())


def test_ladder():
  assert length_ladder(8) == (8,)
  assert length_ladder(64) == (64,)
  assert length_ladder(300) == (64, 128, 256, 300)
  cfg = config(packing=PackingConfig(lengths=(16, 4, 16)))
  assert BatchSpec.from_config(cfg).lengths == (4, 16)
  assert BatchSpec.from_config(cfg, batch_size=6) == BatchSpec(6, 12, (4, 16))
  for shape, length in (("pa", 4), ("paaa", 4), ("paaaa", 16)):
    assert pack([episode(trajectory(shape))], NOW, cfg)[0].tokens.shape == (2, length)


@pytest.mark.parametrize(
  ("sizes", "shape"),
  [
    ((3, 3), (1, 8)),  # one row holds both
    ((5, 4), (2, 8)),  # nine tokens do not go into one row of eight
    ((5, 5, 3), (2, 8)),
    ((5, 5, 5), (3, 8)),
    ((8, 8, 8, 8, 8), (5, 8)),
  ],
)
def test_there_are_as_many_times_the_rows_as_a_batch_needs(sizes, shape):
  rows = [episode(trajectory("p" + "a" * (n - 1)), serial=i) for i, n in enumerate(sizes)]
  cfg = config(batch_size=len(sizes), packing=PackingConfig(rows=1))
  batch, metrics = pack(rows, NOW, cfg)
  assert batch.tokens.shape == shape
  assert (metrics["batch/rows"], metrics["batch/row_length"]) == shape
  assert [len(segment["tokens"]) for segment in unpack(batch)] == list(sizes)
  assert batch.num_actions[: len(sizes)].tolist() == [n - 1 for n in sizes]


def test_every_row_has_its_share_where_trajectories_share_rows():
  sizes = (2, 7, 3, 5, 4, 3)
  rows = [episode(trajectory("p" + "a" * (n - 1)), serial=i) for i, n in enumerate(sizes)]
  cfg = config(batch_size=6, packing=PackingConfig(rows=2, lengths=(24,)))
  batch, _ = pack(rows, NOW, cfg)
  # All 24 tokens would fit the first row, and leave the second minibatch of two empty.
  assert (batch.segment_ids > 0).sum(1).tolist() == [12, 12]


def test_an_empty_batch_and_the_warm_up_batch_have_the_shapes_of_a_full_one():
  cfg = config()
  full, _ = pack([episode(trajectory("pa"))], NOW, cfg)
  for other in (BatchSpec.from_config(cfg).zeros(8), pack([], NOW, cfg)[0]):
    for field in dataclasses.fields(Batch):
      a, b = getattr(full, field.name), getattr(other, field.name)
      assert (a.shape, a.dtype) == (b.shape, b.dtype), field.name


@st.composite
def episodes(draw) -> list[Episode]:
  made = []
  for serial in range(draw(st.integers(1, 6))):
    parts = []
    for segment in range(draw(st.integers(1, 3))):
      shape = "p" + draw(st.text("ao", max_size=14)) + "a" + draw(st.text("ao", max_size=14))
      versions = draw(st.lists(st.integers(0, 5), min_size=shape.count("a"), max_size=len(shape)))
      versions = versions[: shape.count("a")]
      last = max(i for i, c in enumerate(shape) if c == "a")
      parts.append(
        trajectory(
          shape,
          rewards={last: draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0]))},
          version=versions,
          truncated=draw(st.booleans()),
          segment=segment,
        )
      )
    made.append(episode(*parts, serial=serial, group=serial // 2))
  return made


@settings(max_examples=80, deadline=None)
@given(
  episodes(),
  st.integers(6, 20),
  st.sampled_from(["terminal", "mask", "bootstrap"]),
  st.integers(0, 5),
)
def test_unpack_inverts_pack_and_masks_say_what_they_mean(made, rows, truncation, bound):
  cfg = config(
    batch_size=6,
    env=EnvConfig(max_tokens=60),
    packing=PackingConfig(rows=rows, max_segments=3, lengths=(8, 16, 32, 64)),
    rollout=RolloutConfig(truncation=truncation, max_staleness=bound),
  )
  batch, metrics = pack(made, NOW, cfg)
  flat = [t for e in made for t in e.trajectories]
  packed = unpack(batch)
  assert len(packed) == len(flat)
  for row, source in zip(packed, flat, strict=True):
    for name in ("tokens", "action_mask", "rollout_logprobs", "temperature"):
      np.testing.assert_array_equal(row[name], getattr(source, name))
    np.testing.assert_array_equal(row["positions"], np.arange(len(source.tokens)))
    actions = source.action_mask
    np.testing.assert_array_equal(row["staleness"][actions], 5 - source.policy_version[actions])
    assert not row["staleness"][~actions].any()
    known = not (source.truncated and truncation == "mask")
    np.testing.assert_array_equal(row["value_mask"], actions & known)
    fresh = row["staleness"] <= bound
    np.testing.assert_array_equal(row["loss_mask"], actions & known & fresh)
    assert row["bootstrap"].sum() == (source.truncated and truncation == "bootstrap")
    assert (row["discounts"] == 0).sum() == 1
  used = batch.segment_ids > 0
  assert used.sum() == sum(len(t.tokens) for t in flat) == metrics["batch/tokens"]
  for name in ("tokens", "positions", "action_mask", "rewards", "discounts", "bootstrap"):
    assert not getattr(batch, name)[~used].any(), name
  assert batch.num_actions.sum() == batch.action_mask.sum()
  np.testing.assert_allclose(batch.returns.sum(), batch.rewards.sum(), atol=1e-5)
  assert metrics["staleness/trained_max"] <= bound


def test_rows_that_only_the_first_with_room_fills():
  # 4 + 4 | 3 + 3 + 2 into rows of 8: the emptiest row takes 4 | 4, 3, then 3 and has no room for 2.
  sizes = (4, 4, 3, 3, 2)
  rows = [episode(trajectory("p" + "a" * (n - 1)), serial=i) for i, n in enumerate(sizes)]
  batch, _ = pack(rows, NOW, config(batch_size=5, packing=PackingConfig(rows=2)))
  assert batch.tokens.shape == (2, 8)
  assert [len(segment["tokens"]) for segment in unpack(batch)] == list(sizes)
