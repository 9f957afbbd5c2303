"""Write the golden logits of every family: Hugging Face transformers, fp32, on the CPU.

Needs ``torch transformers safetensors`` (not dependencies of kvq)::

    python scripts/make_family_goldens.py tests/goldens [NAME ...]

``family_NAME.npz``  of each case in ``tests/tiny_families.py``: ``tokens`` int32 ``[n]``, ``rows`` int32
                     ``[r]``, ``logits`` float32 ``[r, vocab]``, and ``shapes``, JSON text: the tensors of the
                     checkpoint as transformers saves it.
``rope.json``        of each kind of RoPE there: ``inverse_frequency`` and ``attention_factor``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_families import FAMILY_CASES, ROPE_CASES, SIZES, TinyFamily


def checkpoint_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a checkpoint, as transformers saves it."""
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(directory)
        shapes = {}
        for path in Path(directory).glob("*.safetensors"):
            with safe_open(path, "numpy") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return shapes


def write_golden(path: Path, case: TinyFamily) -> None:
    """Write ``family_NAME.npz``."""
    shapes = checkpoint_shapes(case.config())
    with tempfile.TemporaryDirectory() as directory:
        case.write(Path(directory), {name: tuple(shape) for name, shape in shapes.items()})
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        problems = [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]
        if problems:
            raise SystemExit(f"{path.name}: the tensors do not fit: {problems}")
        tokens = case.prompt()
        with torch.inference_mode():
            out = model.eval()(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    logits = out.logits[0].float().numpy()
    rows = np.array(case.rows, np.int32)
    np.savez_compressed(path, tokens=tokens, rows=rows, logits=logits[rows], shapes=json.dumps(shapes))
    print(
        f"{path.name}: {path.stat().st_size} B, max|logit| {np.abs(logits).max():.2f}, std {logits.std():.2f}"
    )


def write_rope(path: Path) -> None:
    """Write ``rope.json``."""
    found = {}
    for name, (keys, context) in ROPE_CASES.items():
        config = AutoConfig.for_model("llama", **{**SIZES, "head_dim": 32, **keys})
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            frequency, attention = StableLmRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            frequency, attention = ROPE_INIT_FUNCTIONS[kind](config, seq_len=context)
        found[name] = {"inverse_frequency": frequency.tolist(), "attention_factor": attention}
    path.write_text(json.dumps(found) + "\n")


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="directory of the golden files")
    parser.add_argument("names", nargs="*", default=list(FAMILY_CASES), help="cases; all by default")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    write_rope(args.output / "rope.json")
    for name in args.names:
        write_golden(args.output / f"family_{name}.npz", FAMILY_CASES[name])


if __name__ == "__main__":
    main()
