"""The safetensors format: a JSON header, then the tensors' bytes.

A file is: the header's length (8 bytes, little-endian), the header {name: {"dtype", "shape",
"data_offsets"}}, the bytes of all tensors in row-major order, little-endian, without gaps.  Written
here, because that is all there is to it: a tensor is made contiguous only while it is written, and
bfloat16 needs no second library.
"""

import json
import math
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

_DTYPES: dict[str, np.dtype] = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes float32, float16 or bfloat16 tensors.

  ``format: pt`` in the header says that shapes are torch's.  Raises ValueError for other dtypes.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, tensor in tensors.items():
    if tensor.dtype not in _NAMES:
      raise ValueError(f"{name} has dtype {tensor.dtype}; known: {', '.join(map(str, _NAMES))}")
    start, end = end, end + tensor.nbytes
    header[name] = {
      "dtype": _NAMES[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [start, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # the data starts aligned, for readers that map the file
  with path.open("wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
      file.write(np.ascontiguousarray(tensor).view(np.uint8).data)


class SafetensorsFile(Mapping[str, np.ndarray]):
  """A file as a mapping tensor name → array, read when it is asked for.

  Raises ValueError for a file that is cut short, and for a tensor that is not of a float type which
  models have.
  """

  def __init__(self, path: str | pathlib.Path) -> None:
    self.path = pathlib.Path(path)
    size = self.path.stat().st_size
    with self.path.open("rb") as file:
      try:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, size)))
      except (struct.error, ValueError) as error:
        raise ValueError(
          f"{self.path} ({size} bytes) is cut short, or no safetensors file"
        ) from error
    self.metadata: dict[str, str] = header.pop("__metadata__", {})
    self._start, self._tensors = 8 + length, header
    end = self._start + max((t["data_offsets"][1] for t in header.values()), default=0)
    if end != size:
      raise ValueError(f"{self.path} has {size} bytes, but its header describes {end}")

  def __getitem__(self, name: str) -> Shaped[np.ndarray, "..."]:
    entry = self._tensors[name]
    if entry["dtype"] not in _DTYPES:
      raise ValueError(
        f"{self.path.name}: {name} has dtype {entry['dtype']}; known: {', '.join(_DTYPES)}"
      )
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    offset = self._start + entry["data_offsets"][0]
    return np.fromfile(self.path, dtype, math.prod(shape), offset=offset).reshape(shape)

  def __iter__(self) -> Iterator[str]:
    return iter(self._tensors)

  def __len__(self) -> int:
    return len(self._tensors)

  def __contains__(self, name: object) -> bool:  # without reading
    return name in self._tensors
