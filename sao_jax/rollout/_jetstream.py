"""The door to google-jetstream 0.2.2: the only module that imports it.

PyPI's 0.2.2 is the last release (upstream is archived), so the version is checked exactly and three
obstacles are removed here, without touching the installed files:

1. ``token_utils`` imports ``seqio.vocabularies`` (and with it TensorFlow) for two names that only
   users of its own SentencePiece tokenizer need.  A stand-in is lent to the import machinery while
   JetStream is imported and taken away again; it resolves to the real seqio when it is called.
2. Importing the orchestrator sets the root logger to DEBUG, adds a handler to it, and then logs two
   lines per decode step through it.  The root logger is put back and the lines go to the logger
   named ``jetstream``.
3. ``orchestrator.delete_pytree`` calls ``jax.tree_map``, which JAX removed: the first request would
   end the process.
"""

import contextlib
import importlib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

JETSTREAM_VERSION = "0.2.2"


class _LentName:
  """Stands for a seqio class; calling it gives the real one, or a clear ImportError."""

  def __init__(self, name: str) -> None:
    self._name = name

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    try:
      real = getattr(importlib.import_module("seqio.vocabularies"), self._name)
    except ImportError as error:
      raise ImportError(
        f"JetStream asked for seqio's {self._name}: install seqio (it brings TensorFlow) to use "
        "JetStream's own SentencePiece tokenizer; sao_jax itself speaks token ids"
      ) from error
    return real(*args, **kwargs)


@contextlib.contextmanager
def _lent_seqio() -> Iterator[None]:
  if "seqio" in sys.modules:
    yield
    return
  package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
  vocabularies.Vocabulary = type("Vocabulary", (), {})  # type: ignore[attr-defined]
  vocabularies.SentencePieceVocabulary = _LentName(  # type: ignore[attr-defined]
    "SentencePieceVocabulary"
  )
  package.vocabularies = vocabularies  # type: ignore[attr-defined]
  package.__path__ = []
  lent = {"seqio": package, "seqio.vocabularies": vocabularies}
  sys.modules.update(lent)
  try:
    yield
  finally:
    for name in lent:
      sys.modules.pop(name, None)


@contextlib.contextmanager
def _kept_root_logger() -> Iterator[None]:
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  try:
    yield
  finally:
    root.setLevel(level)
    for handler in list(root.handlers):
      if handler not in handlers:
        root.removeHandler(handler)


def _delete_pytree(tree: Any) -> None:
  for leaf in jax.tree_util.tree_leaves(tree):
    if isinstance(leaf, jax.Array) and not leaf.is_deleted():
      leaf.delete()


def _load() -> None:
  try:
    found = importlib.metadata.version("google-jetstream")
  except importlib.metadata.PackageNotFoundError as error:
    raise ImportError(
      f"the rollout engine needs google-jetstream=={JETSTREAM_VERSION} (the PyPI name `jetstream` "
      "is another project)"
    ) from error
  if found != JETSTREAM_VERSION:
    raise ImportError(
      f"google-jetstream {found} is installed, but sao_jax.rollout subclasses the internals of "
      f"{JETSTREAM_VERSION}: pip install google-jetstream=={JETSTREAM_VERSION}"
    )
  with _lent_seqio(), _kept_root_logger():
    importlib.import_module("jetstream.core.orchestrator")
    importlib.import_module("jetstream.core.server_lib")
  loaded = sys.modules["jetstream.core.orchestrator"]
  loaded.delete_pytree = _delete_pytree  # type: ignore[attr-defined]
  # The module-level logging functions would log to the root logger, and give it a handler.
  loaded.logging = logging.getLogger("jetstream")  # type: ignore[attr-defined]


_load()

from jetstream.core import orchestrator, server_lib  # noqa: E402
from jetstream.core.metrics.prometheus import JetstreamMetricsCollector  # noqa: E402
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # noqa: E402
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2  # noqa: E402

__all__ = [
  "JetstreamMetricsCollector",
  "engine_api",
  "jetstream_pb2",
  "jetstream_pb2_grpc",
  "orchestrator",
  "server_lib",
  "tokenizer_api",
  "tokenizer_pb2",
]
