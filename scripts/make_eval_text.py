"""Write the prose that ``kvq eval perplexity`` scores by default, from a book that a dependency carries.

``apache-tvm-ffi`` ships Newton's *Opticks* (4th edition, 1730; public domain; transcribed by Distributed
Proofreaders) as test data of its stack-trace library. Kept are the Queries that end the third Book, one line
a paragraph, without sidenotes, figures and the transcribers' marks for italics::

    python scripts/make_eval_text.py python/kvq/eval/texts/opticks_queries.txt
"""

from __future__ import annotations

import argparse
import hashlib
import re
from importlib.metadata import files
from pathlib import Path

SOURCE = "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
SOURCE_SHA256 = "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd"
FIRST_WORDS = "_Query_ 1. Do not Bodies act upon Light"


def main() -> None:
    """Parse the command line and write the text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    (path,) = (f for f in files("apache-tvm-ffi") or [] if str(f) == SOURCE)
    raw = Path(str(path.locate())).read_bytes()
    if hashlib.sha256(raw).hexdigest() != SOURCE_SHA256:
        raise SystemExit(f"{SOURCE} is not the edition this script knows")
    book = raw.decode()
    queries = book[book.index(FIRST_WORDS) :].split("FOOTNOTES:")[0]
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", queries))
    text = "\n".join(part.replace("_", "") for part in paragraphs if part and part[0] != "[") + "\n"
    args.output.write_text(text, encoding="utf-8")
    print(f"{args.output}: {len(text.encode())} bytes, sha256 {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main()
