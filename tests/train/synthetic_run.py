"""A run folder as ``sao-jax train`` writes it, made up: realistic numbers, in a second.

    write_run(folder, steps=1000, trajectories=200)

Some numbers are null, as the writer puts for what is not finite; one trajectory is hostile.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]
# What a model may write: markup, line separators, half a surrogate pair, reversed text, a NUL.
HOSTILE = (
  *("</script>", "<script>", "document.title='taken'", "</script>", "<img src=x onerror=alert(1)>"),
  *("<!--", "\u2028", "\u2029", "\ud800", "\u202e", "abc", "\x00", "🦜", "", "\t", "  ", "&lt;"),
)
WORDS = " the sum of 12 and 31 is so we get * ( ) + 4 7 then 19 . \n result = first add".split(" ")


def write_run(
  folder: Path,
  *,
  steps: int = 200,
  trajectories: int = 40,
  seed: int = 0,
  name: str = "synthetic",
  gain: float = 0.5,
  corpus: int = 1024,
  resumes: tuple[int, ...] = (),
  config: Mapping[str, Any] | None = None,
  without: tuple[str, ...] = (),
) -> Path:
  """Writes the folder and returns it.

  Args:
    steps: RL steps, of 64 episodes each.
    trajectories: how many are stored, evenly over the steps.
    gain: how much training lifts the reward.
    corpus: trajectories that value pretraining saw.
    resumes: steps after which the run was killed and went on.
    config: settings beyond the usual ones, by dotted path.
    without: files and folders to leave out again, as of a run that never wrote them.
  """
  rng = np.random.default_rng(seed)
  folder.mkdir(parents=True, exist_ok=True)
  rows = [rl_row(rng, step, steps, gain) for step in range(1, steps + 1)]
  summaries = [evaluation(rng, step, steps, gain) for step in range(0, steps + 1, steps // 10 or 1)]
  write_lines(folder / "metrics.jsonl", with_evaluations(rows, summaries))
  write_lines(folder / "timeline.jsonl", timeline(rng, rows))
  write_lines(folder / "episodes.jsonl", (e for row in rows for e in episodes(rng, row)))
  stored = np.linspace(1, steps, trajectories).astype(int).tolist() if trajectories else []
  write_lines(folder / "trajectories.jsonl", (trajectory(rng, i, s) for i, s in enumerate(stored)))
  for summary in summaries:
    write_json(folder / "evaluations" / f"step-{summary['step']:06d}.json", summary)
  write_json(folder / "results.json", results(summaries))
  write_stages(rng, folder, corpus)
  starts = [0, *resumes]
  write_json(
    folder / "run.json",
    {
      "name": name,
      "config": settings(name, seed, steps) | dict(config or {}),
      "versions": {"sao_jax": "0.2.0", "jax": "0.10.2", "python": "3.12.4"},
      "incarnations": [
        {"incarnation": i, "started": f"2025-03-0{1 + i}T09:00:00+00:00", "step": step}
        for i, step in enumerate(starts)
      ],
    },
  )
  for path in without:
    remove(folder / path)
  return folder


def settings(name: str, seed: int, steps: int) -> Json:
  return {
    "name": name,
    "seed": seed,
    "num_steps": steps,
    "batch_size": 64,
    "rollout.max_staleness": 2,
    "loss.name": "dis",
    "loss.eps_low": 0.3,
    "loss.eps_high": 5.0,
    "policy.lr": 3e-4,
    "policy.clip_norm": 1.0,
    "critic.lr": 1e-3,
    "critic.clip_norm": 1.0,
    "critic.trainable": [r"ffn/(w_gate_up|w_down)", "value_head"],
  }


def level(step: float, steps: int, gain: float) -> float:
  """Expected reward at a step: an S-curve from 0.35."""
  return 0.35 + gain / (1 + np.exp(-10 * (step / steps - 0.4)))


def rl_row(rng: np.random.Generator, step: int, steps: int, gain: float) -> Json:
  done = step / steps
  noise = rng.normal
  shares = rng.dirichlet([2 + 3 * (1 - done), 4, 6 * done + 0.5, 0.2])
  actions = 40 + 60 * done + 4 * noise()
  tokens = int(64 * actions)
  stale = np.exp(np.abs(noise(size=3)) * [0.4, 0.02, 0.5])
  fresh_gap = abs(noise()) * 2e-4
  bad = rng.random() < 0.01
  return {
    "step": step,
    "time/elapsed": round(70 + 0.8 * step + 0.02 * noise(), 3),
    "episode/reward": float(np.clip(level(step, steps, gain) + 0.06 * noise(), 0, 1)),
    "episode/actions": actions,
    "episode/turns": 1 + done + 0.05 * noise(),
    "episode/calls": done + 0.05 * abs(noise()),
    "episode/answered": 0.98,
    "episode/truncated_share": max(0.0, 0.05 - 0.04 * done + 0.01 * noise()),
    "staleness/histogram": rng.multinomial(tokens, shares[:3] / shares[:3].sum()).tolist(),
    "staleness/mean": float(shares @ np.arange(4)),
    "staleness/max": 3.0,
    "staleness/trained_max": 2.0,
    "staleness/masked_share": float(shares[3]) / 3,
    "staleness/mixed_versions": 0.3 + 0.05 * noise(),
    "loss/masked": 0.012,
    "loss/masked_low": 0.01 * abs(noise()),
    "loss/masked_high": 0.002 * abs(noise()),
    "ratio/q01_fresh": 1 - 3 * fresh_gap,
    "ratio/q50_fresh": 1.0,
    "ratio/q99_fresh": 1 + 3 * fresh_gap,
    "ratio/q01_stale": None if shares[1:].sum() < 0.2 else 1 / stale[0],
    "ratio/q50_stale": None if shares[1:].sum() < 0.2 else stale[1],
    "ratio/q99_stale": None if shares[1:].sum() < 0.2 else stale[2],
    "ratio/kl": 4e-4 * abs(noise()),
    "ratio/mean_gap_fresh": fresh_gap,
    "ratio/mean_gap_stale": 0.01 * abs(noise()),
    "ratio/max_gap": 0.6 * abs(noise()),
    "critic/explained_variance": 0.6 - 0.3 * done + 0.12 * noise(),
    "critic/fit_variance": 0.65 - 0.3 * done + 0.12 * noise(),
    "critic/loss": 0.1 * np.exp(-done) + 0.01 * abs(noise()),
    "critic/grad_norm": None if bad else 0.3 * np.exp(0.5 * noise()),
    "critic/nonfinite": float(bad),
    "critic/skipped": float(bad),
    "policy/loss": -0.05 + 0.02 * noise(),
    "policy/grad_norm": 0.4 * np.exp(0.4 * noise()) * (30 if rng.random() < 0.004 else 1),
    "policy/nonfinite": 0.0,
    "policy/skipped": 0.0,
    "policy/entropy": 0.5 * np.exp(-1.5 * done) + 0.02 * abs(noise()),
    "policy/learning_rate": 3e-4 * min(1, step / 5),
    **{f"queue/wasted_token_share_q{q}": q * q * 2e-3 * abs(noise()) for q in (1, 2, 3, 4)},
    "queue/wait_mean": 0.5 + 0.1 * noise(),
    "queue/wait_max": 0.9 + 0.1 * abs(noise()),
    "time/step": 0.8,
    "time/wait": 0.1 * abs(noise()),
    "time/trainer_busy": 0.85 + 0.05 * noise(),
    "time/engine_busy": 0.65 + 0.05 * noise(),
    "throughput/tokens_per_second": tokens / 0.8,
    "accounting/started": 64 * step + 130 + step // 4 + step // 50,
    "accounting/trained": 64 * step,
    "accounting/dropped": step // 4,
    "accounting/dropped/stale": step // 4 - step // 9,
    "accounting/dropped/group_incomplete": step // 9,
    "accounting/failed": step // 50,
    "accounting/failed/EnvFailure": step // 50,
    "accounting/queued": 66,
    "accounting/running": 64,
    "accounting/in_training": 0,
  }


def evaluation(rng: np.random.Generator, step: int, steps: int, gain: float) -> Json:
  def one(k: int, bonus: float) -> Json:
    mean = float(np.clip(level(step, steps, gain) + bonus + 0.01 * rng.normal(), 0, 1))
    passes = {str(n): 1 - (1 - mean) ** (1 + 0.5 * np.log2(n)) for n in (1, 2, 4, 8, 16) if n <= k}
    return {
      "k": k,
      "problems": 256,
      "avg": mean,
      "avg_low": mean - 0.05,
      "avg_high": mean + 0.05,
      "pass": passes,
      "pass_low": {n: p - 0.04 for n, p in passes.items()},
      "pass_high": {n: min(p + 0.04, 1.0) for n, p in passes.items()},
    }

  return {"step": step, "sampled": one(16, 0.0), "greedy": one(1, 0.08)}


def with_evaluations(rows: list[Json], summaries: list[Json]) -> list[Json]:
  """The rows, with the held-out rewards on their steps' lines."""
  by_step = {s["step"]: s for s in summaries}
  return [
    row
    | (
      {f"eval/{kind}": by_step[row["step"]][kind]["avg"] for kind in ("sampled", "greedy")}
      if row["step"] in by_step
      else {}
    )
    for row in [{"step": 0, "time/elapsed": 70.0}, *rows]
  ]


def results(summaries: list[Json]) -> Json:
  numbers: Json = {"problems": 256.0}
  for kind in ("sampled", "greedy"):
    before, after = summaries[0][kind]["avg"], summaries[-1][kind]["avg"]
    gain = after - before
    numbers |= {f"{kind}/before": before, f"{kind}/after": after, f"{kind}/gain": gain}
    numbers |= {f"{kind}/gain_low": gain - 0.06, f"{kind}/gain_high": gain + 0.06}
  return numbers


def timeline(rng: np.random.Generator, rows: list[Json]) -> Iterable[Json]:
  now = 70.0
  for row in rows:
    wait, train = 0.02 + 0.1 * abs(rng.normal()), 0.6 + 0.05 * rng.normal()
    trainer = [["wait", now, now + wait], ["train", now + wait, now + wait + train]]
    end = now + wait + train
    if row["step"] % 20 == 0:
      trainer.append(["checkpoint", end, end + 0.1])
      end += 0.1
    if row["step"] % 100 == 0:
      trainer.append(["evaluate", end, end + 2.0])
      end += 2.0
    cuts = np.sort(rng.uniform(now, end, 6)).round(4)
    yield {"step": row["step"], "trainer": trainer, "engine": cuts.reshape(3, 2).tolist()}
    now = end + 0.01


def episodes(rng: np.random.Generator, row: Json) -> Iterable[Json]:
  lengths = rng.lognormal(np.log(row["episode/actions"]), 0.5, 64).astype(int) + 1
  for i, actions in enumerate(lengths.tolist()):
    yield {
      "step": row["step"],
      "id": f"task-{rng.integers(1e6)}",
      "serial": row["step"] * 64 + i,
      "sample": 0,
      "attempt": 0,
      "reward": float(rng.random() < row["episode/reward"]),
      "actions": actions,
      "tokens": actions + 20,
      "turns": 2,
      "status": "truncated" if actions > 400 else "done",
      "version_min": max(row["step"] - 3, 0),
      "version_max": row["step"] - 1,
    }


def trajectory(rng: np.random.Generator, index: int, step: int) -> Json:
  """Prompt, action, tool output, action; the versions rise on the way."""
  counts = [40, int(rng.integers(60, 300)), 8, int(rng.integers(20, 120))]
  kind = "".join(k * n for k, n in zip("paoa", counts, strict=True))
  spaced = [w if w == "\n" else f" {w}" for w in rng.choice(WORDS, len(kind))]
  if index == 1:
    spaced[40 : 40 + len(HOSTILE)] = HOSTILE
  oldest, switch = max(step - 1 - int(rng.integers(0, 4)), 0), int(rng.integers(60, 200))
  versions = [min(oldest + (i > switch), step - 1) for i in range(len(kind))]
  stale = np.array([step - 1 - v for v in versions])
  action = np.array([k == "a" for k in kind])

  def column(values: np.ndarray) -> list[float | None]:
    return [round(float(v), 6) if a else None for v, a in zip(values, action, strict=True)]

  n = len(kind)
  reward = float(rng.random() < 0.6)
  value = 1 / (1 + np.exp(-np.cumsum(rng.normal((reward - 0.5) * 0.02, 0.12, n))))
  log_ratio = rng.normal(0, 1e-5, n) + stale * rng.standard_t(2, n) * 0.03
  return {
    "step": step,
    "version": step - 1,
    "episode_id": f"e{index}",
    "task_id": f"arithmetic/{int(rng.integers(1e6))}",
    "segment": 0,
    "reward": reward,
    "status": "truncated" if index % 17 == 3 else "done",
    "pieces": spaced,
    "kind": kind,
    "policy_version": [v if a else None for v, a in zip(versions, action, strict=True)],
    "logprob": column(-rng.exponential(0.4, n)),
    "log_ratio": column(log_ratio),
    "advantage": column(reward - value),
    "value": column(value),
  }


def write_stages(rng: np.random.Generator, folder: Path, corpus: int) -> None:
  write_lines(
    folder / "sft" / "metrics.jsonl",
    (
      {"step": i, "sft/loss": 0.2 + 2.5 * np.exp(-i / 40) + 0.03 * rng.normal(), "sft/grad_norm": 1}
      for i in range(1, 281)
    ),
  )
  final = 0.75 * (1 - np.exp(-corpus / 900))
  updates, epoch = range(1, 57), 14
  write_lines(
    folder / "value" / "metrics.jsonl",
    (
      {"step": i, "critic/loss": 0.05 + 0.2 * np.exp(-i / 15) + 0.01 * rng.random()}
      | ({"value/held_out_explained_variance": final * i / 56} if i % epoch == 0 else {})
      for i in updates
    ),
  )
  write_json(
    folder / "value" / "result.json",
    {"corpus": corpus, "held_out": 128, "explained_variance": final, "source": "rollouts"},
  )


def write_lines(path: Path, rows: Iterable[Json]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, value: Json) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def remove(path: Path) -> None:
  if path.is_dir():
    for child in path.iterdir():
      remove(child)
    path.rmdir()
  else:
    path.unlink()
