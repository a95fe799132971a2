"""The run report: it reads what is there, embeds it safely, stays small, and opens in a browser."""

import functools
import html.parser
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from sao_jax.config import ConfigError
from sao_jax.train import report
from sao_jax.train.report import write_report
from tests.train.synthetic_run import HOSTILE, write_json, write_lines, write_run

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
  return write_run(tmp_path_factory.mktemp("runs") / "demo", resumes=(80,), name="demo")


class Scripts(html.parser.HTMLParser):
  """What a browser takes for the contents of the page's script elements."""

  def __init__(self) -> None:
    super().__init__()
    self.found: list[str] = []
    self.inside = False

  def handle_starttag(self, tag, attrs):
    self.inside = tag == "script"
    if self.inside:
      self.found.append("")

  def handle_endtag(self, tag):
    self.inside = False

  def handle_data(self, data):
    if self.inside:
      self.found[-1] += data


def embedded(page: Path) -> dict:
  scripts = Scripts()
  scripts.feed(page.read_text(encoding="utf-8"))
  assert len(scripts.found) == 2  # the data and the program: no text of a model opened a third
  return json.loads(scripts.found[0], parse_constant=pytest.fail)


def test_a_page_lands_in_the_run_folder_with_everything_in_it(run):
  path = write_report([run])
  assert path == run / "report.html"
  (data,) = embedded(path)["runs"]
  assert data["name"] == "demo"
  assert data["metrics"]["step"] == list(range(201))
  assert data["metrics"]["series"]["episode/reward"][0] is None
  assert len(data["metrics"]["series"]["critic/explained_variance"]) == 201
  assert data["results"]["problems"] == 256
  assert [e["step"] for e in data["evaluations"]] == list(range(0, 201, 20))
  assert data["value_result"]["corpus"] == 1024
  assert len(data["sft"]["series"]["sft/loss"]) == 280
  assert data["accounting"]["failed/EnvFailure"] == 4
  assert len(data["trajectories"]) == data["trajectories_stored"] == 40
  assert "policy.lr" in data["changed"]
  assert "loss.name" not in data["changed"]


def test_nothing_is_loaded_from_anywhere(run):
  text = write_report([run]).read_text(encoding="utf-8")
  page = text[: text.index(' id="data"')] + text[text.index("</script>") :]
  assert "default-src 'none'" in page
  addresses = set(re.findall(r"\w+://[^\"'\s)]+", page))
  assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace, never fetched
  assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", page)


def test_hostile_text_comes_through_unharmed(run):
  path = write_report([run])
  text = path.read_text(encoding="utf-8")
  assert "</script><script>" not in text
  assert "\u2028" not in text
  pieces = embedded(path)["runs"][0]["trajectories"][1]["pieces"]
  assert pieces[40 : 40 + len(HOSTILE)] == list(HOSTILE)


def test_numbers_of_tokens_are_those_of_the_actions(run):
  stored = next(report.lines(run / "trajectories.jsonl"))
  data = embedded(write_report([run]))
  unit, got = data["unit"], data["runs"][0]["trajectories"][0]
  assert "".join(kind * n for kind, n in got["kind"]) == stored["kind"]
  actions = [i for i, kind in enumerate(stored["kind"]) if kind == "a"]
  assert got["policy_version"] == [stored["policy_version"][i] for i in actions]
  for name in ("logprob", "log_ratio", "advantage", "value"):
    wanted = [stored[name][i] for i in actions]
    assert [v / unit for v in got[name]] == pytest.approx(wanted, abs=0.5 / unit)


@pytest.mark.parametrize(
  "missing",
  [
    ("run.json",),
    ("metrics.jsonl", "episodes.jsonl"),
    ("evaluations", "results.json", "timeline.jsonl", "trajectories.jsonl", "episodes.jsonl"),
    ("sft", "value"),
  ],
)
def test_what_is_missing_is_left_out(tmp_path, missing):
  folder = write_run(tmp_path / "part", steps=5, trajectories=2, without=missing)
  (data,) = embedded(write_report([folder]))["runs"]
  assert data["name"] == ("part" if "run.json" in missing else "synthetic")
  assert bool(data["metrics"]["step"]) == ("metrics.jsonl" not in missing)
  assert bool(data["trajectories"]) == ("trajectories.jsonl" not in missing)


def test_older_runs_with_metrics_alone_are_shown(tmp_path):
  write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "episode/reward": 0.5}])
  (data,) = embedded(write_report([tmp_path]))["runs"]
  assert data["metrics"]["series"] == {"episode/reward": [0.5]}
  assert data["config"] == data["accounting"] == data["value_result"] == {}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r"absent: no such folder"):
    write_report([tmp_path / "absent"])
  write_run(tmp_path / "inner", steps=2, trajectories=0)
  with pytest.raises(ConfigError, match=r"neither run.json nor metrics.jsonl; runs in it: inner"):
    write_report([tmp_path])
  with pytest.raises(ConfigError, match="at least one run folder"):
    write_report([])
  assert not (tmp_path / "report.html").exists()


def test_runs_are_laid_over_each_other_under_names_of_their_own(tmp_path):
  folders = [write_run(tmp_path / n, steps=4, trajectories=1, name="same") for n in ("a", "b")]
  path = write_report(folders, tmp_path / "out" / "both.html")
  assert path == tmp_path / "out" / "both.html"
  assert [r["name"] for r in embedded(path)["runs"]] == [str(folder) for folder in folders]
  assert not (folders[0] / "report.html").exists()


def test_the_name_of_a_run_cannot_break_the_title(tmp_path):
  folder = write_run(tmp_path / "r", steps=2, trajectories=0, name="</title><script>x</script>")
  text = write_report([folder]).read_text(encoding="utf-8")
  assert "<title>&lt;/title&gt;&lt;script&gt;x&lt;/script&gt; · run report</title>" in text
  assert embedded(folder / "report.html")["runs"][0]["name"] == "</title><script>x</script>"


def test_torn_lines_and_steps_done_twice(tmp_path):
  path = tmp_path / "metrics.jsonl"
  rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 3.0}]
  write_lines(path, rows)
  path.write_text("[]\n" + path.read_text() + '{"step": 3, "a"')
  (data,) = embedded(write_report([tmp_path]))["runs"]
  assert data["metrics"]["step"] == [1, 2]
  assert data["metrics"]["series"]["a"] == [1.0, 3.0]


HUGE = 10**400
BROKEN = [float("nan"), float("-inf"), HUGE, None, "text", True, [], [None], {"a": {}}, 2**60]
SPANS = [["wait", 0], ["wait", None, 1], ["wait", float("nan"), 2], [3, 0, 1], "wait", None]
SPANS += [["wait", 2, 1], ["wait", HUGE, HUGE], ["wait", 0, 1, 2], {}, 5]


def append(path: Path, *rows) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a", encoding="utf-8") as file:
    file.writelines((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)


def write_broken(folder: Path) -> Path:
  """A run in every file of which rows and values are of another form than a run writes."""
  # One trajectory: Chromium cannot print half a pair, which the second one holds and would show.
  write_run(folder, steps=5, trajectories=1)
  good = next(report.lines(folder / "trajectories.jsonl"))
  rows = [{"step": 6 + i, "episode/reward": v} for i, v in enumerate(BROKEN)]
  rows += [{"step": 30 + i, "staleness/histogram": v} for i, v in enumerate(BROKEN)]
  rows += [{"step": 60 + i, "staleness/histogram": [1, v]} for i, v in enumerate(BROKEN)]
  rows += [{"step": 90, "staleness/histogram": [1e308, 1e308]}, {"step": 91} | {"loss/masked": "x"}]
  rows += [{"step": 92, "accounting/started": "x", "accounting/failed": [1]}]
  rows += [{"step": v} for v in BROKEN if v != 2**60]
  deep = "[" * 100_000
  append(folder / "metrics.jsonl", *rows, deep, '{"step": 93, "a": ' + deep, "\0\0\0", "null")
  for name in ("sft", "value"):
    append(folder / name / "metrics.jsonl", *rows, deep)
  spans = [{"step": 6, "trainer": SPANS, "engine": [s[1:] if s else s for s in SPANS[:5]]}]
  spans += [{"step": 7 + i, "trainer": v, "engine": v} for i, v in enumerate(BROKEN)]
  append(folder / "timeline.jsonl", *spans, {"step": 40, "engine": [[0.5, 0.75]]}, deep)
  append(folder / "episodes.jsonl", *({"step": 1, "actions": v} for v in BROKEN), deep)
  names = ("step", "version", "episode_id", "segment", "status", "reward", "pieces", "kind")
  bad = [good | {name: v} for name in (*names, "value", "advantage") for v in BROKEN]
  bad += [good | {"value": [v] * len(good["kind"])} for v in BROKEN]
  append(folder / "trajectories.jsonl", *bad, deep)
  for i, value in enumerate(BROKEN):
    write_json(
      folder / "evaluations" / f"step-{90 + i:06d}.json", {"step": 90 + i, "sampled": value}
    )
    entry = {"avg": value, "avg_low": value, "problems": value, "pass": value}
    write_json(folder / "evaluations" / f"step-{200 + i:06d}.json", {"step": 200, "sampled": entry})
  (folder / "evaluations" / "step-000300.json").write_text(deep)
  write_json(folder / "results.json", {"sampled/after": "x", "problems": [1], "greedy/after": HUGE})
  write_json(folder / "value" / "result.json", {"corpus": "x", "explained_variance": float("nan")})
  return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
  return write_broken(tmp_path_factory.mktemp("runs") / "broken")


def test_broken_rows_are_passed_over(broken):
  (data,) = embedded(write_report([broken]))["runs"]
  metrics = data["metrics"]
  assert metrics["step"][:6] == list(range(6))
  assert set(metrics["series"]["episode/reward"][6:]) == {None, 1, float(f"{2**60:.6g}")}
  shown = [h for h, step in zip(metrics["histogram"], metrics["step"], strict=True) if step >= 30]
  assert [h for h in shown if h] == [[1.0], [0.5, 0.5], [1.0], [0.0, 1.0]]
  assert next(row["trainer"] for row in data["timeline"] if row["step"] > 5) == []
  assert data["timeline"][-1] == {"step": 40, "trainer": [], "engine": [[0.5, 0.75]]}
  assert data["trajectories_unread"] > 20


def test_broken_rows_of_long_runs_are_averaged_over(broken, monkeypatch):
  monkeypatch.setattr(report, "MAX_POINTS", 10)
  (data,) = embedded(write_report([broken], broken / "short.html"))["runs"]
  assert data["metrics"]["stride"] > 1


@pytest.mark.parametrize("value", [*BROKEN, [[]], ["started"]])
def test_a_broken_run_json_is_left_out(tmp_path, value):
  keys = ("name", "config", "versions", "incarnations")
  write_json(tmp_path / "run.json", dict.fromkeys(keys, value))
  (data,) = embedded(write_report([tmp_path]))["runs"]
  assert isinstance(data["config"], dict)
  assert isinstance(data["versions"], dict)
  assert data["incarnations"] == []


def test_deep_values_are_cut():
  deep: list = []
  for _ in range(500):
    deep = [deep]
  assert json.dumps(report.plain(deep), ensure_ascii=False) == "[" * 12 + '"…"' + "]" * 12


def test_a_page_that_cannot_be_written_says_the_way_out(tmp_path, run):
  for out, reason in (
    (tmp_path, r"is a folder, and the page is a file: name one, such as --out=.*report\.html"),
    (run / "run.json" / "x.html", r"cannot be written: .*; name another file with --out=FILE"),
  ):
    with pytest.raises(ConfigError, match=reason):
      write_report([run], out)
  assert list(tmp_path.iterdir()) == []
  assert not list(tmp_path.parent.glob("*.tmp"))


def test_infinities_become_text_in_settings_and_nothing_in_curves(tmp_path):
  write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "a": float("inf")}, {"step": 2, "a": 1.0}])
  write_json(tmp_path / "run.json", {"config": {"critic.min_explained_variance": float("-inf")}})
  (data,) = embedded(write_report([tmp_path]))["runs"]
  assert data["metrics"]["series"]["a"] == [None, 1.0]
  assert data["config"] == {"critic.min_explained_variance": "-inf"}


def test_curves_of_long_runs_are_averaged(monkeypatch):
  monkeypatch.setattr(report, "MAX_POINTS", 50)
  rows = [{"step": i, "a": float(i), "staleness/histogram": [1] * (i % 3 + 1)} for i in range(101)]
  curves = report.curves(rows)
  assert curves["stride"] == 3
  assert curves["step"][:2] == [2, 5]
  assert curves["series"]["a"][:2] == [1.0, 4.0]
  assert curves["histogram"][0] == [0.5, 0.333, 0.167]


def test_staleness_beyond_the_bands_shares_the_last():
  assert report.bands([1] * 20) == [0.05] * 7 + [0.65]
  assert report.bands([0, 4, 0, 0]) == [0.0, 1.0]
  assert report.bands([0, 0]) is None
  assert report.bands(None) is None


def test_idle_shares_are_cut_at_the_ends_of_steps():
  timeline = [
    {"step": 1, "trainer": [["wait", 0, 1], ["train", 1, 4]], "engine": [[0, 2]]},
    {"step": 2, "trainer": [["train", 5, 8]], "engine": [[3, 6], [5, 7]]},
  ]
  shares = report.idle_shares(timeline)
  assert shares[1] == pytest.approx(
    {"timeline/trainer_wait": 1 / 4, "timeline/trainer_train": 3 / 4, "timeline/engine_idle": 1 / 4}
  )
  assert shares[2] == pytest.approx(
    {"timeline/trainer_train": 3 / 4, "timeline/engine_idle": 1 / 4}
  )


def test_timeline_keeps_the_last_steps_and_joins_what_touches(monkeypatch):
  monkeypatch.setattr(report, "MAX_SPANS", 7)
  row = {"trainer": [["train", 0, 1]], "engine": [[0, 0.5], [0.5001, 0.6], [0.8, 0.9]]}
  kept = report.last_spans([{"step": step} | row for step in range(5)])
  assert [r["step"] for r in kept] == [3, 4]
  assert kept[0]["engine"] == [[0, 0.6], [0.8, 0.9]]


def test_trajectories_that_do_not_fit_are_thinned_evenly(run):
  whole = report.read_trajectories(run / "trajectories.jsonl", 10**9)
  every = whole["trajectories"]
  size = sum(len(json.dumps(t)) for t in every)
  part = report.read_trajectories(run / "trajectories.jsonl", size // 2)
  some = part["trajectories"]
  assert whole["trajectories_stored"] == part["trajectories_stored"] == len(every) == 40
  assert 15 <= len(some) <= 22
  assert (some[0]["step"], some[-1]["step"]) == (every[0]["step"], every[-1]["step"])


def test_trajectories_of_another_shape_are_counted(tmp_path, run):
  good = next(report.lines(run / "trajectories.jsonl"))
  bad = [good | {"kind": "pa"}, good | {"step": None}, good | {"value": [0.5]}, {"step": 3}]
  write_lines(tmp_path / "t.jsonl", [good, *bad])
  read = report.read_trajectories(tmp_path / "t.jsonl", 10**9)
  assert (len(read["trajectories"]), read["trajectories_unread"]) == (1, 4)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("runs") / "large"
  write_run(folder, steps=1000, trajectories=200, resumes=(410,), name="large")
  return write_report([folder])


def test_a_thousand_steps_and_two_hundred_trajectories_stay_small(large):
  assert len(embedded(large)["runs"][0]["trajectories"]) == 200
  assert large.stat().st_size < 4e6  # 15 MB is the promise; real trajectories are longer


def browse(page: Path, *flags: str) -> tuple[str, str, float]:
  """(the elements after the scripts ran, the console, seconds) of Chromium."""
  with tempfile.TemporaryDirectory() as profile:
    command = [
      *(CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
      *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
      *("--disable-sync", f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0"),
      *(*flags, "--dump-dom", page.as_uri()),
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
  console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
  drawn = re.sub(r"(?s)<script.*?</script>", "", done.stdout)
  return drawn, "\n".join(console), time.monotonic() - began


def needs_browser(test):
  return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")(test))


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_draws_itself_without_errors(large, width):
  dom, console, _ = browse(large, f"--window-size={width},20000", "--virtual-time-budget=10000")
  assert console == ""
  assert 'data-ready="yes"' in dom
  count = functools.partial(lambda pattern: len(re.findall(pattern, dom)))
  assert count(r"<figure") >= 20
  assert count(r'role="option"') == 200
  assert count(r"<path") > 60
  assert count(r'class="tok[ "]') > 100
  assert "not recorded for" not in dom


@needs_browser
def test_the_page_opens_quickly(large):
  blank = large.with_name("blank.html")
  blank.write_text("<!doctype html><title>blank</title>")
  start = min(browse(blank)[2] for _ in range(2))
  assert min(browse(large)[2] for _ in range(2)) - start < 2.0


@needs_browser
def test_a_broken_run_draws_without_errors(broken):
  flags = ("--window-size=1280,20000", "--virtual-time-budget=10000")
  dom, console, _ = browse(write_report([broken]), *flags)
  assert console == ""
  assert 'data-ready="yes"' in dom


@needs_browser
def test_overlaid_and_bare_runs_draw_without_errors(tmp_path, run):
  other = write_run(tmp_path / "other", steps=30, seed=1, corpus=256, config={"policy.lr": 1e-3})
  bare = tmp_path / "bare"
  write_lines(bare / "metrics.jsonl", [{"step": 1, "episode/reward": None}])
  for runs in ([run, other, bare], [bare]):
    flags = ("--window-size=1280,20000", "--virtual-time-budget=10000")
    dom, console, _ = browse(write_report(runs, tmp_path / "page.html"), *flags)
    assert console == ""
    assert 'data-ready="yes"' in dom
    assert "Not recorded" in dom
    assert ("Explained variance against corpus" in dom) == (len(runs) > 1)
