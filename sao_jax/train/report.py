"""The run report: one self-contained HTML page from the folders of one or more runs.

``report_page.html`` is the page: style, charts and the trajectory viewer, drawn in the browser from
one embedded JSON blob, without network.  Here the folders are read into that blob:

==========================  ========================================================================
``run.json``                name, configuration, versions, incarnations
``metrics.jsonl``           curves; likewise ``sft/metrics.jsonl`` and ``value/metrics.jsonl``
``value/result.json``       held-out explained variance and the size of its corpus
``evaluations/step-*.json`` held-out reward with intervals, pass@k
``results.json``            held-out reward before and after
``episodes.jsonl``          quantiles of the response length
``timeline.jsonl``          what trainer and engine did when: the last steps, and shares of them all
``trajectories.jsonl``      the viewer's
==========================  ========================================================================

Whatever is missing is left out, and the page says so; rows and values of another form than a run
writes, as a crash or an edit may leave them, are passed over.  The page's size is bounded: curves have at most
``MAX_POINTS`` points of six digits, trajectories at most ``TRAJECTORY_BYTES`` together.
"""

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.config import Config, ConfigError
from sao_jax.loader import leaves

Json = dict[str, Any]

MAX_POINTS = 4000  # of a curve; longer runs are averaged over consecutive steps
MAX_BANDS = 8  # staleness of this and more shares one band
MAX_SPANS = 6000  # of the timeline: the last steps that have no more
TRAJECTORY_BYTES = 11_000_000  # of all runs together
MAX_DEPTH = 12  # of objects inside objects
UNIT = 10_000  # numbers of tokens are embedded as integers: value · UNIT
PLACE = "@@DATA@@"
TITLE = "@@TITLE@@"


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
  """Writes the page of one run, or of several laid over each other; returns its path.

  Args:
    runs: run folders; the first is the one that the others are compared with.
    out: the file; default: ``report.html`` in the first run's folder.

  Raises:
    ConfigError: no folder, or one that holds no run; a file that cannot be written.
  """
  if not runs:
    raise ConfigError("report: name at least one run folder, such as runs/quickstart")
  folders = [Path(run) for run in runs]
  for folder in folders:
    require_run(folder)
  path = Path(out) if out is not None else folders[0] / "report.html"
  if path.is_dir():
    raise ConfigError(
      f"report: {path} is a folder, and the page is a file: name one, such as "
      f"--out={path / 'report.html'}"
    )
  read = [read_run(folder, TRAJECTORY_BYTES // len(folders)) for folder in folders]
  tell_apart(read, folders)
  write_page(path, page({"unit": UNIT, "runs": read}))
  return path


def write_page(path: Path, text: str) -> None:
  """Writes the file as a whole or not at all; ConfigError where it cannot be written."""
  temporary = path.with_name(path.name + ".tmp")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      temporary.write_text(text, encoding="utf-8")
      temporary.replace(path)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise
  except OSError as error:
    raise ConfigError(
      f"report: {path} cannot be written: {error.strerror}; name another file with --out=FILE"
    ) from None


def require_run(folder: Path) -> None:
  """Raises ConfigError unless the folder holds something that a run wrote."""
  if not folder.is_dir():
    raise ConfigError(f"report: {folder}: no such folder; name the folder of a run")
  traces = ("run.json", "metrics.jsonl", "sft/metrics.jsonl", "value/metrics.jsonl")
  if not any((folder / name).is_file() for name in traces):
    found = sorted(p.parent.name for p in folder.glob("*/metrics.jsonl"))
    hint = f"; runs in it: {', '.join(found[:5])}" if found else ""
    raise ConfigError(
      f"report: {folder} is no run folder: it has neither run.json nor metrics.jsonl{hint}"
    )


def page(data: Json) -> str:
  """The template with title and data in their places."""
  template = Path(__file__).with_name("report_page.html").read_text(encoding="utf-8")
  head, tail = template.split(PLACE)
  title = html.escape(" · ".join(run["name"] for run in data["runs"]))
  return head.replace(TITLE, title) + embed(data) + tail


def embed(data: Any) -> str:
  """JSON that is safe inside <script>: text of a model may hold </script>, <!-- or half a pair.

  Such characters occur in strings only, where JSON may spell them as numbers.
  """
  text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
  return re.sub("[<\u2028\u2029\ud800-\udfff]", lambda c: f"\\u{ord(c[0]):04x}", text)


def tell_apart(read: list[Json], folders: list[Path]) -> None:
  """Runs of one name are named with their folders."""
  names = [run["name"] for run in read]
  for run, folder in zip(read, folders, strict=True):
    if names.count(run["name"]) > 1:
      run["name"] = str(folder)


def read_run(folder: Path, trajectory_bytes: int = TRAJECTORY_BYTES) -> Json:
  """Everything that the page shows of one run."""
  about = read_json(folder / "run.json")
  rows = by_step(lines(folder / "metrics.jsonl"))
  config = plain(mapping(about.get("config")))
  spans = by_step(lines(folder / "timeline.jsonl"))
  extra = lengths(folder / "episodes.jsonl")
  for step, shares in idle_shares(spans).items():
    extra.setdefault(step, {}).update(shares)
  rows = [row | extra.get(row["step"], {}) for row in rows]
  trajectories = read_trajectories(folder / "trajectories.jsonl", trajectory_bytes)
  return {
    "name": str(about.get("name") or folder.resolve().name),
    "config": config,
    "changed": changed(config),
    "versions": plain(mapping(about.get("versions"))),
    "incarnations": [plain(i) for i in items(about.get("incarnations")) if isinstance(i, dict)],
    "metrics": curves(rows),
    "sft": curves(by_step(lines(folder / "sft" / "metrics.jsonl"))),
    "value": curves(by_step(lines(folder / "value" / "metrics.jsonl"))),
    "value_result": plain(read_json(folder / "value" / "result.json")),
    "evaluations": read_evaluations(folder / "evaluations"),
    "results": plain(read_json(folder / "results.json")),
    "accounting": accounting(rows),
    "timeline": last_spans(spans),
    **trajectories,
  }


def lines(path: Path) -> Iterator[Json]:
  """The objects of a .jsonl; none if there is no file.  Lines cut short by a kill are passed over."""
  if not path.is_file():
    return
  with path.open(encoding="utf-8", errors="replace") as file:
    for line in file:
      try:
        row = json.loads(line)
      except (ValueError, RecursionError):
        continue
      if isinstance(row, dict):
        yield row


def read_json(path: Path) -> Json:
  """The object in the file; empty if there is none."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError):
    return {}
  return mapping(value)


def mapping(value: Any) -> Json:
  return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
  return value if isinstance(value, list) else []


def is_step(value: Any) -> bool:
  """A number of a step, which the browser can hold exactly."""
  return type(value) is int and abs(value) < 2**53


def finite(value: Any) -> float | None:
  """What is a finite number, as one; None for all else."""
  try:
    value = float(value) if isinstance(value, int | float) else math.nan
  except OverflowError:  # an integer of hundreds of digits
    return None
  return value if math.isfinite(value) else None


def by_step(rows: Iterator[Json]) -> list[Json]:
  """One row a step, in order: of steps that a resumed run did again, the later row."""
  found = {row["step"]: row for row in rows if is_step(row.get("step"))}
  return [found[step] for step in sorted(found)]


def number(value: Any, digits: int = 6) -> float | int | None:
  """To so many significant digits; None for what is no finite number."""
  if isinstance(value, bool) or is_step(value):
    return int(value)
  known = finite(value)
  return None if known is None else float(f"{known:.{digits}g}")


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
  """A JSON value without infinities and NaN, which JSON does not know: they become text.

  So do integers that no float holds; what lies deeper than ``depth`` becomes an ellipsis.
  """
  if isinstance(value, int | float) and finite(value) is None:
    return str(value) if isinstance(value, float) else "an integer beyond all floats"
  if isinstance(value, dict | list | tuple) and not depth:
    return "…"
  if isinstance(value, dict):
    return {str(key): plain(item, depth - 1) for key, item in value.items()}
  return [plain(i, depth - 1) for i in value] if isinstance(value, list | tuple) else value


def changed(config: Mapping[str, Any]) -> list[str]:
  """The settings that are not the defaults."""
  defaults = json.loads(json.dumps(dict(leaves(Config())), default=str))
  return [path for path, value in config.items() if path in defaults and defaults[path] != value]


def curves(rows: Sequence[Json]) -> Json:
  """Every number of the rows as a column, and the staleness histogram as shares of bands."""
  stride = math.ceil(len(rows) / MAX_POINTS)
  if stride > 1:
    rows = [averaged(rows[i : i + stride]) for i in range(0, len(rows), stride)]
  names = {
    name: None
    for row in rows
    for name, value in row.items()
    if name != "step" and isinstance(value, int | float)
  }
  series = {
    name: [number(row.get(name), 8 if name == "time/elapsed" else 6) for row in rows]
    for name in names
  }
  return {
    "step": [row["step"] for row in rows],
    "series": series,
    "histogram": [bands(row.get("staleness/histogram")) for row in rows],
    "stride": max(stride, 1),
  }


def averaged(rows: Sequence[Json]) -> Json:
  """One row of several: means; sums of the histogram; the last step and time."""
  out: Json = {}
  for name in dict.fromkeys(name for row in rows for name in row):
    if name == "staleness/histogram":
      known = filter(None, (padded(row.get(name)) for row in rows))
      out[name] = [sum(counts) for counts in zip(*known, strict=True)]
    elif name == "step":
      out[name] = rows[-1][name]
    elif values := [v for row in rows if (v := finite(row.get(name))) is not None]:
      out[name] = values[-1] if name == "time/elapsed" else float(np.mean(values))
  return out


def padded(histogram: Any) -> list[float] | None:
  """MAX_BANDS counts, the last of which is of that staleness and more; None for no histogram."""
  found = [finite(n or 0) for n in items(histogram)]
  counts = [n for n in found if n is not None and n >= 0]
  if len(counts) < len(found):
    return None
  counts += [0.0] * (MAX_BANDS - len(counts))
  return [*counts[: MAX_BANDS - 1], sum(counts[MAX_BANDS - 1 :])]


def bands(histogram: Any) -> list[float] | None:
  """Shares by staleness 0, 1, …, without the empty bands at the end."""
  counts = padded(histogram)
  if not counts or not (total := finite(sum(counts))):
    return None
  shares = [round(n / total, 3) for n in counts]
  while shares[-1] == 0 and len(shares) > 1:
    shares.pop()
  return shares


def accounting(rows: Sequence[Json]) -> Json:
  """Where every started episode was when the run was last heard of."""
  for row in reversed(rows):
    if "accounting/started" in row:
      start = "accounting/"
      return {k.removeprefix(start): number(v) for k, v in row.items() if k.startswith(start)}
  return {}


def lengths(path: Path) -> dict[int, Json]:
  """Quantiles of the sampled tokens of an episode, by step."""
  found: dict[int, list[float]] = {}
  for row in lines(path):
    actions = finite(row.get("actions"))
    if actions is not None and is_step(row.get("step")):
      found.setdefault(row["step"], []).append(actions)
  names = {f"episode/actions_q{q}": q for q in (10, 50, 90)}
  return {
    step: dict(zip(names, np.percentile(counts, list(names.values())).tolist(), strict=True))
    for step, counts in found.items()
  }


def read_evaluations(folder: Path) -> list[Json]:
  found = [read_json(path) for path in sorted(folder.glob("step-*.json"))]
  return sorted((plain(e) for e in found if is_step(e.get("step"))), key=lambda e: e["step"])


def idle_shares(timeline: Sequence[Json]) -> dict[int, Json]:
  """Shares of each step's wall time: the trainer's by kind, the engine's idle time.

  A step lasts from the end of the step before to its own end; the engine's spans are cut there.
  """
  spans = sorted(span for row in timeline for span in engine_spans(row))
  edges = np.array([0.0, *(t for span in spans for t in span)])
  edges = np.maximum.accumulate(edges)  # spans that overlap count once
  busy = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2))])
  out: dict[int, Json] = {}
  start: float | None = None
  for row in timeline:
    trainer = trainer_spans(row)
    if not trainer:
      continue
    begin = trainer[0][1] if start is None else start
    start = end = max(span[2] for span in trainer)
    if end <= begin:
      continue
    shares: Json = {}
    for kind, t0, t1 in trainer:
      name = f"timeline/trainer_{kind}"
      shares[name] = shares.get(name, 0.0) + (t1 - t0) / (end - begin)
    if spans:
      worked = float(np.diff(np.interp([begin, end], edges, busy))[0])
      shares["timeline/engine_idle"] = 1 - worked / (end - begin)
    out[row["step"]] = shares
  return out


def trainer_spans(row: Json) -> list[tuple[str, float, float]]:
  found = [
    (s[0], span(s[1:])) for s in items(row.get("trainer")) if isinstance(s, list) and len(s) == 3
  ]
  return [(kind, *times) for kind, times in found if isinstance(kind, str) and times]


def engine_spans(row: Json) -> list[tuple[float, float]]:
  return [times for s in items(row.get("engine")) if (times := span(s))]


def span(value: Any) -> tuple[float, float] | None:
  """Start and end; None for what is no span."""
  t0, t1 = map(finite, value) if isinstance(value, list) and len(value) == 2 else (None, None)
  return None if t0 is None or t1 is None or t0 > t1 else (t0, t1)


def last_spans(timeline: Sequence[Json]) -> list[Json]:
  """The newest steps of the timeline; busy spans of the engine that all but touch are one."""
  out: list[Json] = []
  count = 0
  for row in reversed(timeline):
    trainer = trainer_spans(row)
    length = max((t1 for _, _, t1 in trainer), default=0) - min(
      (t0 for _, t0, _ in trainer), default=0
    )
    engine = joined(engine_spans(row), gap=length / 300)
    count += len(trainer) + len(engine)
    if count > MAX_SPANS:
      break
    out.append(
      {
        "step": row["step"],
        "trainer": [[kind, round(t0, 4), round(t1, 4)] for kind, t0, t1 in trainer],
        "engine": [[round(t0, 4), round(t1, 4)] for t0, t1 in engine],
      }
    )
  return out[::-1]


def joined(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
  out: list[tuple[float, float]] = []
  for t0, t1 in sorted(spans):
    if out and t0 - out[-1][1] <= gap:
      out[-1] = out[-1][0], max(t1, out[-1][1])
    else:
      out.append((t0, t1))
  return out


def read_trajectories(path: Path, most_bytes: int) -> Json:
  """The stored ones; where not all fit, evenly over the run, with the counts that say so."""
  found: dict[tuple, Json] = {}
  sizes: dict[tuple, int] = {}
  unread = 0
  for row in lines(path):
    key = row.get("step"), row.get("episode_id"), row.get("segment")
    try:
      found[key] = compact(row)
    except (TypeError, ValueError, LookupError, OverflowError):
      unread += 1
      continue
    sizes[key] = len(json.dumps(found[key], ensure_ascii=False).encode("utf-8", "replace"))
  keys = sorted(found, key=lambda key: key[0])
  kept = keys
  while sum(sizes[key] for key in kept) > most_bytes and len(kept) > 1:
    kept = [keys[i] for i in np.linspace(0, len(keys) - 1, len(kept) * 9 // 10).astype(int)]
  return {
    "trajectories": [found[key] for key in kept],
    "trajectories_stored": len(keys),
    "trajectories_unread": unread,
  }


def compact(row: Json) -> Json:
  """A stored trajectory with its numbers at the action tokens only, as integers."""
  kind = row["kind"]
  if len(kind) != len(row["pieces"]) or not is_step(row["step"]):
    raise ValueError(f"{len(row['pieces'])} pieces, {len(kind)} kinds, step {row['step']!r}")
  actions = [i for i, k in enumerate(kind) if k == "a"]

  def column(name: str, unit: int) -> list[int | None] | None:
    values = row.get(name)
    if not values:
      return None
    chosen = [values[i] for i in actions]
    return [round(v * unit) if v is not None and math.isfinite(v) else None for v in chosen]

  names = ("step", "version", "episode_id", "task_id", "segment", "status")
  out = {name: plain(row.get(name)) for name in names}
  out |= {"reward": number(row.get("reward")), "pieces": [str(p) for p in row["pieces"]]}
  out |= {"kind": runs_of(kind), "policy_version": column("policy_version", 1)}
  for name in ("logprob", "log_ratio", "advantage", "value"):
    out[name] = column(name, UNIT)
  return out


def runs_of(kind: str) -> list[list[Any]]:
  """``"ppao"`` → ``[["p", 2], ["a", 1], ["o", 1]]``."""
  return [[match[1], len(match[0])] for match in re.finditer(r"(?s)(.)\1*", kind)]
