"""What task files and graders both read out of LaTeX."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s${}]+)")


def last_boxed(text: str) -> str | None:
  r"""The content of the last ``\boxed{…}`` (``\fbox{…}``, ``\boxed 5``), braces balanced.

  None where there is none, or where its braces never close.
  """
  boxes = list(_BOX.finditer(text))
  if not boxes:
    return None
  if (bare := boxes[-1]["bare"]) is not None:
    return bare
  start, depth = boxes[-1].end(), 0
  for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
    depth += 1 if brace[0] == "{" else -1
    if depth == 0:
      return text[start + 1 : start + brace.start()].strip()
  return None
