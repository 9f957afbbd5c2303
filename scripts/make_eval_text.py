"""Write the texts that ``kvq eval`` scores, from files that dependencies of kvq carry.

Prose: ``apache-tvm-ffi`` has Newton's *Opticks* (4th edition, 1730; public domain; transcribed by
Distributed Proofreaders) as test data of a stack-trace library. Kept are the Queries that end the third Book
and the third Part of the second, one line a paragraph, without sidenotes, figures, tables, footnotes and the
transcribers' marks for italics. Code: Python and C++ of ``apache-tvm`` (Apache-2.0), file after file, the
licence header once::

    python scripts/make_eval_text.py python/kvq/eval/texts
"""

from __future__ import annotations

import argparse
import hashlib
import re
from importlib.metadata import files, version
from pathlib import Path

BOOK = "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
BOOK_SHA256 = "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd"
#: A text, the words it begins with and those that it ends before.
PROSE = {
    "opticks_queries.txt": ("_Query_ 1. Do not Bodies act upon Light", "FOOTNOTES:"),
    "opticks_fits.txt": ("I am now come to another part of this Design", "\n\n\nTHE\n\nSECOND BOOK"),
}

TVM = "0.27.0.post1"
CODE = (
    "tvm/relax/frontend/nn/core.py",
    "tvm/include/tvm/runtime/tensor.h",
    "tvm/runtime/vm.py",
    "tvm/include/tvm/runtime/vm/bytecode.h",
    "tvm/rpc/tracker.py",
    "tvm/include/tvm/runtime/device_api.h",
    "tvm/contrib/download.py",
    "tvm/src/runtime/cpu_device_api.cc",
)
_PY_HEADER = re.compile(r"\A(# Licensed to the Apache.*?# under the License\.\n)", re.DOTALL)
_CPP_HEADER = re.compile(r"\A/\*\n \* Licensed to the Apache.*?under the License\.\n \*/\n", re.DOTALL)


def main() -> None:
    """Parse the command line and write the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    raw = _packaged("apache-tvm-ffi", BOOK)
    if hashlib.sha256(raw).hexdigest() != BOOK_SHA256:
        raise SystemExit(f"{BOOK} is not the edition this script knows")
    if version("apache-tvm") != TVM:
        raise SystemExit(f"the code is that of apache-tvm {TVM}, not {version('apache-tvm')}")
    texts = {name: prose(raw.decode(), *limits) for name, limits in PROSE.items()}
    texts["tvm_code.txt"] = code([_packaged("apache-tvm", name).decode() for name in CODE])
    for name, text in texts.items():
        (args.directory / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode())} bytes, sha256 {hashlib.sha256(text.encode()).hexdigest()}")


def prose(book: str, first_words: str, end: str) -> str:
    """A stretch of the book, one line a paragraph."""
    part = book[book.index(first_words) :].split(end)[0]
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", part))
    kept = (part for part in paragraphs if part and part[0] != "[" and "--+--" not in part)
    return "\n".join(part.replace("_", "") for part in kept) + "\n"


def code(sources: list[str]) -> str:
    """Source files one after another; only the first keeps the licence header, which all of them share."""
    header = _PY_HEADER.match(sources[0])
    assert header is not None, "the first file begins with the licence header"
    bodies = [_CPP_HEADER.sub("", _PY_HEADER.sub("", source)).strip("\n") for source in sources]
    assert not any("Licensed to the Apache" in body for body in bodies), "a header of another form"
    return header[1] + "\n" + "\n\n\n".join(bodies) + "\n"


def _packaged(package: str, name: str) -> bytes:
    (path,) = (f for f in files(package) or [] if str(f) == name)
    return Path(str(path.locate())).read_bytes()


if __name__ == "__main__":
    main()
